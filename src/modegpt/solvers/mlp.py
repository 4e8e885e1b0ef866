"""The MLP: which neurons stay, and the down projection refitted to them."""

from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import Affine, BlockWeights
from ..config import CompressionConfig
from ..decompose import NystromResult, nystrom
from ..decompose.energy import energy, take_back
from ..moments import BlockMoments
from .bias import centred, shifted_bias
from .decision import Decision, Solver

RIDGE = 0.3
"""λ of the energy solver's refit. On text unlike the calibration text the log perplexity of SmolLM2's MLPs at 20 %
rises by 0.552 without a ridge, 0.545 at 0.03, 0.527 at 0.3 and 0.531 at 1 (docs/log.md)."""
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


def energetic(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """The neurons of the largest output energy, and a ridge refit.

    Where the down projection has a bias, both are of what varies: the bias takes over the mean of what is dropped.
    Where the drift from the dense model was measured, a share of it is taken back.
    """
    assert weights.down is not None
    down = weights.down.weight.double()
    moment = centred(moments, "mlp")
    result = energy(moment, down, rank, RIDGE)
    bias = shifted_bias(weights.down.bias, moments, "mlp", down, result.weight, result.kept)
    if (drift := moments.sums.get("mlp_drift")) is not None:
        correction = take_back(moments["mlp"], drift, result.kept, DRIFT_RIDGE)
        result = result._replace(weight=result.weight + config.feedback_share * correction)
    return _decision(weights, moments, result, bias, [])


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


LEVERAGE = Solver(leverage, needs=lambda dims, bias: ("mlp",))
ENERGY = Solver(energetic, needs=lambda dims, bias: ("mlp", "mlp_sum") if bias else ("mlp",), late=True)
