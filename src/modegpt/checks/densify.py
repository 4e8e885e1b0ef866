"""A stock dense model that computes what a compressed one does: what the conformance checks compare it with."""

import copy
from typing import Any

import torch

from ..architectures import Architecture, Dimensions
from ..export.widen import widen_block
from ..modeling_modegpt import decoder_layers


def in_float64(model: Any) -> Any:
    """Return a copy of the model in float64."""
    model = copy.deepcopy(model).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default one is for narrower types
    return model


@torch.no_grad()
def densify(architecture: Architecture, dims: Dimensions, compressed: Any, dense: Any) -> Any:
    """Return a stock dense model that computes what `compressed` should: its weights, and zeros where they end.

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
        widen_block(architecture, dims, target, source, layer)
    return model
