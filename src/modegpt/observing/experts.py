"""What the experts of a mixture read and give: which tokens each is sent, its share in them, and its activations."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..architectures.fused import activations_of, has_gate, projections_of, weighs_inputs
from .forwards import forwards


class Routed(NamedTuple):
    """What one expert is given in one pass."""

    number: int
    """Of the expert."""
    places: Tensor
    """`(sent,)` places of its tokens among all of the pass."""
    shares: Tensor
    """`(sent, 1)` `g`, by which what it gives is multiplied before it is added: ones where they weigh what it reads."""
    activations: Tensor
    """`(sent, d_int)` `z`, what its down projection reads."""


@torch.no_grad()
def routed(
    experts: Any, states: Tensor, chosen: Tensor, shares: Tensor, among: Collection[int] | None = None
) -> Iterator[Routed]:
    """Yield what each expert that is sent any token reads, one expert after another.

    Cost: the gate and up projections of the experts chosen, as in the mixture's own forward.

    Args:
        experts: a module of fused experts (`Architecture.experts`).
        states: `(tokens, d_model)`, and the next two, are what it is called with.
        chosen: `(tokens, k)` numbers of experts.
        shares: `(tokens, k)`.
        among: the experts that are asked for; None for all.
    """
    gate_ups, _downs = projections_of(experts)
    slots = chosen.mT.flatten()  # first choices first, as the stock modules go: so their products are the same
    counts = slots.bincount(minlength=len(gate_ups))
    for number, own in enumerate(slots.argsort(stable=True).split(counts.tolist())):
        if len(own) and (among is None or number in among):
            places = own % len(chosen)
            read, weights = states.index_select(0, places), shares.mT.flatten()[own, None]
            if weighs_inputs(experts):
                read, weights = read * weights, torch.ones_like(weights)
            yield Routed(number, places, weights, activations_of(experts, _linear(read, *gate_ups[number])))


@torch.no_grad()
def combined(experts: Any, sent: Sequence[Routed], states: Tensor) -> Tensor:
    """Return what a mixture gives for `(tokens, d_model)` states, from what each of its experts reads.

    These are the operations of the stock module's own forward, in its order, where it runs one expert after another
    (`in_turn`), and so its numbers, bit by bit.
    """
    # Of those without a gate (Nemotron 3) what is added stays in the dtype of the shares until the end.
    wide = bool(sent) and not has_gate(experts)
    total = torch.zeros_like(states, dtype=sent[0].shares.dtype if wide else None)
    _gate_ups, downs = projections_of(experts)
    for each in sent:
        given = _linear(each.activations, *downs[each.number]) * each.shares
        total.index_add_(0, each.places, given.to(total.dtype))
    return total.to(states.dtype)


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The bias by itself, as in the stock modules: in half precision one sum would round otherwise.
    product = functional.linear(states, weight)
    return product if bias is None else product + bias


Watcher = Callable[[Tensor, Tensor, Tensor, list[Routed]], None]
"""Takes what a mixture is called with, states, numbers and shares, and what each expert reads of it."""


@contextmanager
def watched(experts: Any, see: Watcher) -> Iterator[None]:
    """While the context is open, every forward of a mixture tells what its experts read, and computes it once.

    While the mixture is at rest (`at_rest`, entered later) it tells just the same.
    """
    passing: list[Routed] = []

    def before(_module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        passing[:] = routed(experts, *inputs)
        see(*inputs, list(passing))

    def forward(states: Tensor, _chosen: Tensor, _shares: Tensor) -> Tensor:
        total = combined(experts, passing, states)
        passing.clear()
        return total

    handle = experts.register_forward_pre_hook(before)
    try:
        with forwards({experts: forward}):
            yield
    finally:
        handle.remove()


@contextmanager
def told(experts: Any, passes: Iterator[Sequence[Routed]]) -> Iterator[None]:
    """While the context is open, every forward of a mixture gives what it makes of the next of some passes."""
    with forwards({experts: lambda states, _chosen, _shares: combined(experts, next(passes), states)}):
        yield
