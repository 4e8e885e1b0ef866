"""The MLP: which neurons stay, and the down projection refitted to them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import Affine, BlockWeights
from ..config import CompressionConfig
from ..decompose import NystromResult, nystrom
from ..decompose.energy import energy, take_back
from ..decompose.saliency import saliency
from ..moments import BlockMoments
from .bias import centred, shifted_bias
from .decision import Decide, Decision, Solver

RIDGE = 0.3
"""λ of the refit of `energy` and `saliency`. On text unlike the calibration text the log perplexity of SmolLM2's MLPs
at 20 % rises by 0.552 without a ridge, 0.545 at 0.03, 0.527 at 0.3 and 0.531 at 1 (docs/log.md)."""
SALIENCY_RIDGE = 0.03
"""μ of the saliencies. At 30 % the log perplexity of SmolLM2 rises by 0.380 on text like and 0.868 on text unlike the
calibration text with 0.03, and by 0.384 and 0.873 with 0.1 (docs/log.md)."""
DRIFT_RIDGE = 1.0
"""λ of the correction of the drift, which must not follow the calibration text closely (docs/log.md)."""


def leverage(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """The paper's: ridge leverage scores and least squares (Algorithm 1)."""
    assert weights.down is not None
    result = nystrom(moments["mlp"], weights.down.weight.double(), rank, config.ridge)
    notes = [f"leverage scores needed jitter of {result.jitter:.1e} of the diagonal"] if result.jitter else []
    return _decision(weights, moments, result, weights.down.bias, notes)


def fed(select: Callable[[Tensor, Tensor, int], NystromResult]) -> Decide:
    """Return a solver that chooses neurons by what they write, and refits with a ridge.

    Where the down projection has a bias, both are of what varies: the bias takes over the mean of what is dropped.
    Where the drift from the dense model was measured, a share of it is taken back.
    """

    def decide(
        weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
    ) -> Decision:
        assert weights.down is not None
        down = weights.down.weight.double()
        moment = centred(moments, "mlp")
        result = select(moment, down, rank)
        bias = shifted_bias(weights.down.bias, moments, "mlp", down, result.weight, result.kept)
        if "mlp_target" in moments.sums:
            correction = take_back(moments["mlp"], _drift(moments, weights.down), result.kept, DRIFT_RIDGE)
            result = result._replace(weight=result.weight + config.feedback_share * correction)
        return _decision(weights, moments, result, bias, [])

    return decide


def _drift(moments: BlockMoments, down: Affine) -> Tensor:
    """Return `Σ z rᵀ` with `r = y − W z − b`, what the block's output would lack of the dense model's."""
    drift = moments["mlp_target"] - moments["mlp"] @ down.weight.double().mT
    return drift if down.bias is None else drift - torch.outer(moments["mlp_sum"], down.bias.double())


def _decision(
    weights: BlockWeights, moments: BlockMoments, result: NystromResult, bias: Tensor | None, notes: list[str]
) -> Decision:
    dead = int((moments["mlp"].diagonal() == 0).sum())
    notes = [f"{dead} neurons are zero on the whole calibration text", *notes] if dead else notes
    if result.deficiency:
        rank = len(result.kept)
        notes.append(f"the kept moment lacks {result.deficiency} of {rank} ranks; a pseudo-inverse was used")
    ups = tuple(up.rows(result.kept) for up in weights.ups)
    return Decision({"ups": ups, "down": Affine(result.weight, bias)}, result.error, notes)


def _centred_needs(_dims: Dimensions, bias: bool) -> tuple[str, ...]:
    return ("mlp", "mlp_sum") if bias else ("mlp",)


LEVERAGE = Solver(leverage, needs=lambda dims, bias: ("mlp",))
ENERGY = Solver(fed(partial(energy, ridge=RIDGE)), needs=_centred_needs, late=True)
SALIENCY = Solver(fed(partial(saliency, ridge=SALIENCY_RIDGE, refit_ridge=RIDGE)), needs=_centred_needs, late=True)
