"""What the MLP of a dense block puts out, where a norm stands between it and the residual stream."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..hidden_states import HiddenStates


class NormedOutputs:
    """Keeps an MLP's outputs `y_t` as they are before their norm, and by what it divides them.

    Args:
        states: takes the outputs, one `(batch, tokens, d_model)` tensor a batch; empty.
    """

    def __init__(self, states: HiddenStates) -> None:
        """Keep nothing yet."""
        self.states = states
        self.rms: list[Tensor] = []
        """By batch, `(batch, tokens)` float32 `(Σ y²/d_model)^½`, on the device of the block."""

    @contextmanager
    def record(self, norm: nn.Module) -> Iterator[None]:
        """While the context is open, every forward of this norm adds a batch."""

        def add(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.states.append(inputs[0])
            self.rms.append(inputs[0].float().square().mean(-1).sqrt())

        handle = norm.register_forward_pre_hook(add)
        try:
            yield
        finally:
            handle.remove()


def through_norm(norm: nn.Module, states: Tensor, gradients: Tensor) -> Tensor:
    """Return what gradients behind a norm are before it: `Jᵀg`, with `J` its derivative at the states.

    Args:
        norm: of the MLP's output; its hooks do not see this.
        states: `(..., d_model)` its input.
        gradients: `(..., d_model)` `g`.
    """
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        (pulled,) = torch.autograd.grad(norm.forward(leaf), leaf, gradients)
    return pulled
