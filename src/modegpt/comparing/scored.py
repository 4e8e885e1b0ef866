"""Scores of a dense model's blocks, taken once where it is compressed to several sizes."""

import time
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..compress import prepare
from ..config import CompressionConfig
from ..progress import Progress
from ..running.lending import lent
from ..running.run import Run


class Ranked(NamedTuple):
    """The settings of one size."""

    config: CompressionConfig
    """With the ranks in place of a rule with scores."""
    warnings: list[str]
    """What is to be said of these ranks."""
    seconds: float | None
    """That their scores took, once for all sizes; None for a rule without scores."""


class Scored:
    """Scores by solver, rule, modules and seed, and the ranks that follow from them.

    Args:
        dense: the model, in memory.
        windows: `(samples, seq_len)` calibration windows.
    """

    def __init__(self, dense: PreTrainedModel, windows: Tensor) -> None:
        """Score nothing yet."""
        self._dense, self._windows = dense, windows
        self._known: dict[tuple[Any, ...], tuple[Run, Tensor | None, float]] = {}

    def plan(self, config: CompressionConfig, progress: Progress | None = None) -> Ranked:
        """Return the settings to compress with.

        Raises:
            InputError: the settings cannot reach their sparsity.
        """
        key = (config.solver, config.allocation, config.seed, *config.modules)
        if key not in self._known:
            start, run = time.perf_counter(), prepare(self._dense, self._windows, config, None, progress)
            with lent(self._dense):
                scores = run.scores()
            self._known[key] = run, scores, round(time.perf_counter() - start, 3)
        run, scores, seconds = self._known[key]
        allocation = replace(run, config=config).allocate(scores)
        if scores is None:
            return Ranked(config, [], None)
        ranks = replace(config, allocation="plan", plan=tuple(allocation.ranks))
        return Ranked(ranks, allocation.warnings, seconds)
