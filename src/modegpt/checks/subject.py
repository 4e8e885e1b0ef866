"""The models that the checks look at, and how their logits are compared."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..architectures import Architecture, Dimensions
from ..compress import compress
from ..config import CompressionConfig
from ..observing.in_turn import in_turn
from .densify import in_float64

ROWS, LENGTH = 2, 24
"""Tokens of a check: more than the sliding window and the trained length of a tiny model."""
SMALL = 10**7
"""Parameters below which a model is checked in float64."""
ROUNDING = 1e4
"""Allowed difference of two ways to compute the same logits, in roundings of the largest: some hundred operations in
another order, with room for the refit's large weights. A wrong coordinate changes the logits by their own size."""


@dataclass
class Subject:
    """The models that the checks look at."""

    original: Any
    """As it was given: what is compressed."""
    compressed: Any
    dense: Any
    """What the compressed model is held against: the original, in float64 where it is small."""
    architecture: Architecture
    dims: Dimensions

    @property
    def small(self) -> bool:
        """Whether copies in float64, where a wrong number stands out from rounding, cost nothing."""
        return self.original.num_parameters() < SMALL

    def compress(self, windows: Tensor, sparsity: float) -> Any:
        """Return the original, compressed, in the dtype of `dense`."""
        model = compress(self.original, windows, CompressionConfig(sparsity=sparsity))
        return in_float64(model) if self.small else model

    @property
    def ids(self) -> Tensor:
        """Token ids to run."""
        return random_ids(ROWS, LENGTH, self.dense.config, seed=1)

    def allowed(self, logits: Tensor, eager: bool = False) -> float:
        """Return the difference from `logits` that rounding explains.

        Whatever the dtype, stock eager attention takes its softmax in float32, and some families rotate or route in it.
        """
        upcast = eager or not self.dense._supports_sdpa or self.architecture.upcast_rotary or self.architecture.float32
        dtype = torch.float32 if upcast else logits.dtype
        return ROUNDING * torch.finfo(dtype).eps * logits.abs().max().item()


def random_ids(rows: int, length: int, config: Any, seed: int) -> Tensor:
    """Return random token ids, without the first three, which are often special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Return the logits of a full forward pass, on the CPU."""
    return model(ids.to(model.device), use_cache=False, **options).logits.cpu()


def run_hooked(subject: Subject, hooks: list[RemovableHandle]) -> None:
    """Run the dense model with hooks that are already in place, and take them away.

    Experts are called as a run calls them.
    """
    try:
        with in_turn(subject.dense):
            logits(subject.dense, subject.ids)
    finally:
        for hook in hooks:
            hook.remove()


def verdict(difference: float, allowed: float, passed: str, failed: str) -> tuple[str, str]:
    """Return result and meaning of a check that compares logits."""
    told = f"logits differ by {difference:.1e} at most, allowed {allowed:.1e}"
    # Written so that a NaN fails.
    return ("passed", f"{passed} ({told})") if difference <= allowed else ("failed", f"{failed} ({told})")


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference."""
    return (result - expected).abs().max().item()
