"""Puts the weights of a compressed block into a stock block of its family, with zeros where the stock one is wider."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..architectures import Architecture, Dimensions
from ..architectures.access import NOTHING, Affine, BlockWeights, Expert, Layout


@torch.no_grad()
def widen_block(architecture: Architecture, dims: Dimensions, target: Any, source: Any, layer: dict[str, int]) -> None:
    """Fill a stock block so that it computes what a compressed one does; the source stays as it is.

    MLP neurons and value coordinates may stand anywhere, so they come first; a query or key coordinate stands where
    its rotary pair stands in the dense head, which decides its frequency. A coordinate of zeros adds nothing to a
    score or to an output, and a neuron whose column of the down projection is zero adds nothing whatever it reads, so
    the two compute the same, but for the order in which the products are summed.

    Args:
        architecture: their family.
        dims: of the stock model, whose MLPs may be narrower than the dense model's.
        target: the stock block.
        source: the compressed block.
        layer: its entry of `config.modegpt["layers"]`.
    """
    _copy_the_rest(architecture, target, source)
    dims = architecture.block_dims(target, dims)
    layout = Layout.dense(architecture, dims)
    index = next((buffer for name, buffer in source.named_buffers() if name.endswith("rope_index")), None)
    if index is not None:
        index = index.cpu() // (2 if architecture.interleaved_tables else 1)
    narrow = layout.narrowed(layer).read(source)
    layout.write(target, _widened(narrow, layer, index, dims))


def _widened(narrow: BlockWeights, layer: dict[str, int], index: Tensor | None, dims: Dimensions) -> BlockWeights:
    """Return the wide weights that have the narrow ones at their places and zeros elsewhere."""
    neurons = torch.arange(layer["mlp_width"])
    ups = tuple(_spread_rows(up, neurons, dims.d_int) for up in narrow.ups)
    down = None if narrow.down is None else _spread_columns(narrow.down, neurons, dims.d_int)
    experts = tuple(
        Expert(
            tuple(_spread_rows(up, neurons, dims.d_int) for up in expert.ups),
            _spread_columns(expert.down, neurons, dims.d_int),
        )
        for expert in narrow.experts
    )
    if narrow.query is NOTHING:
        return replace(narrow, ups=ups, down=down, experts=experts)
    if index is None:
        index = torch.zeros(dims.n_kv_heads, 0, dtype=torch.int64)
    plain = (dims.rotary_dim + torch.arange(layer["qk_plain"])).expand(dims.n_kv_heads, -1)
    by_key_head = torch.cat((index, index + dims.rotary_dim // 2, plain), dim=1)
    leading = torch.arange(layer["value_dim"])

    def rows(by_head: Tensor) -> Tensor:
        return (by_head + dims.d_head * torch.arange(len(by_head))[:, None]).flatten()

    values, contexts = (rows(leading.expand(n, -1)) for n in (dims.n_kv_heads, dims.n_heads))
    queries = rows(by_key_head.repeat_interleave(dims.n_heads // dims.n_kv_heads, dim=0))
    return BlockWeights(
        query=_spread_rows(narrow.query, queries, dims.n_heads * dims.d_head),
        key=_spread_rows(narrow.key, rows(by_key_head), dims.n_kv_heads * dims.d_head),
        value=_spread_rows(narrow.value, values, dims.n_kv_heads * dims.d_head),
        output=_spread_columns(narrow.output, contexts, dims.n_heads * dims.d_head),
        ups=ups,
        down=down,
        experts=experts,
        norms=narrow.norms,
    )


def _spread_rows(narrow: Affine, places: Tensor, size: int) -> Affine:
    weight = narrow.weight.new_zeros(size, narrow.weight.shape[1])
    weight[places] = narrow.weight
    if narrow.bias is None:
        return Affine(weight, None)
    bias = narrow.bias.new_zeros(size)
    bias[places] = narrow.bias
    return Affine(weight, bias)


def _spread_columns(narrow: Affine, places: Tensor, size: int) -> Affine:
    weight = narrow.weight.new_zeros(len(narrow.weight), size)
    weight[:, places] = narrow.weight
    return Affine(weight, narrow.bias)


def rest(architecture: Architecture, block: Any) -> dict[str, Tensor]:
    """Return what has no rank in a block: norms, routers, MLPs that stay whole, buffers that files hold."""
    ranked = set(architecture.narrowed(block))
    tensors = block.state_dict()
    return {name: each for name, each in tensors.items() if block.get_submodule(name.rpartition(".")[0]) not in ranked}


def _copy_the_rest(architecture: Architecture, target: Any, source: Any) -> None:
    """Copy what has no rank; an MLP beside experts may become wider, and its new neurons are zeros."""
    own = source.state_dict()
    for name, tensor in rest(architecture, target).items():
        tensor.zero_()[tuple(slice(size) for size in own[name].shape)] = own[name]
