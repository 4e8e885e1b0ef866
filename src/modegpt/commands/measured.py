"""What the commands share that make several models and measure them: the options for it, and how the result is told."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from .shared import check_used, console, names

if TYPE_CHECKING:
    from ..comparing.measures import Measures

DATA = typer.Option([], "--data", help="Text to measure perplexity on; may be repeated. wikitext2 without --tasks.")
TASKS = typer.Option([], "--tasks", help="Zero-shot tasks as for eval; with commas, or repeated.")
LIMIT = typer.Option(None, help="Use only the first samples of each task.")
EVAL_SEQ_LEN = typer.Option(None, help="Tokens of its windows; 2048, or the model's positions.")
MAX_WINDOWS = typer.Option(None, help="Use only the first windows of each text.")


def measures(
    data: list[str],
    tasks: list[str],
    limit: int | None,
    eval_seq_len: int | None,
    max_windows: int | None,
    rounds: int = 0,
) -> "Measures":
    """Return what these options ask for."""
    from ..comparing.measures import Measures

    texts = tuple(dict.fromkeys(data)) or (() if tasks else ("wikitext2",))
    check_used(texts, tasks, limit, {"--eval-seq-len": eval_seq_len, "--max-windows": max_windows})
    return Measures(
        data=texts,
        tasks=tuple(name for part in tasks for name in names(part)),
        seq_len=eval_seq_len,
        max_windows=max_windows,
        limit=limit,
        rounds=rounds,
    )


def _of_models(entries: list[dict[str, Any]]) -> list[str]:
    """Return what the single models warn of, each warning once, behind the names of those that do."""
    told: dict[str, list[str]] = {}
    for entry in entries:
        for warning in entry.get("warnings", ()):
            told.setdefault(warning, []).append(entry.get("name") or entry["method"])
    return [f"{', '.join(dict.fromkeys(of))}: {warning}" for warning, of in told.items()]


def tell(result: dict[str, Any], table: Table, out: Path, json_file: str | None) -> None:
    """Print the table of a result, its warnings, and where it was written."""
    screen = console(json_file)
    screen.print(table)
    for warning in [*result["warnings"], *_of_models(result.get("rows") or result["points"])]:
        screen.print(f"warning: {warning}", markup=False, soft_wrap=True)
    screen.print(f"written to {out}", markup=False, soft_wrap=True)
