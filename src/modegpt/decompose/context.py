"""Value-output from what the output projection reads: the heads' contexts, after attention has mixed the values.

The paper's Type III measures values before attention (`svd.py`). The output projection reads context vectors `u`, so
the loss that matters is `Σ ‖W_O u − Ŵ_O Bᵀu‖²` with the moments of `u`. It is minimised here in two closed steps: a
value basis for each key-value head, then one refit of the whole output projection.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import psd
from .svd import fix_signs, joint_basis

ROUNDS = 6
"""Alternations between the shared basis and the outputs. On SmolLM2 and Gemma 3 the first two win 76 and 83 % of what
twelve win, six win 95 and 97 % (docs/log.md)."""

KNOWN = 1e-6
"""Share of a group's energy below which a direction is not told from the rounding of float32 products. SmolLM2 and
Gemma 3 have none below 6e-6."""


class ContextResult(NamedTuple):
    """A value basis for every key-value head and the output projection that reads it."""

    basis: Tensor
    """`(n_kv_heads, d_head, rank)` with orthonormal columns: `W_V ← W_V B`, `b_V ← b_V B` in the paper's layout."""
    output: Tensor
    """`(d_model, n_heads·rank)` new output projection, float64, Hugging Face layout."""
    error: float
    """`‖U W_Oᵀ − U B̄ Ŵ_Oᵀ‖_F / ‖U W_Oᵀ‖_F` on the calibration tokens, over all heads together."""
    deficiency: int
    """How many directions of the kept contexts are numerically zero."""


