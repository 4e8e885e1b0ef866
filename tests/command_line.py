"""Commands run in the process of the test, and what a refused one must look like."""

from rich.table import Table
from typer.testing import CliRunner, Result

from modegpt.cli import app


def modegpt(*args: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def cells(table: Table) -> list[tuple[object, ...]]:
    """What a table shows, row by row."""
    return list(zip(*(column.cells for column in table.columns), strict=True))


def assert_refused(result: Result, *words: str, code: int = 2) -> None:
    """One line on standard error that holds `words`, nothing on standard output, and the exit code."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
