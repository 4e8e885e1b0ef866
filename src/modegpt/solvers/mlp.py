"""The MLP: which neurons stay, and the down projection refitted to them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import Affine, BlockWeights
from ..config import CompressionConfig
from ..decompose import NystromResult, nystrom, psd
from ..decompose.asymmetric import asymmetric_refit
from ..decompose.energy import energy_scores
from ..decompose.fold import folded_up, own_share
from ..decompose.nystrom import damped_loss, highest, keep_highest, refit_weight
from ..decompose.saliency import saliencies
from ..moments import BlockMoments
from .bias import centred, shifted_bias
from .decision import Decide, Decision, Solver

RIDGE = 0.3
"""λ of the refit of `energy` and `saliency`. On text unlike the calibration text the log perplexity of SmolLM2's MLPs
at 20 % rises by 0.552 without a ridge, 0.545 at 0.03, 0.527 at 0.3 and 0.531 at 1 (docs/log.md)."""
TARGET_RIDGE = 1.0
"""λ of the refit to the dense model's stream, which must not follow the calibration text closely. At 30 % SmolLM2's log
perplexity rises by 0.410, 0.877 and 0.793 on three held-out texts with 0.3, by 0.391, 0.865 and 0.770 with 0.6, and by
0.395, 0.870 and 0.765 with 1 (docs/log.md)."""
FIRST_RIDGE = 0.1
"""The same where no block before was compressed: nothing has drifted, so what is fitted is no noise. It takes 10 to
22 % off what SmolLM2's first MLP costs alone (docs/log.md)."""
FOLD_RIDGE = 0.5
"""μ of the change of the up rows. On held-out text SmolLM2 at 30 % diverges by 0.5 % less with 1 than with 3, and by
0.8 % less again with 0.5 and tokens weighted by their norms (docs/log.md)."""
GATE_RIDGE = 0.3
"""μ of the share of a gate that no other gate tells. At 30 % the share takes 2 to 3 % off the rise of SmolLM2's log
perplexity on text like the calibration text, and nothing elsewhere; its square loses on all texts (docs/log.md)."""
SALIENCY_RIDGE = 0.03
"""μ of the saliencies. At 30 % the log perplexity of SmolLM2 rises by 0.380 on text like and 0.868 on text unlike the
calibration text with 0.03, and by 0.384 and 0.873 with 0.1 (docs/log.md)."""

MARGIN = 0.95
"""Of the loss of the saliencies' set, what the energies' must at most have to be taken for it (docs/log.md)."""


