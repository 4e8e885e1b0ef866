"""One model's accuracy over another's on the same samples, with the error that pairing leaves.

Two models are right on mostly the same samples. The standard error of each accuracy holds what makes samples easy or
hard for both, which their difference does not. Nor does a difference tell how alike two models answer: what one forgets
and what it gets right by chance cancel. Flips count both (Dutta et al., "Accuracy is Not All You Need", NeurIPS 2024).
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
    acc_flips: float
    """The share of samples on which only one of the two is right."""
    acc_norm_flips: float | None


class Comparison(NamedTuple):
    """What separates two models."""

    tasks: dict[str, Difference]
    mean: Difference
    """Unweighted over tasks; `acc_norm` takes `acc` where a task has no other."""


class Paired(NamedTuple):
    """Figures of one model less those of another, over samples."""

    mean: float
    stderr: float | None
    flips: float


def paired(of: Sequence[float], over: Sequence[float]) -> Paired:
    """Return the mean of `d_i = of_i − over_i` over n samples, its standard error, and the mean of `|d_i|`.

    The error is `√(Σ (d_i − d̄)² / (n − 1) / n)`, None for a single sample. The mean of `|d_i|` is, of figures
    that are 0 or 1, the share of flips.

    Args:
        of: a figure of each sample with one model.
        over: the same figure of the same samples with another.
    """
    found = [a - b for a, b in zip(of, over, strict=True)]
    error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
    return Paired(fmean(found), error, fmean(map(abs, found)))


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
    tasks = {task: _difference(plain[task], normed.get(task)) for task in of}
    return Comparison(tasks, _difference(_mean([*plain.values()]), _mean([*(plain | normed).values()])))


def _difference(plain: Paired, normed: Paired | None) -> Difference:
    by_length = normed or (None, None, None)
    return Difference(*plain[:2], *by_length[:2], plain.flips, by_length[2])


def _mean(parts: Sequence[Paired]) -> Paired:
    known = [part.stderr for part in parts if part.stderr is not None]
    error = math.hypot(*known) / len(parts) if len(known) == len(parts) else None
    return Paired(fmean(part.mean for part in parts), error, fmean(part.flips for part in parts))
