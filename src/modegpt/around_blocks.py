"""Runs what is around a model's decoder blocks: embeddings before the first, final norm and head behind the last."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, PreTrainedModel

from .architectures import ARCHITECTURES
from .block_arguments import BlockArguments
from .cache_name import CACHE
from .hidden_states import HiddenStates
from .modeling_modegpt import base_of


class PassedBlock(nn.Module):
    """Stands in for a block that is left out: returns its input as the block returns its output."""

    def __init__(self, block: nn.Module, tuple_output: bool) -> None:
        """Take over what decoders read of the block; `tuple_output` is that of its `Architecture`."""
        super().__init__()
        self._tuple_output = tuple_output
        # Some decoders read an attribute of the block (its attention type, say) to choose the mask it gets.
        self._attributes = {name: value for name, value in vars(block).items() if not name.startswith("_")}

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__.get("_attributes", {})
        return attributes[name] if name in attributes else super().__getattr__(name)

    def forward(self, hidden_states: Tensor, *_positional: Any, **_arguments: Any) -> Tensor | tuple[Tensor, None]:
        """Return the input."""
        return (hidden_states, None) if self._tuple_output else hidden_states


class _StandIn(PassedBlock):
    """Notes what it is called with, and returns its input, or what it was told to return."""

    def __init__(self, block: nn.Module, tuple_output: bool) -> None:
        super().__init__(block, tuple_output)
        self._block = type(block)
        self.arguments: dict[str, Any] = {}
        self.states: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, hidden_states: Tensor, *positional: Any, **arguments: Any) -> Tensor | tuple[Tensor, None]:
        """Note the input and the arguments, and return a tensor as the block returns its output."""
        self.states, self.arguments = hidden_states, named_arguments(self._block, positional, arguments)
        return super().forward(hidden_states if self.output is None else self.output)


def named_arguments(kind: type[nn.Module], positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that blocks of a class are called with behind the hidden states, by its name."""
    return {**dict(zip(_names_behind_states(kind), positional, strict=False)), **named}


@cache
def _names_behind_states(kind: type[nn.Module]) -> list[str]:
    """Return the names of what the blocks of a class take behind the hidden states."""
    return list(inspect.signature(kind.forward).parameters)[2:]


@contextmanager
def _stand_ins(model: PreTrainedModel, layers: nn.ModuleList) -> Iterator[list[_StandIn]]:
    """While the context is open, nothing but what is around the model's blocks runs."""
    tuple_output = ARCHITECTURES[model.config.model_type].tuple_output
    originals, stand_ins = list(layers), [_StandIn(layer, tuple_output) for layer in layers]
    try:
        for index, stand_in in enumerate(stand_ins):
            layers[index] = stand_in
        yield stand_ins
    finally:
        for index, original in enumerate(originals):
            layers[index] = original


@torch.no_grad()
def run_identity_blocks(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    windows: Tensor,
    batch_size: int,
    hidden: HiddenStates,
    cache: Cache | None = None,
) -> BlockArguments:
    """Run the model with identity blocks, and return what every block is called with.

    Args:
        model: everything outside its blocks must hold weights; the blocks themselves are not touched.
        layers: the model's block list.
        windows: `(samples, seq_len)` token ids.
        batch_size: sequences a batch.
        hidden: where the hidden states before block 0 go.
        cache: of the tokens before, for one batch of windows: blocks that get these arguments read it and add to it.
    """
    architecture = ARCHITECTURES[model.config.model_type].resolve(model.config)
    arguments = BlockArguments(hidden, architecture.hands_on)
    with _stand_ins(model, layers) as stand_ins:
        for batch in windows.split(batch_size):
            base_of(model)(input_ids=batch.to(model.device), use_cache=cache is not None, **{CACHE: cache})
            states = stand_ins[0].states
            assert states is not None
            hidden.append(states)
            seen = [architecture.block_arguments(model.config, stand_in.arguments) for stand_in in stand_ins]
            arguments.add(states, seen, architecture.token_arguments)
    return arguments


@torch.no_grad()
def run_behind_blocks(model: PreTrainedModel, layers: nn.ModuleList, states: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield what the model makes of hidden states behind its last block: final norm, head and all.

    Args:
        model: everything outside its blocks must hold weights; the blocks themselves are not touched.
        layers: the model's block list.
        states: `(rows, d_model)` each.
    """
    with _stand_ins(model, layers) as stand_ins:
        for rows in states:
            yield _logits(model, stand_ins, rows.to(model.device, model.dtype)).float()


def pull_back_logits(
    model: PreTrainedModel, layers: nn.ModuleList, states: Iterable[Tensor], draw: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Yield `J_tᵀ u_t` for each row `t` of hidden states, `J_t` the derivative of its logits: `(rows, d_model)` each.

    Only the final norm and the head are differentiated, caps and scales of any family included; no block is.
    Cost: the head forward, and once more backward.

    Args:
        model: everything outside its blocks must hold weights; the blocks themselves are not touched.
        layers: the model's block list.
        states: `(rows, d_model)` behind the last block.
        draw: gives `u`, `(rows, vocab)` float32, for the `(rows, vocab)` float32 logits.
    """
    with _stand_ins(model, layers) as stand_ins:
        with torch.inference_mode(False):
            # What was made in inference mode cannot be kept for the backward pass; a copy can.
            copies = {name: weight.clone() for name, weight in model.named_parameters() if weight.is_inference()}
        for rows in states:
            with torch.inference_mode(False), torch.enable_grad():
                rows = rows.to(model.device, model.dtype, copy=True).requires_grad_()
                logits = _logits(model, stand_ins, rows, copies)
                (pulled,) = torch.autograd.grad(logits, rows, draw(logits.detach().float()).to(logits.dtype))
            yield pulled.float()


def _logits(
    model: PreTrainedModel, stand_ins: list[_StandIn], rows: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the logits of hidden states, by other weights of some names where they are given."""
    stand_ins[-1].output = rows[:, None]
    tokens = torch.zeros(len(rows), 1, dtype=torch.long, device=model.device)
    arguments = {"input_ids": tokens, "use_cache": False}
    output = functional_call(model, dict(weights), kwargs=arguments) if weights else model(**arguments)
    return output.logits[:, -1]
