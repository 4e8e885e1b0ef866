"""The curves of a sweep: quality against what was removed, and against speed."""

import math
from pathlib import Path
from typing import Any

from ..disk import write_whole
from . import plots

REMOVED = "% of the decoder blocks' parameters removed"


def draw(table: dict[str, Any], folder: Path) -> None:
    """Draw perplexity and accuracy against the share removed, and perplexity against speed, as far as measured."""
    points = table["points"]
    removed = [100 * point["sparsity"]["blocks"] for point in points]
    if points[0]["perplexity"]:
        _write(folder / "perplexity.svg", _perplexity(points, removed), "Perplexity", table, "the share removed")
    if points[0]["tasks"]:
        tasks = {entry["task"]: [] for entry in points[0]["tasks"]}
        for point in points:
            for entry in point["tasks"]:
                tasks[entry["task"]].append(100 * entry["acc"])
        series = {"mean": [100 * point["mean"]["acc"] for point in points], **(tasks if 1 < len(tasks) < 7 else {})}
        svg = plots.lines({name: (removed, own) for name, own in series.items()}, REMOVED, "zero-shot accuracy, %")
        _write(folder / "accuracy.svg", svg, "Zero-shot accuracy", table, "the share removed")
    if points[0]["perplexity"] and any(point["speed"] for point in points):
        _write(folder / "throughput.svg", _throughput(points), "Perplexity", table, "speed over the dense model's")


def _perplexity(points: list[dict[str, Any]], removed: list[float]) -> str:
    texts = plots.labels([entry["data"] for entry in points[0]["perplexity"]])
    columns = zip(*([entry["perplexity"] for entry in point["perplexity"]] for point in points), strict=True)
    series = {text: (removed, list(column)) for text, column in zip(texts, columns, strict=True)}
    return plots.lines(series, REMOVED, "perplexity", log=_is_wide(points))


def _throughput(points: list[dict[str, Any]]) -> str:
    first = [point["perplexity"][0]["perplexity"] for point in points]
    series = {
        task: ([1.0 if p["speed"] is None else p["speed"]["speedup"][task]["median"] for p in points], first)
        for task in ("decode", "prefill")
    }
    text = Path(points[0]["perplexity"][0]["data"]).name
    return plots.lines(
        series,
        "speed / speed of the dense model",
        f"perplexity, {text}",
        log=_is_wide(points),
        labels=[point["name"] for point in points],
    )


def _is_wide(points: list[dict[str, Any]]) -> bool:
    """Whether perplexities differ so much that a plain axis would hide the small ones."""
    values = [entry["perplexity"] for point in points for entry in point["perplexity"]]
    values = [value for value in values if math.isfinite(value)]
    return bool(values) and max(values) > 10 * min(values)


def _write(path: Path, svg: str, what: str, table: dict[str, Any], against: str) -> None:
    names = ", ".join(point["name"] for point in table["points"])
    alt = f"{what} of {Path(table['model']).name} against {against}, at sparsity {names}; sweep.json has the figures."
    write_whole(plots.standalone(svg, alt), path)
