"""What tables of figures are made with: the result files of benchmarks, and Markdown."""

import json
import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from result_file import RESULTS

MODEL = "SmolLM2-135M-Instruct"
"""What the file of the demo model is called in text."""


def load(name: str) -> dict[str, Any] | None:
    """Return a result file, or None if that benchmark has not been run."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def section(name: str) -> Callable[[Callable[[dict[str, Any]], str]], Callable[[], str]]:
    """Let a section be written from a result file; it is empty if that benchmark has not been run."""

    def read(write: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
        @wraps(write)
        def written() -> str:
            data = load(name)
            return "" if data is None else write(data)

        return written

    return read


def first_draw(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows without those that repeat one with another seed."""
    return [row for row in data["rows"] if not row.get("seed")]


def shown(value: float | None) -> str:
    """Return a figure with one decimal; nothing for one that was not measured."""
    return "" if value is None else f"{value:.1f}"


def risen(perplexity: float, dense: float) -> str:
    """Return a perplexity, and the rise of its logarithm."""
    return f"{perplexity:.1f} ({math.log(perplexity / dense):.2f})"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
