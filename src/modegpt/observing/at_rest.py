"""Passes that compute part of a block: while modules of it are at rest, they give zeros at no cost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import Architecture
from .forwards import forwards


@contextmanager
def at_rest(block: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """While the context is open, linear modules, and experts, give zeros. Hooks on them still see what they are given.

    Args:
        block: a decoder block, dense or compressed.
        paths: of the modules, from the block; one that is named twice counts once.
    """
    modules: list[Any] = list(dict.fromkeys(block.get_submodule(path) for path in paths))

    def zeros(module: Any) -> Any:
        if hasattr(module, "down_proj"):
            return lambda x, *_routing: torch.zeros_like(x)
        width = module.nf if hasattr(module, "nf") else module.out_features
        # Memory of its own: some blocks add to what they get in place.
        return lambda x: x.new_zeros(*x.shape[:-1], width)

    with forwards({module: zeros(module) for module in modules}):
        yield


@contextmanager
def attention_at_rest(block: nn.Module, architecture: Architecture) -> Iterator[None]:
    """While the context is open, all that mixes tokens in a block adds zeros: for passes that go on from the middle.

    Given the residual stream behind its attention, a block that puts out a sum (`Architecture.adds_mlp`, not
    `parallel`) then gives what the whole block gives: norms and factors make zeros of zeros.
    """

    def zeros(*inputs: Tensor, **named: Any) -> Tensor:
        x = inputs[0] if inputs else named["hidden_states"]
        return x.new_zeros(()).expand_as(x)

    def pair(*inputs: Tensor, **named: Any) -> tuple[Tensor | None, ...]:
        output = inputs[1] if architecture.adds_attention else zeros(*inputs, **named)
        return output, *(None,) * (architecture.attention_outputs - 1)

    with forwards({module: pair if as_pair else zeros for module, as_pair in architecture.mixing(block)}):
        yield
