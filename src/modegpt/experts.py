"""What the experts of a mixture read and give: which tokens each is sent, its share in them, and its activations."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routed(NamedTuple):
    """What one expert is given in one pass."""

    number: int
    """Of the expert."""
    places: Tensor
    """`(sent,)` places of its tokens among all of the pass."""
    shares: Tensor
    """`(sent, 1)` `g`, by which what it gives is multiplied before it is added."""
    states: Tensor
    """`(sent, d_model)` its inputs."""
    activations: Tensor
    """`(sent, d_int)` `z`, what its down projection reads."""


@torch.no_grad()
def routed(experts: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Iterator[Routed]:
    """Yield what each expert that is sent any token reads, one expert after another.

    Cost: the gate and up projections of the experts chosen, as in the mixture's own forward.

    Args:
        experts: a module of fused gated experts (`Architecture.experts`).
        states: `(tokens, d_model)`, and the next two, are what it is called with.
        chosen: `(tokens, k)` numbers of experts.
        shares: `(tokens, k)`.
    """
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts.down_proj))
    for number, slots in enumerate(order.split(counts.tolist())):
        if len(slots):
            places = slots // chosen.shape[1]
            inputs = states[places]
            activations = experts._apply_gate(torch.nn.functional.linear(inputs, experts.gate_up_proj[number]))
            yield Routed(number, places, shares.flatten()[slots, None], inputs, activations)
