"""`modegpt compare`: this package's solvers and other training-free methods, side by side."""

from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from ..cli_support import JSON, MODEL, check_file, check_json, console, emit, names, numbers, quiet
from ..config import CompressionConfig
from ..errors import InputError
from .settings import configured


@configured("sparsity", "plan", "solver", "mlp_solver", "qk_solver", "vo_solver", "dtype", "max_host_memory")
def compare(
    model: str = MODEL,
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for the rows and compare.json."),
    sparsity: str = typer.Option("0.2", help="Shares of the blocks' parameters to remove, with commas."),
    methods: str = typer.Option(
        "best,paper,shortgpt,sleb,flap,wanda-sp,svd-llm,slicegpt",
        help="With commas; best:error and the like take another rule for ranks.",
    ),
    calibration: str = typer.Option("wikitext2", help="wikitext2, ptb, c4, alpaca, python-docs, or a text file."),
    *,
    config: CompressionConfig,
    data: list[str] = typer.Option(
        [], "--data", help="Text to measure perplexity on; may be repeated. wikitext2 without --tasks."
    ),
    tasks: list[str] = typer.Option([], "--tasks", help="Zero-shot tasks as for eval; with commas, or repeated."),
    limit: int | None = typer.Option(None, help="Use only the first samples of each task."),
    eval_seq_len: int | None = typer.Option(None, help="Tokens of its windows; 2048, or the model's positions."),
    max_windows: int | None = typer.Option(None, help="Use only the first windows of each text."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Make and measure all rows anew."),
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.svg", help="Draw perplexity by what was removed."),
    json_file: str | None = JSON,
) -> None:
    """Compare methods on MODEL, all with the same text and sparsity; one that was stopped goes on where it was."""
    shares = numbers("sparsity", sparsity)
    check_json(json_file)
    if plot is not None:
        _check_plot(plot, bool(data) or not tasks)
    quiet()
    from ..compare import compare as run_comparison
    from ..measures import Measures
    from ..progress import ProgressBar

    measures = Measures(
        data=tuple(dict.fromkeys(data)) or (() if tasks else ("wikitext2",)),
        tasks=tuple(name for part in tasks for name in names(part)),
        seq_len=eval_seq_len,
        max_windows=max_windows,
        limit=limit,
        rounds=0,
    )
    with ProgressBar("reading model and text") as progress:
        result = run_comparison(
            model, calibration, out, names(methods), shares, config, measures, overwrite=overwrite, progress=progress
        )
    emit(result, json_file)
    if plot is not None:
        from ..compare_plot import draw

        draw(result, plot)
    screen = console(json_file)
    screen.print(_table(result))
    for warning in result["warnings"]:
        screen.print(f"warning: {warning}", markup=False, soft_wrap=True)
    screen.print(f"written to {out}", markup=False, soft_wrap=True)


def _check_plot(plot: Path, measured: bool) -> None:
    """Refuse, before the work, a plot that could not be drawn after it."""
    from ..plots import require_matplotlib

    check_file("--plot", plot)
    if plot.suffix.lower() != ".svg":
        raise InputError(f"--plot '{plot}': give a file name that ends in .svg")
    if not measured:
        raise InputError("--plot draws perplexity, and only --tasks were given: add --data")
    require_matplotlib("a plot")


def _table(result: dict[str, Any]) -> Table:
    """Return what a person reads: one row for each method and sparsity, the best of a sparsity marked."""
    first, rows = result["rows"][0], result["rows"]
    table = Table("asked for", "method", "of the blocks", caption="* best of a sparsity")
    for entry in first["perplexity"]:
        table.add_column(escape(f"perplexity, {Path(entry['data']).name}"))
    if first["mean"]:
        table.add_column("mean accuracy")
    for index, row in enumerate(rows):
        asked = row["sparsity"]["requested"]
        alike = [other for other in rows if other["sparsity"]["requested"] == asked]
        if asked != rows[index - 1]["sparsity"]["requested"]:
            table.add_section()
        cells = []
        for place, entry in enumerate(row["perplexity"]):
            best = min(other["perplexity"][place]["perplexity"] for other in alike)
            cells.append(_marked(f"{entry['perplexity']:.2f}", f"{best:.2f}", len(alike)))
        if row["mean"]:
            best = max(other["mean"]["acc"] for other in alike)
            cells.append(_marked(f"{row['mean']['acc']:.2%}", f"{best:.2%}", len(alike)))
        shown = f"{100 * asked:g}%" if asked else ""
        table.add_row(shown, escape(row["method"]), f"{row['sparsity']['blocks']:.2%}", *cells)
    return table


def _marked(value: str, best: str, count: int) -> str:
    return f"[bold]{value} *[/bold]" if value == best and count > 1 else value
