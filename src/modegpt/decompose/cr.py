"""Type II, query-key: keep the coordinates whose query and key energies have the largest product.

Source: Lin et al., ICLR 2025, Theorem 2, Algorithm 2 and its rule for grouped queries. The paper's column score
`‖C_Q^{1/2}[:,i]‖ ‖C_K^{1/2}[:,i]‖` is `sqrt(C_Q,ii C_K,ii)`, so the diagonals of the moments suffice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import psd


class CRResult(NamedTuple):
    """The coordinates that stay, for every key head."""

    pairs: Tensor
    """`(n_kv_heads, n_pairs)` ascending numbers of the rotary pairs kept; pair `j` is coordinates `j`, `j + r/2`."""
    plain: Tensor
    """`(n_kv_heads, n_plain)` ascending numbers of the unrotated coordinates kept, counted within the head."""
    error: float
    """`sqrt(Σ_dropped s² / Σ s²)`: the share of score energy that was dropped, cross terms left out."""


def cr(query: Tensor, key: Tensor, n_pairs: int, n_plain: int, rotary_dim: int) -> CRResult:
    """Choose query-key coordinates by the CR score, rotary pairs whole.

    Rotary embedding mixes coordinate `j` with `j + r/2` (`r = rotary_dim`), so a pair is kept or dropped whole:
    `s = sqrt((e_Q,j + e_Q,j+r/2)(e_K,j + e_K,j+r/2))`, which rotation leaves unchanged. Coordinates from `r` on are
    not rotated and are chosen singly, `s = sqrt(e_Q,i e_K,i)`. The query heads of a group share their key head's
    choice by `sqrt(Σ_h s_h²)`. Ties are broken by the lower number. Cost: one sort a head.

    Args:
        query: `(n_heads, d_head)` energies `Σ q²` of each query coordinate, before the rotary embedding.
        key: `(n_kv_heads, d_head)` energies `Σ k²`; `n_kv_heads` divides `n_heads`.
        n_pairs: rotary pairs to keep a head, `0 ≤ n_pairs ≤ rotary_dim/2`.
        n_plain: unrotated coordinates to keep a head, `0 ≤ n_plain ≤ d_head − rotary_dim`.
        rotary_dim: leading coordinates under the rotary embedding (0 for none, `d_head` for all).

    Raises:
        NotPositiveDefiniteError: an energy is not finite.
    """
    psd.require_finite(query, "the query energy")
    psd.require_finite(key, "the key energy")
    n_kv_heads, d_head = key.shape
    query = query.reshape(n_kv_heads, -1, d_head)
    key = key[:, None]
    half = rotary_dim // 2

    def pair(energy: Tensor) -> Tensor:
        return energy[..., :half] + energy[..., half:rotary_dim]

    pair_scores = (pair(query) * pair(key)).sum(1)
    plain_scores = (query[..., rotary_dim:] * key[..., rotary_dim:]).sum(1)
    pairs = _top(pair_scores, n_pairs)
    plain = _top(plain_scores, n_plain)
    total = pair_scores.sum() + plain_scores.sum()
    kept = pair_scores.gather(1, pairs).sum() + plain_scores.gather(1, plain).sum()
    error = ((total - kept).clamp_min(0) / total).sqrt().item() if total > 0 else 0.0
    everything = n_pairs == half and n_plain == d_head - rotary_dim
    return CRResult(pairs, plain + rotary_dim, 0.0 if everything else error)


def _top(scores: Tensor, count: int) -> Tensor:
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values
