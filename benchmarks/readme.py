"""What the README's figures are made with: the result files of benchmarks, and Markdown tables."""

import json
from typing import Any

from common import RESULTS


def load(name: str) -> dict[str, Any] | None:
    """Return a result file, or None if that benchmark has not been run."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
