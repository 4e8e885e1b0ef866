"""Reads a plan: the ranks of every layer, as `modegpt plan` writes them."""

import json
from pathlib import Path

from ..config import MODULES
from ..errors import InputError


def read_plan(path: str | Path) -> tuple[dict[str, int], ...]:
    """Read the ranks by layer from a plan: the JSON of `modegpt plan`, a `report.json`, or `[{"mlp": ..}, ..]`.

    A module whose rank is null, as where a layer has none, is left out, and so stays whole.

    Raises:
        InputError: the file cannot be read, or is no plan.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"plan '{path}' cannot be read: {problem}") from problem
    layers = data.get("layers") if isinstance(data, dict) else data
    if not isinstance(layers, list) or not layers:
        raise InputError(f"plan '{path}' has no list of layers; make one with modegpt plan --json FILE")
    ranks = [layer.get("ranks", layer) if isinstance(layer, dict) else layer for layer in layers]
    for index, entry in enumerate(ranks):
        if not isinstance(entry, dict) or set(entry) != set(MODULES):
            raise InputError(f"plan '{path}', layer {index}: give the ranks {', '.join(MODULES)}, and nothing else")
    return tuple({module: rank for module, rank in entry.items() if rank is not None} for entry in ranks)
