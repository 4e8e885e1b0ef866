"""The curves of a comparison: perplexity against what was removed, a line for each method."""

import math
from pathlib import Path
from typing import Any

from ..disk import write_whole
from . import plots
from .sweep_plots import REMOVED


def draw(table: dict[str, Any], path: Path) -> None:
    """Write the plot of a comparison's first text as an `.svg` file.

    Args:
        table: what `compare` returns, with perplexities.
        path: of the file.
    """
    dense, *rows = table["rows"]
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        removed, values = series.setdefault(row["method"], ([0.0], [_perplexity(dense)]))
        removed.append(100 * row["sparsity"]["blocks"])
        values.append(_perplexity(row))
    finite = [value for value in map(_perplexity, rows) if math.isfinite(value)]
    text, wide = Path(dense["perplexity"][0]["data"]).name, max(finite, default=0) > 10 * _perplexity(dense)
    svg = plots.lines(series, REMOVED, f"perplexity, {text}", log=wide)
    alt = f"Perplexity of {Path(table['model']).name} on {text} against the share removed, by {', '.join(series)}."
    write_whole(plots.standalone(svg, alt), path)


def _perplexity(row: dict[str, Any]) -> float:
    return row["perplexity"][0]["perplexity"]
