"""A stock dense model that computes what a compressed one does: what the conformance checks compare it with."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .architectures import Architecture, Dimensions
from .architectures.access import NOTHING, Affine, BlockWeights, Expert, Layout
from .modeling_modegpt import decoder_layers


def in_float64(model: Any) -> Any:
    """Return a copy of the model in float64."""
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default one is for narrower types
    return model


@torch.no_grad()
def densify(architecture: Architecture, dims: Dimensions, compressed: Any, dense: Any) -> Any:
    """Return a stock dense model that computes what `compressed` should: its weights, and zeros where they end.

    MLP neurons and value coordinates may stand anywhere, so they come first; a query or key coordinate stands where
    its rotary pair stands in the dense head, which decides its frequency.

    Args:
        architecture: the dense model's family.
        dims: its sizes.
        compressed: what is to be widened.
        dense: the model that it came from, whose class and settings the result has; left as it is.
    """
    model = in_float64(dense) if compressed.dtype == torch.float64 else copy.deepcopy(dense)
    own_blocks = decoder_layers(compressed, architecture.describe())
    prefix = next(name for name, module in compressed.named_modules() if module is own_blocks)
    outside = {name: tensor for name, tensor in compressed.state_dict().items() if not name.startswith(prefix)}
    assert set(model.load_state_dict(outside, strict=False).missing_keys) <= {
        name for name in model.state_dict() if name.startswith(prefix) or name == "lm_head.weight"
    }
    described = zip(own_blocks, compressed.config.modegpt["layers"], strict=True)
    for target, (source, layer) in zip(decoder_layers(model, architecture.describe()), described, strict=True):
        _copy_the_rest(architecture, target, source)
        own_dims = architecture.block_dims(target, dims)
        layout = Layout.dense(architecture, own_dims)
        index = next((buffer for name, buffer in source.named_buffers() if name.endswith("rope_index")), None)
        if index is not None and architecture.interleaved_tables:
            index = index // 2
        narrow = layout.narrowed(layer).read(source)
        layout.write(target, _widened(narrow, layer, index, own_dims))
    return model


def _widened(narrow: BlockWeights, layer: dict[str, int], index: Tensor | None, dims: Dimensions) -> BlockWeights:
    """Return the dense weights that have the narrow ones at their places and zeros elsewhere."""
    neurons = torch.arange(layer["mlp_width"])
    ups = tuple(_spread_rows(up, neurons, dims.d_int) for up in narrow.ups)
    down = None if narrow.down is None else _spread_columns(narrow.down, neurons, dims.d_int)
    experts = tuple(
        Expert(
            (_spread_rows(gate, neurons, dims.d_int), _spread_rows(up, neurons, dims.d_int)),
            _spread_columns(own, neurons, dims.d_int),
        )
        for (gate, up), own in narrow.experts
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
    weight = narrow.weight.new_zeros(size, narrow.weight.shape[1]).index_copy(0, places, narrow.weight)
    bias = None if narrow.bias is None else narrow.bias.new_zeros(size).index_copy(0, places, narrow.bias)
    return Affine(weight, bias)


def _spread_columns(narrow: Affine, places: Tensor, size: int) -> Affine:
    weight = narrow.weight.new_zeros(len(narrow.weight), size).index_copy(1, places, narrow.weight)
    return Affine(weight, narrow.bias)


def _copy_the_rest(architecture: Architecture, target: Any, source: Any) -> None:
    """Copy what has no rank: norms, routers, MLPs that stay whole."""
    narrowed = set(architecture.narrowed(target))
    for name, module in target.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if module not in narrowed:
                parameter.copy_(source.get_submodule(name).get_parameter(own))
