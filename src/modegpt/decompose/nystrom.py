"""Type I, the MLP: select neurons by ridge leverage, refit the down projection by least squares.

Source: Lin et al., ICLR 2025, Theorem 1 and Algorithm 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import psd


class NystromResult(NamedTuple):
    """What the Nyström step decided and how well it did."""

    kept: Tensor
    """`(rank,)` ascending indices of the neurons that stay."""
    weight: Tensor
    """`(d_model, rank)` refitted down projection, float64."""
    error: float
    """`‖Z W_Dᵀ − Z_S Ŵᵀ‖_F / ‖Z W_Dᵀ‖_F` on the calibration tokens."""
    jitter: float
    """Relative jitter that the leverage scores needed (0 when none)."""
    deficiency: int
    """How many directions of the kept moment `C_SS` are numerically zero."""


def inverse_diagonal(moment: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Return `λ[(C+λI)⁻¹]_ii = 1 − s_i` and the jitter, from one Cholesky factor and triangular solves (`2n³/3`).

    The complement of the leverage score is computed, not the score: most scores lie so near 1 that their
    differences, which decide the selection, would be lost in `1 − x`.
    """
    lower, jitter = psd.cholesky(moment, ridge)
    return ridge * psd.inverse_diagonal(lower), jitter


def ridge_leverage_scores(moment: Tensor, ridge: float = 1.0) -> Tensor:
    """Ridge leverage scores `s_i = [C (C + λI)⁻¹]_ii`, each in [0, 1).

    Args:
        moment: `(d_int, d_int)` second moment `C = Σ z zᵀ` of the down projection's input, float64.
        ridge: `λ > 0`. The paper takes 1 on the unnormalised sum.

    Raises:
        NotPositiveDefiniteError: `C + λI` is indefinite or not finite.
    """
    return 1 - inverse_diagonal(moment, ridge)[0]


def refit(moment: Tensor, down: Tensor, kept: Tensor, ridge: float = 0.0) -> tuple[Tensor, float, int]:
    """Least-squares refit of the down projection to the neurons `kept`: `Ŵ_Dᵀ = C_SS⁺ C_S: W_Dᵀ` (Theorem 1).

    Computed as `W_S + C_SS⁺ C_SD W_D`, with `D` the dropped set: the same minimiser with fewer operations, exact
    when nothing is dropped, and where `C_SS` is singular the minimiser nearest to the original weights. A ridge holds
    the correction back, `(C_SS + λ diag C_SS)⁻¹`, so that it tends to the original weights and not to zero.

    Args:
        moment: `(d_int, d_int)` moment `C`, float64.
        down: `(d_model, d_int)` down projection, float64.
        kept: `(rank,)` ascending indices.
        ridge: `λ ≥ 0`; Theorem 1 has none.

    Returns:
        The `(d_model, rank)` weight, the relative Frobenius error of the module's output on the calibration tokens,
        and the rank deficiency of `C_SS`.
    """
    dropped = _dropped(moment, kept)
    if len(dropped) == 0:
        return down.clone(), 0.0, 0
    cross, kept_moment, (correction, rank) = _correct(moment, down, kept, dropped, ridge)
    down_kept, down_dropped = down[:, kept], down[:, dropped]
    # ‖Z W_Dᵀ‖² by its kept part, its dropped part and their product: half the work of one product with all of C.
    dropped_energy = _energy(moment[dropped][:, dropped], down_dropped)
    total = _energy(kept_moment, down_kept) + 2 * (down_kept.mT * cross).sum() + dropped_energy
    residual = dropped_energy - (cross * correction).sum()
    if ridge:  # the correction solves (C_SS + λD)X = cross, so XᵀC_SS X is XᵀcrossX less λ XᵀDX
        residual -= ridge * (kept_moment.diagonal()[:, None] * correction.square()).sum()
    error = (residual.clamp_min(0) / total).sqrt().item() if total > 0 else 0.0
    return down_kept + correction.mT, error, len(kept) - rank


