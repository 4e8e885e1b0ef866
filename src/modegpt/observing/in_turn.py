"""Models whose experts run one after another, each on the tokens that it is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .experts import combined, routed


def run_in_turn(model: PreTrainedModel) -> Callable[[], None]:
    """Let a model run its experts one after another from now on, and not all in one grouped product.

    On a CPU that is 3.4 times as fast in float32 (docs/log.md), and `combined` gives the same numbers. Those of Llama
    4, of which its own class runs all on all tokens, are called as others are, with tokens, numbers and shares.

    Returns:
        What lets it run as it did before.
    """
    undo: list[Callable[[], None]] = []
    if model._can_set_experts_implementation():
        before = model.config._experts_implementation
        model.set_experts_implementation("eager")
        if before is not None:
            undo.append(partial(model.set_experts_implementation, before))
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            undo += [_compute(module, _llama4_mixture), _compute(module.experts, _llama4_experts)]

    def as_before() -> None:
        for each in undo:
            each()

    return as_before


@contextmanager
def in_turn(model: PreTrainedModel) -> Iterator[None]:
    """The same while the context is open."""
    as_before = run_in_turn(model)
    try:
        yield
    finally:
        as_before()


def _compute(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let a module, and copies of it, compute with another function of it, and return what undoes that."""
    before = vars(module).get("forward")
    module.forward = MethodType(forward, module)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def _llama4_mixture(mixture: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the class of Llama 4's mixtures returns: their output, and the router's logits."""
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = mixture.router(states)  # scores of 0 where a token is not sent
    shares, chosen = scores.topk(mixture.top_k, dim=-1)
    output = mixture.shared_expert(states)
    output.add_(mixture.experts(states, chosen, shares))
    return output, logits


def _llama4_experts(experts: Any, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return what experts give, `(tokens, d_model)`, called as those of other families."""
    return combined(experts, list(routed(experts, states, chosen, shares)), states)
