"""Leaving out whole layers: what ShortGPT and SLEB share."""

import copy
from collections.abc import Collection

from transformers import PreTrainedModel

from ..architectures import architecture_of
from ..around_blocks import PassedBlock
from .reduced import Reduced, reaches
from .walk import blocks_of, layer_parameters


def enough(sizes: list[int], left_out: Collection[int], sparsity: float) -> bool:
    """Whether layers, by their numbers, hold as large a share of the parameters of all."""
    return reaches(sum(sizes[index] for index in left_out), sparsity, sum(sizes))


def without(dense: PreTrainedModel, left_out: Collection[int]) -> Reduced:
    """Return a model that passes the residual stream by some of its layers, by their numbers."""
    tuple_output, sizes = architecture_of(dense.config).tuple_output, layer_parameters(dense)
    model = copy.deepcopy(dense)
    layers, removed = blocks_of(model), sum(sizes[index] for index in left_out)
    for index in left_out:
        layers[index] = PassedBlock(layers[index], tuple_output)
    return Reduced(model, removed, removed / sum(sizes))