def leverage(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """The paper's: ridge leverage scores and least squares (Algorithm 1)."""
    assert weights.down is not None
    result = nystrom(moments["mlp"], weights.down.weight.double(), rank, config.ridge)
    notes = [f"leverage scores needed jitter of {result.jitter:.1e} of the diagonal"] if result.jitter else []
    return _decision(weights, moments, result, weights.down.bias, notes)


def late(*scores: Callable[[Tensor, Tensor], Tensor]) -> Decide:
    """Return a solver that chooses neurons by what they write, and refits with a ridge (`keep_highest`).

    Of two scores it takes, in each layer, the one whose highest neurons lose less after a refit (`chosen_scores`).
    Where the down projection has a bias, all are of what varies: the bias takes over the mean of what is dropped.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """

    def decide(
        weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
    ) -> Decision:
        assert weights.down is not None
        down, moment = weights.down.weight.double(), centred(moments, "mlp")
        psd.require_finite(down, "the down projection")
        psd.require_finite(moment, "the moment of the MLP")
        # The gain is for the choice alone: least squares go row by row, and it may be 0.
        heard = _heard(down, weights.mlp_gain).float()
        # In float32, as `ahead` does: what is left of states that hardly vary is rounding error, for which the jitter
        # of float64 is too small, and no choice of neurons in SmolLM2 is another one.
        rounded = moment.float()
        own = chosen_scores([score(rounded, heard) for score in scores], rounded, heard, rank)
        result = keep_highest(moment, down, own, rank, RIDGE)
        bias = shifted_bias(weights.down.bias, moments, "mlp", down, result.weight, lambda mean: mean[result.kept])
        return _decision(weights, moments, result, bias, [])

    return decide


def ahead(*scores: Callable[[Tensor, Tensor], Tensor]) -> Decide:
    """Return what chooses neurons by the dense model's moments; `towards` refits them later, to other ones.

    Of two scores it takes, in each layer, the one whose highest neurons lose less after a refit (`chosen_scores`).
    Of a gated MLP whose gates were measured, the up rows that stay take over a part of what goes (`decompose.fold`),
    and a neuron whose gate others tell is chosen less. Where the Fisher information of the logits was measured, what
    they feel of a neuron counts as much as what the residual stream does.
    """

    def decide(
        weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
    ) -> Decision:
        assert weights.down is not None
        down, moment = _heard(weights.down.weight.float(), weights.mlp_gain), as_used(moments)
        own = chosen_scores([score(moment, down) for score in scores], moment, down, rank)
        gated = "gate" in moments.sums
        if gated:
            own = own * own_share(moments["gate"], GATE_RIDGE)
        if "fisher" in moments.sums:
            felt = felt_by_logits(moments, own, energy_scores(moment, down))
            own = _scaled(own) + _scaled(felt)
        kept = highest(own, rank)
        ups = [up.rows(kept) for up in weights.ups]
        if gated:
            ups[1] = _folded(weights.ups[1], moments["gate"], moment, down, kept)
        return Decision(
            {"ups": tuple(ups), "down": Affine(weights.down.weight[:, kept], weights.down.bias)}, 0.0, _dead(moments)
        )

    return decide


def chosen_scores(candidates: Sequence[Tensor], moment: Tensor, down: Tensor, rank: int) -> Tensor:
    """Return the first of one or two scores, or the second if its `rank` highest neurons lose clearly less.

    By `damped_loss`, what the ridge refit leaves, less than `MARGIN` of the other's. The score of one neuron does not
    know what goes with it: where two tell the same, the saliency finds both cheap, as each would make up for the other.
    Cost: a factor and a triangular solve in float32 for each of two; nothing for one.
    """
    if len(candidates) == 1:
        return candidates[0]
    first, other = candidates
    moment, down = moment.float(), down.float()
    left, less = (damped_loss(moment, down, highest(scores, rank), RIDGE) for scores in (first, other))
    return other if less < MARGIN * left else first


def _heard(down: Tensor, gain: Tensor | None) -> Tensor:
    """Return `|γ|^½ ∘ w_i`, by which neurons are chosen; `w_i` where no norm stands behind the MLP.

    The residual stream gets `γ ∘ w_i`, up to the norm's division, and a few coordinates of large `γ` rule that. Halfway
    there the divergence of Gemma 3 at 30 % is 18, 9 and 12 % less than without on three held-out texts; the whole way
    takes another 3 % off one and gives 6 and 4 % back on the others (docs/log.md).
    """
    return down if gain is None else gain.to(down).abs().sqrt()[:, None] * down


def as_used(moments: BlockMoments) -> Tensor:
    """Return `D C D`, `D_ii² = Σ z_i² / C_ii` with the sum over all tokens: the moment of some, as if of all.

    What neurons tell of each other is shared by all tokens, and some thousands tell it. How much a neuron is used hangs
    on few: those it is there for. So a sample decides the correlations, and every token the energies, which are no
    matrix and cost nothing. A neuron that is zero on the sample and not on the rest is told by no other. `C` is of what
    varies where a sum was taken. Where all tokens are in it, it is `C`.

    It is float32: the ridges of those who read it bound the condition of the scaled matrix, and no choice of neurons in
    SmolLM2 or Gemma 3 is another than in float64 (docs/log.md).
    """
    used, energy = centred(moments, "mlp").float(), moments.sums.get("mlp_energy")
    if energy is None:
        return used
    counted = moments["mlp"].diagonal()
    scale = torch.where(counted > 0, energy / counted, 0).sqrt().float()
    used *= scale[:, None]  # in place: at d_int = 28672 a copy is 3.3 GB
    used *= scale
    used.diagonal().add_(torch.where(counted > 0, 0, energy))
    return used


def felt_by_logits(moments: BlockMoments, scores: Tensor, energies: Tensor) -> Tensor:
    """Return `f_i s_i / (C_ii ‖w_i‖²)`, `f_i = Σ_t w_t (z_ti − z̄_i)² (g_tᵀw_i)²`: what the logits lose of a neuron.

    `f` is what they feel of it, up to a factor, and the quotient, of its score and its energy, the share of it that the
    others do not make up for. `z̄` is 0 where the down projection has no bias to carry the mean. `(d_int,)`.

    Args:
        moments: with `fisher`.
        scores: `(d_int,)` `s`.
        energies: `(d_int,)` `C_ii ‖w_i‖²`, of the moment that the scores are of.
    """
    squares, sums, counts = moments["fisher"]
    if "mlp_sum" in moments.sums:
        mean = moments.mean("mlp")
        squares = squares - 2 * mean * sums + mean.square() * counts
    return torch.where(energies > 0, squares.clamp_min(0) * scores / energies, 0)


def _scaled(scores: Tensor) -> Tensor:
    """Return scores of mean 1; all of them 0 if they are."""
    mean = scores.mean()
    return scores / mean if mean > 0 else scores


def _folded(up: Affine, gates: Tensor, moment: Tensor, down: Tensor, kept: Tensor) -> Affine:
    rows = up.weight if up.bias is None else torch.cat((up.weight, up.bias[:, None]), dim=1)
    # The sum of some thousand tokens, taken as if it were independent of the inputs: float32 is more than it is worth.
    # The ridge bounds the condition of the scaled moment by (n + λ)/λ, so the solve keeps three digits at worst.
    rows = rows.float()
    rows = folded_up(gates, rows, down, kept, refit_weight(moment, down, kept, RIDGE), FOLD_RIDGE)
    return Affine(rows, None) if up.bias is None else Affine(rows[:, :-1], rows[:, -1])


def towards(down: Affine, moments: BlockMoments, drifted: bool) -> Decision:
    """Refit the down projection of neurons already chosen to what makes up for all that the block's output lacks.

    Where it has a bias, the bias takes the mean, and the least squares are of what varies. They are solved in float32,
    as by the ridge the condition of the scaled moment is at most `(n + λ)/λ`: what the refit gives the output differs
    from that in float64 by 1e-5 of itself (docs/log.md).
    """
    moment, target, energy = centred(moments, "mlp"), moments["mlp_target"], moments["target_energy"]
    if down.bias is not None:
        mean = moments.mean("target")
        target = target - moments["mlp_sum"][:, None] * mean
        energy = energy - moments.n_tokens * mean.square().sum()
    ridge = TARGET_RIDGE if drifted else FIRST_RIDGE
    result = asymmetric_refit(moment.float(), target.float(), energy, down.weight.float(), ridge)
    bias = None if down.bias is None else mean - result.weight.double() @ moments.mean("mlp")
    return Decision({"down": Affine(result.weight, bias)}, result.error, _deficiency(result))


def _decision(
    weights: BlockWeights, moments: BlockMoments, result: NystromResult, bias: Tensor | None, notes: list[str]
) -> Decision:
    notes = [*_dead(moments), *notes, *_deficiency(result)]
    ups = tuple(up.rows(result.kept) for up in weights.ups)
    return Decision({"ups": ups, "down": Affine(result.weight, bias)}, result.error, notes)


def _dead(moments: BlockMoments) -> list[str]:
    energy = moments.sums.get("mlp_energy")
    dead = int(((moments["mlp"].diagonal() if energy is None else energy) == 0).sum())
    return [f"{dead} neurons are zero on the whole calibration text"] if dead else []


def _deficiency(result: NystromResult) -> list[str]:
    if not result.deficiency:
        return []
    rank = len(result.kept)
    return [f"the kept moment lacks {result.deficiency} of {rank} ranks; a pseudo-inverse was used"]


def _centred_needs(_dims: Dimensions, bias: bool) -> tuple[str, ...]:
    return ("mlp", "mlp_sum") if bias else ("mlp",)


LEVERAGE = Solver(leverage, needs=lambda dims, bias: ("mlp",))


def _late(*scores: Callable[[Tensor, Tensor], Tensor]) -> Solver:
    return Solver(late(*scores), needs=_centred_needs, late=True, ahead=ahead(*scores))


ENERGY = _late(energy_scores)
SALIENCY = _late(partial(saliencies, ridge=SALIENCY_RIDGE), energy_scores)
