"""What a solver is: which moments it reads, and what it decides."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import BlockWeights
from ..config import CompressionConfig
from ..moments import BlockMoments


@dataclass
class Decision:
    """What a solver decided for one module of a block."""

    weights: dict[str, Any]
    """The narrow fields of `BlockWeights`, by name, in float64 or in the weights' own dtype."""
    error: float
    """Relative reconstruction error, as the solver measures it."""
    notes: list[str] = field(default_factory=list)
    """What had to be repaired."""
    pairs: Tensor | None = None
    """`(n_kv_heads, pairs)`: the rotary pairs kept; None where all or none are."""


Decide = Callable[[BlockWeights, Dimensions, BlockMoments, int, CompressionConfig], Decision]


@dataclass(frozen=True)
class Solver:
    """One way to compress a module."""

    decide: Decide
    """Takes the block's dense weights, its sizes and moments, the rank and the settings."""
    needs: Callable[[Dimensions, bool], tuple[str, ...]]
    """Names the moments it reads, by the sizes and by whether the projection it refits has a bias."""
    late: bool = False
    """Whether its moments are taken after the block's attention has been compressed."""
    ahead: Decide | None = None
    """Chooses what stays before that, by moments of the dense model. The refit that follows is `mlp.towards`."""
