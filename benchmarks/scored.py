"""Scores of the dense model's blocks, for benchmarks that compress it to many sizes."""

import time
from dataclasses import replace
from typing import Any

import torch

import modegpt
from modegpt.compress import prepare
from modegpt.run import Run


class Scored:
    """Scores of the dense blocks, taken once for each solver and rule, and the ranks that follow from them."""

    def __init__(self, dense: Any, windows: torch.Tensor) -> None:
        """Score nothing yet."""
        self._dense, self._windows = dense, windows
        self._known: dict[tuple[object, ...], tuple[Run, Any, float]] = {}

    def plan(self, config: modegpt.CompressionConfig) -> tuple[modegpt.CompressionConfig, float]:
        """Return the settings with the ranks in place of the rule, and the seconds that the scores took.

        The uniform rule needs no scores: its settings are returned as they are, with 0 seconds.
        """
        if config.allocation == "uniform":
            return config, 0.0
        key = (config.solver, config.allocation, config.seed, *config.modules)
        if key not in self._known:
            start, run = time.perf_counter(), prepare(self._dense, self._windows, config, None, None)
            scores = run.scores()
            self._known[key] = run, scores, round(time.perf_counter() - start, 1)
        run, scores, seconds = self._known[key]
        ranks = replace(run, config=config).allocate(scores).ranks
        return replace(config, allocation="plan", plan=tuple(ranks)), seconds
