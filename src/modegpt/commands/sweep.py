"""`modegpt sweep`: one model at several sparsities."""

import os
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from ..config import CompressionConfig
from ..pages.plots import labels
from .measured import DATA, EVAL_SEQ_LEN, LIMIT, MAX_WINDOWS, TASKS, measures, tell
from .settings import configured
from .shared import JSON, MODEL, begin, check_json, emit, numbers


@configured("sparsity", "plan")
def sweep(
    model: str = MODEL,
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for points, table and plots."),
    sparsity: str = typer.Option("0.1,0.2,0.3,0.4,0.5", help="Shares to remove, with commas; dense is always there."),
    calibration: str = typer.Option("wikitext2", help="wikitext2, ptb, c4, alpaca, python-docs, or a text file."),
    *,
    config: CompressionConfig,
    data: list[str] = DATA,
    tasks: list[str] = TASKS,
    limit: int | None = LIMIT,
    eval_seq_len: int | None = EVAL_SEQ_LEN,
    max_windows: int | None = MAX_WINDOWS,
    rounds: int = typer.Option(3, help="Timed rounds of each point, in turn with the dense model; 0 for none."),
    keep_models: bool = typer.Option(False, "--keep-models", help="Keep the checkpoints, in DIR/models."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Measure all points anew."),
    json_file: str | None = JSON,
) -> None:
    """Compress and measure MODEL at several sparsities; a sweep that was stopped goes on where it was."""
    shares = numbers("sparsity", sparsity)
    own = [out / name for name in ("points", "models", "scores.json")]
    check_json(json_file, model, calibration, *data, *tasks, kept=own)
    begin()
    # The profiler, which counts memory on a CPU, reports its start and end on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ..comparing.sweep import sweep as run_sweep
    from .progress_bar import ProgressBar

    asked = measures(data, tasks, limit, eval_seq_len, max_windows, rounds)
    with ProgressBar("reading model and text") as progress:
        result = run_sweep(
            model,
            calibration,
            out,
            shares,
            config,
            asked,
            keep_models=keep_models,
            overwrite=overwrite,
            progress=progress,
        )
    emit(result, json_file)
    tell(result, _table(result), out, json_file)


def _table(result: dict[str, Any]) -> Table:
    """Return what a person reads: one row a point."""
    texts = [entry["data"] for entry in result["points"][0]["perplexity"]]
    headings = (escape(f"perplexity, {label}") for label in labels(texts))
    table = Table("sparsity", "of the blocks", "parameters", *headings)
    if result["points"][0]["mean"]:
        table.add_column("mean accuracy")
    timed = any(point["speed"] for point in result["points"])
    for heading in ("prefill", "decode") if timed else ():
        table.add_column(f"{heading}, x dense")
    for point in result["points"]:
        cells = [point["name"], f"{point['sparsity']['blocks']:.2%}", f"{point['parameters']:,}"]
        cells += [f"{entry['perplexity']:.4f}" for entry in point["perplexity"]]
        if point["mean"]:
            cells.append(f"{point['mean']['acc']:.2%}")
        if point["speed"]:
            ratios = [point["speed"]["speedup"][task] for task in ("prefill", "decode")]
            cells += [f"{r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})" for r in ratios]
        table.add_row(*cells)
    return table
