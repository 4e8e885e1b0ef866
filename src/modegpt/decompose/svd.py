"""Type III, value-output: a low-rank basis of each value head and the output projection that reads it.

Source: Lin et al., ICLR 2025, Theorem 3 and Algorithm 3 (`joint_svd`), and its rule for grouped queries
(`value_eigenvectors`). Both work on head-sized moments, never on a `d_model × d_model` matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import psd


class SVDResult(NamedTuple):
    """A value basis for every key-value head and the matching output blocks."""

    basis: Tensor
    """`(n_kv_heads, d_head, rank)` with orthonormal columns: `W_V ← W_V B`, `b_V ← b_V B` in the paper's layout."""
    output: Tensor
    """`(n_kv_heads, rank, m)` new output blocks, float64."""
    error: float
    """`‖V W_O − V B Ŵ_O‖_F / ‖V W_O‖_F` on the calibration tokens, over all heads."""
    deficiency: int
    """How many directions of the value moments are numerically zero, over all heads."""


def joint_svd(moment: Tensor, output: Tensor, rank: int) -> SVDResult:
    """The optimal rank-`rank` value-output pair: with `G = RᵀR` and `R W_O = U Σ Vᵀ`, `B = R⁺U_k`, `Ŵ_O = Σ_k V_kᵀ`.

    The same as Algorithm 3, since `(R W_O)ᵀ R W_O = W_Oᵀ W_Vᵀ C W_V W_O`, at `d_head³` in place of `d_model³`, value
    bias included. For a group of query heads with their output blocks side by side it is the exact optimum too:
    error² is the energy of the discarded singular values. The pair is returned in the gauge where `B` has
    orthonormal columns (`B = QT`, `Ŵ_O ← TŴ_O`), so weights keep their scale in half precision. Where `G` is singular
    the optimum is not unique, and the one nearest to `Bᵀ W_O` is taken: at full rank `B Ŵ_O = W_O` always.

    Args:
        moment: `(n_kv_heads, d_head, d_head)` second moments `G = Σ v vᵀ` (bias included), float64.
        output: `(n_kv_heads, d_head, m)` output blocks `W_O` in the paper's layout; `m = d_model` times the query
            heads of a group, side by side.
        rank: columns to keep, `1 ≤ rank ≤ d_head`.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    psd.require_finite(output, "the output projection")
    factor = psd.root(moment)
    # The left singular vectors of the wide R W_O are the eigenvectors of the small (R W_O)(R W_O)ᵀ.
    weighted = factor.root @ output
    left, basis, triangular = _leading(factor, weighted @ weighted.mT, rank)
    # Along basis directions that the values never take, any output is optimal: keep the original one.
    projected = basis.mT @ output
    seen = psd.root(basis.mT @ moment @ basis)
    unseen = projected - seen.inverse @ (seen.root @ projected)
    return _result(moment, output, basis, triangular @ (left.mT @ weighted) + unseen, factor.rank)


def joint_basis(moment: Tensor, energy: Tensor, rank: int) -> Tensor:
    """The basis of `joint_svd` alone, which reads no more of the output blocks than `W_O W_Oᵀ`.

    Args:
        moment: `(n_kv_heads, d_head, d_head)` second moments, float64.
        energy: `(n_kv_heads, d_head, d_head)` `W_O W_Oᵀ`.
        rank: columns to keep.
    """
    factor = psd.root(moment)
    return _leading(factor, factor.root @ energy @ factor.root.mT, rank)[1]


def _leading(factor: psd.Root, gram: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `U_k`, `Q` and `T` with `R⁺U_k = QT`, of `(R W_O)(R W_O)ᵀ = U Σ² Uᵀ`."""
    left = psd.eigh(gram)[1].flip(-1)[..., :rank]
    return left, *fix_signs(*torch.linalg.qr(factor.inverse @ left))


def value_eigenvectors(moment: Tensor, output: Tensor, rank: int) -> SVDResult:
    """The paper's rule for grouped queries: `B` = top eigenvectors of `G_V`, `W_V ← W_V B`, `W_O ← Bᵀ W_O`.

    Keeps the directions in which the values are largest and ignores what the output projection makes of them; kept
    to reproduce the paper. Arguments, result and errors as for `joint_svd`.
    """
    psd.require_finite(output, "the output projection")
    rank_of_moment = psd.root(moment).rank
    vectors = psd.eigh(psd.symmetrize(moment))[1]
    basis = fix_signs(vectors.flip(-1)[..., :rank])[0]
    return _result(moment, output, basis, basis.mT @ output, rank_of_moment)


def fix_signs(basis: Tensor, triangular: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Make the largest entry of each column positive, so that the answer does not depend on the LAPACK in use."""
    largest = basis.gather(-2, basis.abs().argmax(-2, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).to(basis.dtype)
    return basis * sign, basis.new_empty(0) if triangular is None else sign.mT * triangular


def _result(moment: Tensor, output: Tensor, basis: Tensor, new_output: Tensor, rank: Tensor) -> SVDResult:
    residual = output - basis @ new_output
    lost = ((moment @ residual) * residual).sum()
    total = ((moment @ output) * output).sum()
    error = (lost.clamp_min(0) / total).sqrt().item() if total > 0 else 0.0
    deficiency = int((moment.shape[-1] - rank).sum())
    return SVDResult(basis, new_output, error, deficiency)