def context_svd(
    moment: Tensor, output: Tensor, n_heads: int, n_kv_heads: int, rank: int, ridge: float = 0.0
) -> ContextResult:
    """Compress value and output to `rank` dims a head, by the moments of the contexts.

    1. The basis `B_g` of each key-value head minimises `Σ_h ‖U_h W_h − U_h B_g Y_h‖²` over its query heads `h`, each
       with its own metric `G_h = Σ u_h u_hᵀ` and its own output `Y_h`. For one query head a key head that is
       `joint_basis`, exact. For a group it starts from the stacked optimum (that of `Σ_h G_h`) and alternates
       (`alternate`), each step lowering the loss; where the group's contexts leave out a direction (`KNOWN`), it
       stays there: what rounding put into it looks like something to be won.
    2. The output projection is refitted on all heads together, `Ŵ = B̄ᵀW + (B̄ᵀCB̄ + λD)⁻¹ B̄ᵀC(W − B̄B̄ᵀW)`, with
       `B̄` block-diagonal and `D = diag(B̄ᵀCB̄)`: heads make up for each other. At `λ = 0` no output projection has a
       smaller error for these bases; a larger `λ` keeps it nearer to the original weights.

    At full rank the result equals the original pair. Cost: about `18·n_heads·d_head³` for the bases,
    in groups the rounds of `alternate` besides, and `k³/3 + (2n² + 4k²)·d_model` for the refit, with
    `n = n_heads·d_head` and `k = n_heads·rank`.

    Args:
        moment: `(n_heads·d_head, n_heads·d_head)` second moment `C = Σ u uᵀ` of the input of the output projection,
            symmetric positive semidefinite, float64.
        output: `(d_model, n_heads·d_head)` output projection (Hugging Face layout: out, in), float64.
        n_heads: query heads.
        n_kv_heads: key-value heads; the query heads of a group stand together.
        rank: dims to keep a head, `1 ≤ rank ≤ d_head`.
        ridge: `λ ≥ 0`, relative to each dim's own energy.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    psd.require_finite(output, "the output projection")
    psd.require_finite(moment, "the moment of the contexts")
    d_model, d_head = len(output), len(moment) // n_heads
    by_head = output.mT.reshape(n_kv_heads, -1, d_head, d_model)
    metrics = _diagonal_blocks(moment, n_heads).reshape(n_kv_heads, -1, d_head, d_head)
    shared, energies = metrics.sum(1), by_head @ by_head.mT
    basis = joint_basis(shared, energies.sum(1), rank)
    if by_head.shape[1] > 1 and rank < d_head:
        known = _known(shared)
        basis[known] = alternate(metrics[known], energies[known], basis[known])[0]

    projected = narrowed(basis, output.mT)
    residual = output.mT - _widened(basis, projected)
    image = moment @ residual
    cross = narrowed(basis, image)
    kept = narrowed(basis, narrowed(basis, moment).mT)
    # Of W = B̄P + R the energy is that of R, that of B̄P, and twice their product: one product with all of C in all.
    unexplained = (image * residual).sum()
    total = unexplained + 2 * (cross * projected).sum() + ((kept @ projected) * projected).sum()
    # What a dim that no context takes is left with is rounding error, which the solver would scale up to one.
    silent = kept.diagonal() <= psd.tolerance(moment) * moment.diagonal().max()
    kept[silent], kept[:, silent] = 0, 0
    damping = ridge * kept.diagonal()
    kept.diagonal().add_(damping)
    correction, found = psd.solve(kept, cross)
    # The correction X solves (K + λD)X = cross, so XᵀKX is Xᵀcross less λ XᵀDX.
    lost = unexplained - (correction * cross).sum() - (damping[:, None] * correction.square()).sum()
    error = (lost.clamp_min(0) / total).sqrt().item() if total > 0 else 0.0
    return ContextResult(basis, (projected + correction).mT, error, len(kept) - found)


def narrowed(basis: Tensor, rows: Tensor) -> Tensor:
    """Return `B̄ᵀX` for `(n_heads·d_head, m)` `X`, head by head: `(n_heads·rank, m)`; of key-value heads as well."""
    return _by_head(basis.mT, rows)


def _widened(basis: Tensor, rows: Tensor) -> Tensor:
    """Return `B̄Y` for `(n_heads·rank, m)` `Y`: `(n_heads·d_head, m)`."""
    return _by_head(basis, rows)


def _by_head(matrices: Tensor, rows: Tensor) -> Tensor:
    groups, _, width = matrices.shape
    return (matrices[:, None] @ rows.reshape(groups, -1, width, rows.shape[1])).flatten(0, 2)


def alternate(metrics: Tensor, outputs: Tensor, basis: Tensor, rounds: int = ROUNDS) -> tuple[Tensor, list[Tensor]]:
    """Lower `J(B) = Σ_h min_Y ‖R_h(W_h − B Y)‖²`, `R_hᵀR_h = G_h`, by alternating least squares.

    Given `B`, the best outputs are `Y_h = S_h⁻¹BᵀG_hW_h` with `S_h = BᵀG_hB`. Given those, the best `B` solves
    `Σ_h G_h B A_h = Σ_h G_h W_h Y_hᵀ`, `A_h = Y_hY_hᵀ`. Of the way there one step is taken, as long as lowers `J` most,
    along `Ḡ⁻¹ R Ā⁻¹`, with `R` the residual of the system and `Ḡ`, `Ā` the means of `G_h` and `A_h` over the heads: the
    whole way, were the heads alike. Neither step can raise `J`. Only `K_h = W_hW_hᵀ` is read of the outputs, so every
    matrix is head-sized. Cost of a round: about `6·d_head²·rank + 12·d_head·rank²` for each query head.

    Args:
        metrics: `(groups, per_group, d_head, d_head)`, `G_h`.
        outputs: `(groups, per_group, d_head, d_head)`, `K_h`.
        basis: `(groups, d_head, rank)` start.
        rounds: alternations.

    Returns:
        The basis, with orthonormal columns, and `J` by group before each round and after the last.
    """
    weighted = metrics @ outputs
    present = weighted.diagonal(dim1=-2, dim2=-1).sum((-1, -2))  # Σ tr(G K)
    images = weighted @ metrics  # G K G
    shared = psd.inverse(metrics.mean(1))
    history = []
    for done in range(rounds + 1):
        columns = basis[:, None]
        narrow = metrics @ columns
        inner = psd.inverse(columns.mT @ narrow)
        seen = images @ columns @ inner  # G W Yᵀ
        history.append(present - (seen * columns).sum((-1, -2, -3)))
        if done == rounds:
            break
        gram = inner @ columns.mT @ seen  # A = Y Yᵀ
        residual = (seen - narrow @ gram).sum(1)
        direction = shared @ residual @ psd.inverse(gram.mean(1))
        slope = (direction * residual).sum((-1, -2), keepdim=True)
        curvature = (direction * (metrics @ direction[:, None] @ gram).sum(1)).sum((-1, -2), keepdim=True)
        length = torch.where(curvature > 0, slope / torch.where(curvature > 0, curvature, 1), 0)
        basis = torch.linalg.qr(basis + length * direction).Q
    return fix_signs(basis)[0], history


def _known(metrics: Tensor) -> Tensor:
    """Tell which of `(groups, d_head, d_head)` second moments have energy in all directions: `(groups,)`."""
    return torch.linalg.eigvalsh(metrics)[:, 0] > KNOWN * metrics.diagonal(dim1=-2, dim2=-1).sum(-1)


def _diagonal_blocks(moment: Tensor, count: int) -> Tensor:
    """`(n·d, n·d)` to its `(n, d, d)` diagonal blocks."""
    size = len(moment) // count
    return torch.stack([moment[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
