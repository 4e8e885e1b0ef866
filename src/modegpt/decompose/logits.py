"""Query-key by what softmax sees: the attention logits, up to a shift that all keys of a query share.

The paper's Type II (`cr.py`) scores each coordinate by its own energy. Softmax does not: to second order, changing the
logits of a query by `δ` costs `½ Var_a(δ)` nats, with the variance over keys weighted by the attention `a`; a shift
that all keys share costs nothing. Each coordinate's share of a logit is a feature, so the loss of any choice of
coordinates, and of any correction of those kept, is a quadratic form in the Gram matrix of these features.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import psd


class LogitsResult(NamedTuple):
    """The coordinates that stay, for every key head, and the corrections of each query head."""

    pairs: Tensor
    """`(n_kv_heads, n_pairs)` ascending numbers of the rotary pairs kept; pair `j` is coordinates `j`, `j + r/2`."""
    plain: Tensor
    """`(n_kv_heads, n_plain)` ascending numbers of the unrotated coordinates kept, counted within the head."""
    turns: Tensor
    """`(n_heads, n_pairs, 2)`: `(α, β)` by which the query of a kept pair is turned and scaled: `q ← (α − iβ) q`."""
    gains: Tensor
    """`(n_heads, n_plain)`: factors of the kept unrotated query coordinates."""
    error: float
    """Root of the share of logit variance that is lost on the calibration tokens, over all heads."""


def gram(query: Tensor, key: Tensor, attention: Tensor, rotary_dim: int) -> Tensor:
    """Return `H = Σ_i Cov_{j~a_i}(f_ij)`, `(..., d_head, d_head)`: the attention-weighted covariance of the features.

    The features are each coordinate's share in a logit. For a rotary pair with `q = q_j + i·q_{j+r/2}`, and `k`
    likewise, both after the rotary embedding: `Re(q k̄)`, its share, at place `j`, and `Im(q k̄)`, by which the share
    changes when the pair is turned, at `j + r/2`. Turning a pair commutes with the rotary embedding, so the corrections
    fold into the query weights. For an unrotated coordinate: `q_i k_i`. They are never formed. Cost:
    `2·n_queries·n_keys·d_head²` operations.

    Args:
        query: `(..., n_queries, d_head)` after the rotary embedding, halves as pairs, times the softmax scale.
        key: `(..., n_keys, d_head)` after the rotary embedding.
        attention: `(..., n_queries, n_keys)` attention of the dense model; each row sums to 1.
        rotary_dim: leading coordinates under the rotary embedding.
    """
    # Centred before the product: keys share large components, and their squares would cancel to rounding error.
    mean = attention @ key
    spread = (key[..., None, :, :] - mean[..., :, None, :]).mul_(attention.sqrt()[..., None])
    covariance = spread.mT @ spread
    # A query's features are linear in the key: f = T k, so its Gram matrix is T Cov_a(k) Tᵀ.
    left = _linear(query, covariance, rotary_dim)
    return _linear(query, left.mT, rotary_dim).sum(-3)


def _linear(query: Tensor, matrix: Tensor, rotary_dim: int) -> Tensor:
    """Apply to the rows of `(..., n_queries, d_head, m)` matrices the map `T` of each query: `T k` are its features."""
    half = rotary_dim // 2
    q1, q2, plain = query[..., None].split([half, half, query.shape[-1] - rotary_dim], dim=-2)
    m1, m2, rest = matrix.split([half, half, matrix.shape[-2] - rotary_dim], dim=-2)
    return torch.cat((q1 * m1 + q2 * m2, q2 * m1 - q1 * m2, plain * rest), dim=-2)


def logit_selection(
    moment: Tensor, n_kv_heads: int, n_pairs: int, n_plain: int, rotary_dim: int, ridge: float
) -> LogitsResult:
    """Choose query-key coordinates and correct those kept, by the variance of the logits lost.

    With coefficients `c` (1 on each share of the logit, 0 on each turn) the loss of a query head is
    `min_x (c − x)ᵀH(c − x)` over `x` supported on the kept coordinates: a least-squares problem of head size.
    Coordinates are eliminated one at a time, each the one that raises the sum of the losses over the query heads of
    its key head least, given the best correction: removing the set `p` raises it by `c_pᵀ[(H⁻¹)_pp]⁻¹c_p`, and Schur
    complements keep `H⁻¹` and `c` up to date. Cost: about `2·d_head³` a query head.

    Args:
        moment: `(n_heads, d_head, d_head)` Gram matrices `H` of the features, float64.
        n_kv_heads: key heads; the query heads of a group stand together and share a choice.
        n_pairs: rotary pairs to keep a head, `0 ≤ n_pairs ≤ rotary_dim/2`.
        n_plain: unrotated coordinates to keep a head, `0 ≤ n_plain ≤ d_head − rotary_dim`.
        rotary_dim: leading coordinates under the rotary embedding.
        ridge: `λ > 0`, relative to each feature's own variance: holds corrections back.

    Raises:
        NotPositiveDefiniteError: a moment is not finite.
    """
    psd.require_finite(moment, "the moment of the logits")
    d_head, half = moment.shape[-1], rotary_dim // 2
    coefficients = torch.ones(d_head, dtype=moment.dtype, device=moment.device)
    coefficients[half:rotary_dim] = 0
    groups = moment.reshape(n_kv_heads, -1, d_head, d_head)
    pairs, plain, x = _eliminate(groups, coefficients, n_pairs, n_plain, rotary_dim, ridge)
    left = coefficients - x
    lost = torch.einsum("ghi,ghij,ghj->", left, groups, left)
    total = torch.einsum("i,ghij,j->", coefficients, groups, coefficients)
    error = (lost.clamp_min(0) / total).sqrt().item() if total > 0 else 0.0

    def take(places: Tensor) -> Tensor:
        return x.gather(2, places[:, None].expand(-1, x.shape[1], -1)).flatten(0, 1)

    turns = torch.stack((take(pairs), take(pairs + half)), dim=-1)
    return LogitsResult(pairs, plain, turns, take(plain), error)


def _eliminate(
    moment: Tensor, coefficients: Tensor, n_pairs: int, n_plain: int, rotary_dim: int, ridge: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs and the plain places kept by each key head, and `x`, `(groups, per_group, d_head)`.

    All key heads lose a place in every step, each its own: as many steps, whatever the number of heads.
    """
    n_groups, per_group, d_head = moment.shape[:3]
    half = rotary_dim // 2
    scale = moment.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    floor = torch.finfo(moment.dtype).eps * scale.amax(-1, keepdim=True)
    damped = moment + torch.diag_embed(ridge * scale + torch.where(floor > 0, floor, 1))
    # One place more, without a share in anything: it goes with each plain coordinate, so that these are pairs, too.
    inverse = torch.eye(d_head + 1, dtype=moment.dtype, device=moment.device).repeat(n_groups, per_group, 1, 1)
    inverses = [torch.cholesky_inverse(psd.cholesky(head).lower) for head in damped.flatten(0, 1)]
    inverse[..., :-1, :-1] = torch.stack(inverses).view_as(damped)
    x = nn.functional.pad(coefficients, (0, 1)).expand(n_groups, per_group, -1).clone()
    places = torch.arange(d_head, device=moment.device)
    rotated = places < rotary_dim
    partner = torch.where(rotated, places + half, d_head)
    # Of a pair its first place is what is chosen; in the group, `(n_groups, d_head)`.
    free = (~rotated | (places < half)).repeat(n_groups, 1)
    n_kept = torch.where(rotated, n_pairs, n_plain)
    for _ in range(half - n_pairs + d_head - rotary_dim - n_plain):
        n_left = torch.where(rotated, *((free & kind).sum(1, keepdim=True) for kind in (rotated, ~rotated)))
        rise = _rise(inverse, x, half, rotary_dim)
        first = rise.masked_fill(~free | (n_left <= n_kept), torch.inf).argmin(1, keepdim=True)
        free.scatter_(1, first, False)
        gone = torch.cat((first, partner[first]), dim=1)[:, None].expand(-1, per_group, -1)
        rows = inverse.gather(2, gone[..., None].expand(-1, -1, -1, d_head + 1))
        among = rows.gather(3, gone[..., None, :].expand(-1, -1, 2, -1))
        solved = torch.linalg.solve(among, rows)
        x = x - (x.gather(2, gone)[..., None, :] @ solved)[..., 0, :]
        inverse = inverse - rows.mT @ solved
        x.scatter_(2, gone, 0)
        # A removed place must neither couple to the others nor divide by zero.
        removed = torch.zeros_like(x, dtype=torch.bool).scatter_(2, gone, True)
        inverse.masked_fill_(removed[..., None] | removed[..., None, :], 0)
        inverse.diagonal(dim1=-2, dim2=-1).masked_fill_(removed, 1)
    pairs, plain = (places.repeat(n_groups, 1)[free & kind].view(n_groups, -1) for kind in (rotated, ~rotated))
    return pairs, plain, x[..., :-1]


def _rise(inverse: Tensor, x: Tensor, half: int, rotary_dim: int) -> Tensor:
    """Return `Σ_h x_pᵀ[(H⁻¹)_pp]⁻¹x_p` by place, `(groups, d_head)`, at the first place of each pair."""
    diagonal = inverse.diagonal(dim1=-2, dim2=-1)
    single = (x.square() / diagonal).sum(1)[:, :-1]
    a, d = diagonal[..., :half], diagonal[..., half:rotary_dim]
    b = inverse.diagonal(offset=half, dim1=-2, dim2=-1)[..., :half]
    first, second = x[..., :half], x[..., half:rotary_dim]
    pair = (d * first.square() - 2 * b * first * second + a * second.square()) / (a * d - b * b)
    single[:, :half] = pair.sum(1)
    return single
