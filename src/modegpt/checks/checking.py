"""What modegpt can do with a model: the checks of `checks/`, run on one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..architectures import architecture_of
from ..progress import Progress
from . import compressed, family
from .densify import in_float64
from .subject import Subject, random_ids
from .tiny import random_model, tiny_config

WINDOW = 64
TOKENS_PER_NEURON = 4
"""Calibration tokens, random ids, as no quality is measured. With fewer than neurons, the refit is ill-conditioned and
its large weights amplify rounding."""


@dataclass(frozen=True)
class Check:
    """One line of the answer."""

    name: str
    result: str
    """`told` (a fact), `passed`, `failed` or `skipped`."""
    meaning: str


def make_tiny(config: PreTrainedConfig) -> Any:
    """Return a small random model with the switches of `config`."""
    return random_model(tiny_config(config, architecture_of(config)))


def run_checks(dense: Any, sparsity: float, progress: Progress | None = None) -> list[Check]:
    """Compress a model and hold it against what must be true of every compressed model.

    A check that raises is a failed check: of a family in the making, the first ones to break tell the most.

    Args:
        dense: a causal language model, in float32.
        sparsity: to compress it by.
        progress: called with `check`, the checks done and the checks in all.
    """
    architecture = architecture_of(dense.config)
    dims = architecture.dimensions(dense.config)
    windows = random_ids(max(8, TOKENS_PER_NEURON * dims.d_int // WINDOW), WINDOW, dense.config, seed=2)
    subject = Subject(dense, None, dense, architecture, dims)
    subject.dense = in_float64(dense) if subject.small else dense
    done: list[Check] = []
    for name, check in CHECKS.items():
        try:
            if subject.compressed is None and check is not family.sparsity_zero:
                subject.compressed = subject.compress(windows, sparsity)
            result, meaning = check(subject)
        except Exception as problem:  # whatever breaks is the answer
            result, meaning = "failed", f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        done.append(Check(name, result, meaning))
        if progress is not None:
            progress("check", len(done), len(CHECKS))
    return done


CHECKS: dict[str, Callable[[Subject], tuple[str, str]]] = {
    "sparsity 0": family.sparsity_zero,
    "zeroed coordinates": family.zeroed,
    "order in a block": family.order,
    "what the MLP adds": family.mlp_sum,
    "parameter count": compressed.parameter_count,
    "fresh process": compressed.fresh_process,
    "cached generation": compressed.cached_generation,
    "sdpa and eager": compressed.kernels,
    "export": compressed.stock_class,
}
