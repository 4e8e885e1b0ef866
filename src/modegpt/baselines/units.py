"""Heads and neurons that can go as a whole: what FLAP and Wanda-sp share.

With grouped queries a key head can only go with all its queries, so a group is what goes: the result would otherwise
have groups of different sizes, which no attention kernel takes. Where all queries share one key head, a query head is
what goes, and the key head stays.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..architectures import Architecture, Dimensions
from ..architectures.access import affine
from ..running.sizes import layer_sizes
from .walk import Decoder, not_plain


class Costs(NamedTuple):
    """Parameters that go with one group of a block (or with one query head), and with one neuron."""

    group: int
    neuron: int


def shared_heads(architecture: Architecture) -> str | None:
    """Return why the heads or neurons of a family's blocks cannot go one by one."""
    if architecture.query_norm and architecture.norm_input == "flat":
        return "its norms of queries and keys run over all heads, so that none can go alone"
    return not_plain(architecture)


def n_groups(dims: Dimensions) -> int:
    """Return how many parts of a block's attention can go, each alone."""
    return dims.n_kv_heads if dims.n_kv_heads > 1 else dims.n_heads


def costs(decoder: Decoder, block: nn.Module) -> Costs:
    """Return what a block's groups and neurons hold, biases included."""
    dims, cost = decoder.dims, layer_sizes(block, decoder.architecture, decoder.dims).cost
    if dims.n_kv_heads > 1 or dims.n_heads == 1:
        return Costs((cost["qk"] + cost["vo"]) * dims.d_head // n_groups(dims), cost["mlp"])
    query = affine(decoder.architecture.projection(block, "query"))
    return Costs(dims.d_head * (2 * dims.d_model + (query.bias is not None)), cost["mlp"])


def readers(decoder: Decoder, block: nn.Module) -> list[Any]:
    """Return the modules that read what heads and what neurons put out: the output and the down projection."""
    return [decoder.architecture.projection(block, role) for role in ("output", "down")]


def by_group(features: Tensor, decoder: Decoder) -> Tensor:
    """Return the features of the output projection's input, `(n_heads·d_head,)`, as `(groups, features of one)`."""
    return features.view(n_groups(decoder.dims), -1)


@torch.no_grad()
def remove(module: Any, kept: Tensor, means: Tensor | None = None) -> None:
    """Let an output or down projection read only some features.

    Args:
        module: the projection, changed in place.
        kept: `(in,)`, true for features that stay.
        means: `(in,)` of the features: what those that go contributed on average becomes a bias, `b + W_R E z_R`; the
            projection gets one where it has none. None for no such bias.
    """
    weight, bias = affine(module)
    if means is not None and not kept.all():
        lost = weight.double() @ torch.where(kept.to(means.device), 0, means)
        if bias is None:
            module.bias = nn.Parameter(lost.to(weight.dtype))
        else:
            bias += lost.to(bias.dtype)
    weight.mul_(kept.to(weight.device, weight.dtype))
