"""Small SVG plots for the screen and for paper: colour-blind safe, and told apart by marker, hatch or dash as well."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import MissingExtraError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, without its yellow, which paper does not show."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
WIDTH = 4.8
"""Inches: narrow enough that a phone shows the text at a readable size."""
CHARACTERS = 56
"""Of a legend's text that fit beside each other, its markers counted as six each."""
STYLE: Any = {
    "font.size": 10,
    "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "modegpt",
    "text.parse_math": False,
}
"""Text stays text (it can be read out, searched and copied), and the same figures give the same bytes."""

Values = Sequence[float | None]


def labels(paths: Sequence[str]) -> list[str]:
    """Return the last part of every path or hub name, or them whole if that would not tell them apart."""
    short = [Path(path).name or path for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _turn(looks: Sequence[Any], index: int) -> Any:
    """Return the look of a series; more of them than there are looks begin anew."""
    return looks[index % len(looks)]


def require_matplotlib(purpose: str, extra: str = "report") -> None:
    """Raise `MissingExtraError` unless matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError(purpose, "matplotlib", extra) from None


def lines(
    series: Mapping[str, tuple[Sequence[float], Values]],
    xlabel: str,
    ylabel: str,
    *,
    log: bool = False,
    labels: Sequence[str] = (),
    whole: bool = False,
    limits: tuple[float, float] | None = None,
) -> str:
    """Draw lines with markers.

    Args:
        series: for each name its x and y values; a point whose y is None or infinite is left out.
        xlabel: of the x axis.
        ylabel: of the y axis.
        log: whether the y axis is logarithmic.
        labels: written beside the points of the first series.
        whole: whether x counts things, so that its ticks are whole numbers.
        limits: of the y axis; by default what the points span.
    """

    def draw(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

        for index, (name, (xs, ys)) in enumerate(series.items()):
            points = [(x, y) for x, y in zip(xs, ys, strict=True) if _is_drawn(y)]
            shape = index + index // len(COLOURS)  # what has the colour of another series has another marker
            style = {
                "color": _turn(COLOURS, index),
                "marker": _turn(MARKERS, shape),
                "linestyle": _turn(DASHES, index),
            }
            axes.plot(*zip(*points, strict=True), label=_entry(name), markersize=4.5, linewidth=1.4, **style)
            for label, (x, y) in zip(labels if index == 0 else (), points, strict=False):
                axes.annotate(label, (x, y), (5, 5), textcoords="offset points", fontsize=9)
        if limits is not None:
            axes.set_ylim(*limits)
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        if whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)

    return _svg(draw, 2.9, legend=len(series) > 1)


def columns(values: Sequence[float], xlabel: str, ylabel: str, level: tuple[str, float] | None = None) -> str:
    """Draw one column for each of a row of numbered things; `level` is the name and height of a line across."""

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes.bar(range(len(values)), values, 0.8, color=COLOURS[0])
        if level is not None:
            axes.axhline(level[1], color="black", linestyle="--", linewidth=1, label=level[0])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)

    return _svg(draw, 2.9, legend=level is not None)


def bars(
    labels: Sequence[str],
    series: Mapping[str, Values],
    xlabel: str,
    *,
    form: str = "{:.2f}",
    errors: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    level: tuple[str, float] | None = None,
) -> str:
    """Draw groups of horizontal bars, with room for long names, and write each value at the end of its bar.

    Args:
        labels: of the groups, from the top.
        series: for each name one value a group; None and what is infinite draws nothing.
        xlabel: of the value axis.
        form: how a value is written.
        errors: how far each value's whiskers reach below and above it, for names that have them.
        level: name and place of a vertical line to compare with.
    """
    width = 0.8 / len(series)

    def draw(axes: Any) -> None:
        for index, (name, values) in enumerate(series.items()):
            own = (errors or {}).get(name, [(0.0, 0.0)] * len(values))
            drawn = [(row, value, own[row]) for row, value in enumerate(values) if _is_drawn(value)]
            places = [row + (index - (len(series) - 1) / 2) * width for row, _, _ in drawn]
            spread = list(zip(*(reach for _, _, reach in drawn), strict=True))
            style = {
                "color": _turn(COLOURS, index),
                "hatch": _turn(HATCHES, index),
                "edgecolor": "white",
                "linewidth": 0,
            }
            whiskers = {"xerr": spread, "error_kw": {"elinewidth": 1, "capsize": 2}} if name in (errors or {}) else {}
            patches = axes.barh(
                places, [value for _, value, _ in drawn], width * 0.92, label=_entry(name), **style, **whiskers
            )
            axes.bar_label(patches, [form.format(value) for _, value, _ in drawn], padding=3, fontsize=9)
        if level is not None:
            axes.axvline(level[1], color="black", linestyle="--", linewidth=1, label=level[0])
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.16)  # room for the values
        axes.set_xlabel(xlabel)

    height = 0.9 + 0.26 * len(labels) * max(1.0, 0.8 * len(series))
    return _svg(draw, height, legend=len(series) + (level is not None) > 1)


def standalone(svg: str, alt: str) -> str:
    """Return a plot as the text of an `.svg` file that names itself to a screen reader."""
    title = alt.replace("&", "&amp;").replace("<", "&lt;")
    named = re.sub(r"<svg[^>]*>", lambda found: f"{found[0]}<title>{title}</title>", svg, count=1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{named}'


def _is_drawn(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _entry(name: str) -> str:
    """Return a name as a legend takes it: from one that begins with `_`, matplotlib makes no entry."""
    return f"\N{ZERO WIDTH SPACE}{name}" if name.startswith("_") else name


def _svg(draw: Callable[[Any], None], height: float, legend: bool) -> str:
    """Return what `draw` puts on a pair of axes as an `<svg>` element."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        if legend:
            _, names = axes.get_legend_handles_labels()
            beside = max(1, min(len(names), CHARACTERS // max(len(name) + 6 for name in names)))
            figure.legend(loc="outside upper left", ncols=beside, columnspacing=1.2)
            figure.set_figheight(height + 0.25 * -(-len(names) // beside))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=False, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Metadata and the global style are for a file of its own; in a page the style would reach everything else.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)
    return svg.strip() + "\n"


def inline(svg: str, prefix: str) -> str:
    """Return a plot to stand in a page among others: its ids made its own, its size left to the page."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
