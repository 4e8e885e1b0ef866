"""The two curves of a sweep."""

from pathlib import Path
from typing import Any

from . import plots


def draw(table: dict[str, Any], folder: Path) -> None:
    """Draw perplexity against the share removed, and against speed where it was measured."""
    points = table["points"]
    removed = [100 * point["sparsity"]["blocks"] for point in points]
    found = [{entry["data"]: entry["perplexity"] for entry in point["perplexity"]} for point in points]
    texts = list(found[0])
    by_share = {Path(text).name: (removed, [own[text] for own in found]) for text in texts}
    wide = max(max(own.values()) for own in found) > 10 * min(min(own.values()) for own in found)
    told = "; ".join(
        f"{share:.1f} %: {', '.join(f'{value:.2f}' for value in own.values())}"
        for share, own in zip(removed, found, strict=True)
    )
    svg = plots.lines(by_share, "% of the decoder blocks' parameters removed", "perplexity", log=wide)
    alt = f"Perplexity of {table['model']} against the share of parameters removed. {told}."
    (folder / "perplexity.svg").write_text(plots.standalone(svg, alt), encoding="utf-8")
    if any(point["speed"] for point in points):
        named = [point["name"] for point in points]
        series = {}
        for task in ("decode", "prefill"):
            speeds = [1.0 if p["speed"] is None else p["speed"]["speedup"][task]["median"] for p in points]
            series[task] = (speeds, [own[texts[0]] for own in found])
        svg = plots.lines(
            series, "speed / speed of the dense model", f"perplexity, {Path(texts[0]).name}", log=wide, labels=named
        )
        alt = f"Perplexity of {table['model']} against its speed over that of the dense model."
        (folder / "throughput.svg").write_text(plots.standalone(svg, alt), encoding="utf-8")
