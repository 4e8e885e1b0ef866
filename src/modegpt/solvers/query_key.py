"""Query and key: which coordinates of a head stay, and what is made of them."""

import torch
from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import Affine, BlockWeights
from ..config import CompressionConfig
from ..decompose import cr
from ..decompose.logits import logit_selection
from ..decompose.products import product_svd
from ..moments import BlockMoments
from .decision import Decision, Solver

RIDGE = 0.01
"""λ of the corrections: on SmolLM2 at 20 % it loses less than 0.1 (docs/log.md)."""


def split_rank(rank: int, dims: Dimensions) -> tuple[int, int]:
    """Split a query-key rank into rotary pairs and unrotated coordinates, each in its share of the dense head."""
    if dims.rotary_dim == 0:
        return 0, rank
    plain = round(rank * (dims.d_head - dims.rotary_dim) / dims.d_head)
    plain += (rank - plain) % 2
    if plain > dims.d_head - dims.rotary_dim:  # of an odd head at an even rank
        plain -= 2
    return (rank - plain) // 2, plain


def energies(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """The paper's: the coordinates with the largest product of query and key energy (Algorithm 2)."""
    n_pairs, n_plain = split_rank(rank, dims)
    result = cr(moments["query"], moments["key"], n_pairs, n_plain, dims.rotary_dim)
    query, key = _select(weights, dims, result.pairs, result.plain)
    return Decision({"query": query, "key": key}, result.error, pairs=result.pairs)


def logits(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """By the variance of the logits that softmax sees; without a rotary embedding, the SVD of the product."""
    if dims.rotary_dim == 0:
        return _products(weights, dims, moments, rank)
    n_pairs, n_plain = split_rank(rank, dims)
    result = logit_selection(moments["logits"].cpu(), dims.n_kv_heads, n_pairs, n_plain, dims.rotary_dim, RIDGE)
    device = weights.query.weight.device
    pairs, turns, gains = (tensor.to(device) for tensor in (result.pairs, result.turns, result.gains))
    query, key = _select(weights, dims, pairs, result.plain.to(device))
    bias = None if query.bias is None else _turn(query.bias, turns, gains)
    return Decision({"query": Affine(_turn(query.weight, turns, gains), bias), "key": key}, result.error, pairs=pairs)


def _select(weights: BlockWeights, dims: Dimensions, pairs: Tensor, plain: Tensor) -> tuple[Affine, Affine]:
    """Return the rows kept: a compressed head is laid out as first halves, second halves, unrotated coordinates."""
    kept = torch.cat((pairs, pairs + dims.rotary_dim // 2, plain), dim=1)
    narrow = []
    for affine, n_heads in ((weights.query, dims.n_heads), (weights.key, dims.n_kv_heads)):
        by_head = kept.repeat_interleave(n_heads // dims.n_kv_heads, dim=0)
        offsets = dims.d_head * torch.arange(n_heads, device=kept.device)[:, None]
        narrow.append(affine.rows((by_head + offsets).flatten()))
    return narrow[0], narrow[1]


def _turn(rows: Tensor, turns: Tensor, gains: Tensor) -> Tensor:
    """Multiply each kept pair of query rows by `α − iβ`, and each unrotated one by its gain."""
    n_heads, n_pairs = turns.shape[:2]
    heads = rows.double().reshape(n_heads, -1, *rows.shape[1:])
    shape = (n_heads, n_pairs) + (1,) * (rows.ndim - 1)
    alpha, beta = turns[..., 0].reshape(shape), turns[..., 1].reshape(shape)
    first, second, plain = heads[:, :n_pairs], heads[:, n_pairs : 2 * n_pairs], heads[:, 2 * n_pairs :]
    gains = gains.reshape(*gains.shape, *shape[2:])
    turned = (alpha * first + beta * second, alpha * second - beta * first, gains * plain)
    return torch.cat(turned, dim=1).flatten(0, 1)


def _products(weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int) -> Decision:
    key_sum = moments["key_sum"]
    # A shift that all keys of a query share changes no softmax, so keys count by how they vary.
    covariance = moments["key_moment"] - key_sum[:, :, None] * (key_sum[:, None] / moments.n_tokens)
    result = product_svd(moments["query_moment"], covariance, rank)
    per_group = dims.n_heads // dims.n_kv_heads
    query = _map(weights.query, result.query.repeat_interleave(per_group, dim=0))
    return Decision({"query": query, "key": _map(weights.key, result.key)}, result.error)


def _map(affine: Affine, basis: Tensor) -> Affine:
    """Map the coordinates of every head by `(heads, d_head, rank)`."""

    def apply(rows: Tensor) -> Tensor:
        heads = rows.double().reshape(len(basis), -1, max(1, rows[0].numel()))
        return (basis.mT @ heads).reshape(-1, *rows.shape[1:])

    return Affine(apply(affine.weight), None if affine.bias is None else apply(affine.bias))


CR = Solver(energies, needs=lambda dims, bias: ("query", "key"))
LOGITS = Solver(
    logits, needs=lambda dims, bias: ("logits",) if dims.rotary_dim else ("query_moment", "key_moment", "key_sum")
)
