"""docs/layout.md names all of the package, from the commands down; what stands lower imports nothing from above."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "modegpt"


def rows() -> dict[str, int]:
    """The row of each folder and file of the package."""
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {name.rstrip("/"): row for row, cell in enumerate(cells) for name in re.findall(r"`([^`]+)`", cell)}


def imported(text: str, place: tuple[str, ...]) -> Iterator[str]:
    """The folders and files of the package that a file imports from; `place` is the file's path in the package."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        folder = place[: len(place) - level] if level else ()
        start = [part for part in (".".join(folder), module) if part]
        for alias in node.names:
            path = ".".join([*start, alias.name]).split(".")
            if not level and path.pop(0) != PACKAGE.name:
                continue
            yield path[0] if (PACKAGE / path[0]).is_dir() else f"{path[0]}.py"


def test_every_folder_and_file_is_named():
    found = [path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert sorted(rows()) == sorted(name for name in found if not name.startswith("__"))


@pytest.mark.parametrize("name", sorted(rows()))
def test_no_import_goes_up(name: str):
    row, place = rows(), PACKAGE / name
    files = [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))
    for file in files:
        used = imported(file.read_text(encoding="utf-8"), file.relative_to(PACKAGE).parts)
        assert [other for other in used if other != name and row[other] < row[name]] == [], file


def test_imports_are_seen():
    text = "from . import ranks\nfrom .blocks import a\ndef f():\n    from .running.staged import b\n"
    assert list(imported(text, ("cli.py",))) == ["ranks", "blocks.py", "running"]
    text = "from . import psd\nfrom ..errors import a\nfrom .. import config\nimport torch\nfrom os import path\n"
    assert list(imported(text, ("decompose", "cr.py"))) == ["decompose", "errors.py", "config.py"]
    text = "import modegpt.run\nfrom modegpt.cli import main\nfrom modegpt import ranks, blocks\nimport modegptx.a\n"
    assert list(imported(text, ("cli.py",))) == ["run.py", "cli.py", "ranks", "blocks.py"]
