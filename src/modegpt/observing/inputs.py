"""What a module of a block reads."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """While the context is open, every forward of a module adds its input.

    It is a copy, as some blocks add to what their modules read in place.
    """
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, given: inputs.append(given[0].clone()))
    try:
        yield inputs
    finally:
        handle.remove()