def refit_weight(moment: Tensor, down: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Return the weight that `refit` gives, without the products that its error takes."""
    dropped = _dropped(moment, kept)
    if len(dropped) == 0:
        return down.clone()
    return down[:, kept] + _correct(moment, down, kept, dropped, ridge)[2].x.mT


def damped_loss(moment: Tensor, down: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Return `min_X ‖Z_D W_Dᵀ − Z_S Xᵀ‖² + λ Σ_S C_ii ‖X_i‖²`: what `refit` leaves of a set, its ridge `λ > 0` counted.

    With `C_SS + λ diag C_SS = L Lᵀ` it is `tr(W_D C_DD W_Dᵀ) − ‖L⁻¹ C_SD W_Dᵀ‖²`. Cost: `rank³/3 + rank²·d_model` and
    the products of `refit_weight`.
    """
    dropped = _dropped(moment, kept)
    if len(dropped) == 0:
        return moment.new_zeros(())
    cross, kept_moment = _crossed(moment, down, kept, dropped)
    size = kept_moment.diagonal()
    lower, _jitter = psd.cholesky(kept_moment, torch.where(size > 0, ridge * size, 1))
    made_up = torch.linalg.solve_triangular(lower, cross, upper=False).square().sum()
    return _energy(moment[dropped][:, dropped], down[:, dropped]) - made_up


def _dropped(moment: Tensor, kept: Tensor) -> Tensor:
    dropped = torch.ones(len(moment), dtype=torch.bool, device=moment.device)
    dropped[kept] = False
    return dropped.nonzero().squeeze(1)


def _crossed(moment: Tensor, down: Tensor, kept: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """Return `C_SD W_D` and `C_SS`. Of all of `C_S:`, 4.6 GB at `d_int = 28672`, nothing stays."""
    rows = moment[kept]
    return rows[:, dropped] @ down[:, dropped].mT, rows[:, kept]


def _correct(
    moment: Tensor, down: Tensor, kept: Tensor, dropped: Tensor, ridge: float
) -> tuple[Tensor, Tensor, psd.Solution]:
    """Return `C_SD W_D`, `C_SS`, and what the kept rows of the weight are corrected by."""
    cross, kept_moment = _crossed(moment, down, kept, dropped)
    diagonal = kept_moment.diagonal().clone()
    kept_moment.diagonal().mul_(1 + ridge)
    found = psd.solve(kept_moment, cross, psd.KNOWN)
    kept_moment.diagonal().copy_(diagonal)
    return cross, kept_moment, found


def nystrom(moment: Tensor, down: Tensor, rank: int, ridge: float = 1.0) -> NystromResult:
    """Compress an MLP to `rank` neurons: the top ridge leverage scores, then the least-squares refit (Algorithm 1).

    For the kept set the refit is optimal: no `(d_model, rank)` matrix has a smaller error. Ties are broken
    by the lower index. Cost: about `2·d_int³/3 + rank³/3 + 2·d_int·rank·d_model` operations.

    Args:
        moment: `(d_int, d_int)` second moment `C = Σ z zᵀ`, symmetric positive semidefinite, float64.
        down: `(d_model, d_int)` weight of the down projection (Hugging Face layout: out, in), float64.
        rank: neurons to keep, `1 ≤ rank ≤ d_int`.
        ridge: `λ` of the leverage scores; the paper's is 1.

    Raises:
        NotPositiveDefiniteError: the moment is indefinite, or an input is not finite.
    """
    psd.require_finite(down, "the down projection")
    complement, jitter = inverse_diagonal(moment, ridge)
    return keep_highest(moment, down, -complement, rank)._replace(jitter=jitter)


def keep_highest(moment: Tensor, down: Tensor, scores: Tensor, rank: int, ridge: float = 0.0) -> NystromResult:
    """Keep the `rank` neurons of the highest of `(d_int,)` scores, ties by the lower index, and `refit` to them.

    Raises:
        NotPositiveDefiniteError: the moment or the down projection is not finite.
    """
    psd.require_finite(down, "the down projection")
    psd.require_finite(moment, "the moment of the MLP")
    kept = highest(scores, rank)
    weight, error, deficiency = refit(moment, down, kept, ridge)
    return NystromResult(kept, weight, error, 0.0, deficiency)


def highest(scores: Tensor, rank: int) -> Tensor:
    """Return the `(rank,)` ascending indices of the highest of `(d_int,)` scores, ties by the lower index."""
    return scores.argsort(descending=True, stable=True)[:rank].sort().values


def _energy(moment: Tensor, weight: Tensor) -> Tensor:
    """Return `Σ ‖W z‖² = tr(W C Wᵀ)`."""
    return ((weight @ moment) * weight).sum()
