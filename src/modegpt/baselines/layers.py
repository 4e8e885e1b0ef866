"""Leaving out whole layers: what ShortGPT and SLEB share."""

import copy
from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from ..architectures import Architecture, architecture_of
from ..around_blocks import PassedBlock
from .reduced import Reduced, reaches
from .walk import blocks_of, layer_parameters


def needs_all_layers(architecture: Architecture) -> str | None:
    """Return why no layers of a family can be left out; None where they can."""
    return f"its later blocks read {architecture.reads_back} earlier ones" if architecture.reads_back else None


def fewest(sizes: list[int], order: Sequence[int], sparsity: float) -> Sequence[int] | None:
    """Return the first layers of an order that hold as large a share of all parameters; None where all of it do not."""
    removed = 0
    for count, index in enumerate(order):
        if reaches(removed, sparsity, sum(sizes)):
            return order[:count]
        removed += sizes[index]
    return order if reaches(removed, sparsity, sum(sizes)) else None


def without(dense: PreTrainedModel, left_out: Collection[int]) -> Reduced:
    """Return a model that passes the residual stream by some of its layers, by their numbers."""
    tuple_output, sizes = architecture_of(dense.config).tuple_output, layer_parameters(dense)
    model = copy.deepcopy(dense)
    layers, removed = blocks_of(model), sum(sizes[index] for index in left_out)
    for index in left_out:
        layers[index] = PassedBlock(layers[index], tuple_output)
    return Reduced(model, removed, removed / sum(sizes))
