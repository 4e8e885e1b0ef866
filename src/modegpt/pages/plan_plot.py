"""A plan as a picture: what the rule measured of every layer, and what each is to lose."""

import io
from pathlib import Path
from typing import Any

from ..disk import write_whole
from ..ranks.units import score_parts
from .plots import COLOURS, require_matplotlib

BLUE, ORANGE, GREEN = COLOURS[0], COLOURS[4], COLOURS[2]
"""For what a rule scores apart, up to three."""


def require_plotting() -> None:
    """Raise `MissingExtraError` unless a plan can be drawn."""
    require_matplotlib("a plot", "plot")


def plot_plan(plan: dict[str, Any], path: str | Path) -> None:
    """Draw scores and sparsity by layer as bars, readable in print and without colour vision.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_plotting()
    from matplotlib.figure import Figure

    layers = plan["layers"]
    rule = plan["config"]["allocation"]
    scores = [score_parts(rule, layer["score"]) for layer in layers if layer["score"] is not None]
    figure = Figure(figsize=(8, 5 if scores else 3), layout="constrained")
    axes = figure.subplots(2 if scores else 1, 1, sharex=True, squeeze=False)[:, 0]
    numbers = range(len(layers))
    if scores:
        width = 0.8 / len(scores[0])
        for part, label in enumerate(scores[0]):
            places = [number + (part - (len(scores[0]) - 1) / 2) * width for number in numbers]
            colour, hatch = ((BLUE, ""), (ORANGE, "//"), (GREEN, ".."))[part]
            column = [score[label] for score in scores]
            axes[0].bar(places, column, width, label=label, color=colour, hatch=hatch, edgecolor="white")
        axes[0].set_ylabel("score")
        axes[0].set_title("damage by module" if rule == "error" else "importance")
        if len(scores[0]) > 1:
            axes[0].legend(frameon=False)
    axes[-1].bar(numbers, [100 * layer["sparsity"] for layer in layers], 0.8, color=BLUE)
    mean = 100 * plan["sparsity"]["blocks"]
    axes[-1].axhline(mean, color="black", linestyle="--", linewidth=1)
    axes[-1].set_title(f"parameters removed (dashed: {mean:.1f} % of all blocks)")
    axes[-1].set_ylabel("%")
    axes[-1].set_xlabel("layer")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower() or None, dpi=150)
    write_whole(picture.getvalue(), path)
