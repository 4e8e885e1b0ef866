"""The dry run: what a compression would do to every layer, and about what it would cost."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .allocation import Allocation
from .compress import prepare
from .config import CompressionConfig
from .progress import Progress
from .ranks.units import COLUMNS
from .ranks.whole import told
from .report import budget, protocol
from .running.estimate import estimate
from .running.lending import lent
from .running.sizes import cached_numbers
from .running.source import Source
from .running.text import plain_text


def make_plan(
    model: PreTrainedModel | str | Path,
    calibration: str | Path | torch.Tensor,
    config: CompressionConfig,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score and allocate as `compress` would, and compress nothing.

    Arguments and errors as for `compress`. Rules that need no scores read no calibration text; token ids have a shape,
    which is then that of the text.

    Returns:
        `layers` (score, sparsity, ranks, parameters of each), `parameters`, `sparsity`, `kv_bytes_per_token`,
        `estimate` (memory and time without scoring), `scoring_seconds`, `warnings`; `compress --plan` takes the same
        JSON back.
    """
    given = config.allocation in COLUMNS or isinstance(calibration, torch.Tensor)
    run = prepare(model, calibration if given else plain_text(config), config, tokenizer, progress)
    run.check()
    start = time.perf_counter()
    with lent(model):
        scores = run.scores()
    scoring = None if scores is None else round(time.perf_counter() - start, 3)
    allocation = run.allocate(scores)
    source, sizes = run.source, run.sizes
    dense = sum(parameter.numel() for parameter in source.blocks.model.parameters())
    removed = [size.removed(ranks) for size, ranks in zip(sizes, allocation.ranks, strict=True)]
    layers = []
    for index, (size, ranks) in enumerate(zip(sizes, allocation.ranks, strict=True)):
        score = None if scores is None else scores[index].tolist()
        parameters = {"dense": size.total, "compressed": size.total - removed[index]}
        layers.append(
            {
                "score": score,
                "sparsity": removed[index] / size.total,
                "ranks": told(ranks, size.unranked),
                "parameters": parameters,
            }
        )
    return {
        "model": source.name,
        "config": config.as_dict(),
        "temperature": allocation.temperature,
        "layers": layers,
        **budget(sizes, allocation.ranks, dense, config.asked),
        "kv_bytes_per_token": _cache_bytes(source, allocation, run.out_dtype),
        "estimate": estimate(source, sizes, config, run.text.windows.shape, run.device),
        "scoring_seconds": scoring,
        "warnings": source.notes + allocation.warnings,
        **protocol(),
    }


def _cache_bytes(source: Source, allocation: Allocation, dtype: torch.dtype) -> dict[str, int]:
    numbers = cached_numbers(source.blocks.layers, source.architecture, source.dims, allocation.ranks)
    return {name: number * dtype.itemsize for name, number in numbers.items()}
