"""Heads and neurons that can go as a whole: what FLAP and Wanda-sp share.

With grouped queries a key head can only go with all its queries, so a group is what goes: the result would otherwise
have groups of different sizes, which no attention kernel takes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..architectures.access import affine
from ..preparation import layer_sizes
from .walk import Walk


class Costs(NamedTuple):
    """Parameters that go with one group of a block, and with one neuron."""

    group: int
    neuron: int


def costs(walk: Walk, block: nn.Module) -> Costs:
    """Return what a block's groups and neurons hold, biases included."""
    cost = layer_sizes(block, walk.architecture, walk.dims).cost
    return Costs((cost["qk"] + cost["vo"]) * walk.dims.d_head // walk.dims.n_kv_heads, cost["mlp"])


def readers(walk: Walk, block: nn.Module) -> list[Any]:
    """Return the modules that read what heads and what neurons put out: the output and the down projection."""
    return [walk.architecture.projection(block, role) for role in ("output", "down")]


def by_group(features: Tensor, walk: Walk) -> Tensor:
    """Return the features of the output projection's input, `(n_heads·d_head,)`, as `(groups, features of one)`."""
    return features.view(walk.dims.n_kv_heads, -1)


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
