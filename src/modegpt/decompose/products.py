"""Query-key where nothing stands between them: the SVD of their product is the optimum, not a choice of coordinates.

Without a rotary embedding (OPT, GPT-2) the logits `q·k` do not change when query and key heads are mapped by a matrix
and its inverse, so a head may be cut to its best subspace.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import psd
from .svd import fix_signs


class ProductResult(NamedTuple):
    """Maps of the query and key coordinates of every key head."""

    query: Tensor
    """`(n_kv_heads, d_head, rank)`: `q ← Aᵀq`, the same for the query heads of a group."""
    key: Tensor
    """`(n_kv_heads, d_head, rank)` with orthonormal columns: `k ← Bᵀk`."""
    error: float
    """`‖Q Kᵀ − Q A Bᵀ Kᵀ‖_F / ‖Q Kᵀ‖_F` over all heads."""


def product_svd(query: Tensor, key: Tensor, rank: int) -> ProductResult:
    """The rank-`rank` logits nearest to those of every head: `R_Q R_Kᵀ = U Σ Vᵀ`, `A = R_KᵀV_k`, `B = R_K⁺V_k`.

    Here `G_Q = R_QᵀR_Q` and `G_K = R_KᵀR_K`. `‖Q Kᵀ‖_F = ‖R_Q R_Kᵀ‖_F` over all pairs of a query and a key, so error²
    is the energy of the discarded singular values. The query heads of a group are stacked: `G_Q` is their sum, and the
    optimum is exact for them together. Returned in the gauge where `B` has orthonormal columns. At full rank `A Bᵀ = 1`
    on the space of the keys. Cost: about `30·d_head³` a key head.

    Args:
        query: `(n_heads, d_head, d_head)` moments `Σ q qᵀ`, float64.
        key: `(n_kv_heads, d_head, d_head)` moments `Σ k kᵀ`, or covariances; `n_kv_heads` divides `n_heads`.
        rank: coordinates to keep a head, `1 ≤ rank ≤ d_head`.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    grouped = query.reshape(len(key), -1, *query.shape[1:]).sum(1)
    root = psd.root(key)
    product = root.root @ psd.symmetrize(grouped) @ root.root.mT
    values, vectors = psd.eigh(product)
    right = vectors.flip(-1)[..., :rank]
    # Along directions that the keys never take, R_K⁺V is zero there: QR completes it to orthonormal columns.
    basis, triangular = torch.linalg.qr(root.inverse @ right)
    basis, triangular = fix_signs(basis, triangular)
    total = values.clamp_min(0).sum()
    lost = values[..., : values.shape[-1] - rank].clamp_min(0).sum()
    error = (lost / total).sqrt().item() if total > 0 else 0.0
    return ProductResult(root.root.mT @ right @ triangular.mT, basis, error)
