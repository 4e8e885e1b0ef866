"""One model's accuracy over another's on the same samples, with the error that pairing leaves.

Two models are right on mostly the same samples. The standard error of each accuracy holds what makes samples easy or
hard for both, which their difference does not.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple


class Difference(NamedTuple):
    """One model's accuracies less another's."""

    acc: float
    acc_stderr: float | None
    """Of sampling the questions; None for a single sample."""
    acc_norm: float | None
    """None where the task defines none."""
    acc_norm_stderr: float | None


class Comparison(NamedTuple):
    """What separates two models."""

    tasks: dict[str, Difference]
    mean: Difference
    """Unweighted over tasks; `acc_norm` takes `acc` where a task has no other."""


def paired(of: Sequence[float], over: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of `d_i = of_i − over_i` over n samples and its standard error, `√(Σ (d_i − d̄)² / (n − 1) / n)`.

    Args:
        of: a figure of each sample with one model.
        over: the same figure of the same samples with another.
    """
    found = [a - b for a, b in zip(of, over, strict=True)]
    return fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None


def compare(
    of: Mapping[str, Mapping[str, Sequence[float]]], over: Mapping[str, Mapping[str, Sequence[float]]]
) -> Comparison:
    """Return the differences of the tasks' accuracies, and their means, whose variances add: tasks are sampled apart.

    Args:
        of: of one model `acc`, and `acc_norm` where there is one, of each sample of each task.
        over: the same of another model.
    """
    plain = {task: paired(figures["acc"], over[task]["acc"]) for task, figures in of.items()}
    normed = {
        task: paired(figures["acc_norm"], over[task]["acc_norm"])
        for task, figures in of.items()
        if "acc_norm" in figures
    }
    tasks = {task: Difference(*plain[task], *normed.get(task, (None, None))) for task in of}
    return Comparison(tasks, Difference(*_mean([*plain.values()]), *_mean([*(plain | normed).values()])))


def _mean(parts: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    known = [error for _, error in parts if error is not None]
    error = math.hypot(*known) / len(parts) if len(known) == len(parts) else None
    return fmean(value for value, _ in parts), error
