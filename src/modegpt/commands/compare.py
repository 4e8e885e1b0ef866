"""`modegpt compare`: this package's solvers and other training-free methods, side by side."""

from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from ..config import CompressionConfig
from ..errors import InputError
from ..pages.plots import labels
from .measured import DATA, EVAL_SEQ_LEN, LIMIT, MAX_WINDOWS, TASKS, measures, tell
from .settings import configured
from .shared import JSON, MODEL, begin, check_json, check_plot, emit, names, numbers


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
    data: list[str] = DATA,
    tasks: list[str] = TASKS,
    limit: int | None = LIMIT,
    eval_seq_len: int | None = EVAL_SEQ_LEN,
    max_windows: int | None = MAX_WINDOWS,
    overwrite: bool = typer.Option(False, "--overwrite", help="Make and measure all rows anew."),
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.svg", help="Draw perplexity by what was removed."),
    json_file: str | None = JSON,
) -> None:
    """Compare methods on MODEL, all with the same text and sparsity; one that was stopped goes on where it was."""
    shares = numbers("sparsity", sparsity)
    check_json(json_file, model, calibration, *data, *tasks, out=plot, kept=[out / "rows"])
    if plot is not None:
        _check_plot(plot, bool(data) or not tasks)
    begin()
    from ..comparing.compare import compare as run_comparison
    from .progress_bar import ProgressBar

    asked = measures(data, tasks, limit, eval_seq_len, max_windows)
    with ProgressBar("reading model and text") as progress:
        result = run_comparison(
            model, calibration, out, names(methods), shares, config, asked, overwrite=overwrite, progress=progress
        )
    emit(result, json_file)
    if plot is not None:
        from ..pages.compare_plot import draw

        draw(result, plot)
    tell(result, _table(result), out, json_file)


def _check_plot(plot: Path, measured: bool) -> None:
    """Refuse, before the work, a plot that could not be drawn after it."""
    from ..pages.plots import require_matplotlib

    check_plot(plot, (".svg",))
    if not measured:
        raise InputError("--plot draws perplexity, and only --tasks were given: add --data")
    require_matplotlib("a plot")


def _table(result: dict[str, Any]) -> Table:
    """Return what a person reads: one row for each method and sparsity, the best of a sparsity marked."""
    first, rows = result["rows"][0], result["rows"]
    table = Table("asked for", "method", "of the blocks", caption="* best of a sparsity")
    for label in labels([entry["data"] for entry in first["perplexity"]]):
        table.add_column(escape(f"perplexity, {label}"))
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
