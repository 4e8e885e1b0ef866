"""What the ranks of a block cost, in parameters and in numbers of the key-value cache."""

from collections.abc import Iterable

from torch import nn

from ..architectures import Architecture, Dimensions
from ..ranks.whole import LayerSizes

EXPERT_STEP = 8
"""Of the width of experts: torch's grouped products take no rows but those of a multiple of 16 bytes."""


def layer_sizes(block: nn.Module, architecture: Architecture, dims: Dimensions) -> LayerSizes:
    """Return what one rank of each module costs in a dense block, biases included, and the block's parameters."""
    dims = architecture.block_dims(block, dims)
    cost = architecture.rank_costs(dims, architecture.biases_of(block))
    unranked = architecture.unranked(architecture.cuts_mlp(block))
    if "mlp" in unranked:
        # It has no rank to cut, but its size decides the shares of the budget.
        cost["mlp"] = sum(parameter.numel() for parameter in architecture.whole_mlp(block)) // dims.d_int
    return LayerSizes(
        full=dims.full_ranks,
        cost=cost,
        step={
            "mlp": EXPERT_STEP if architecture.experts else 1,
            "qk": 2 if dims.rotary_dim else 1,
            "vo": 1,
        },
        total=sum(parameter.numel() for parameter in block.parameters()),
        whole=unranked | ({"qk"} if architecture.norms(block) else set()),
        unranked=unranked,
    )


def cached_numbers(
    blocks: Iterable[nn.Module], architecture: Architecture, dims: Dimensions, ranks: list[dict[str, int]]
) -> dict[str, int]:
    """Return how many numbers a token puts into the key-value cache, `dense` and `compressed`.

    Args:
        blocks: the dense ones, whose tensors may be on the meta device.
        architecture: their family, resolved.
        dims: their sizes.
        ranks: of every layer of the compressed model.
    """
    numbers = {"dense": 0, "compressed": 0}
    for block, own in zip(blocks, ranks, strict=True):
        outputs = {path: getattr(module, "out_features", 0) for path, module in block.named_modules()}
        numbers["dense"] += architecture.dense_cached(dims, outputs)
        numbers["compressed"] += architecture.cached(dims, own, outputs)
    return numbers
