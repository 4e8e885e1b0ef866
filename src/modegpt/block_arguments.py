"""What decoder blocks are called with beside the hidden states, batch by batch."""

from collections import UserDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .hidden_states import HiddenStates


@dataclass
class BlockArguments:
    """The keyword arguments of every block for every batch."""

    like: HiddenStates
    """What is held here is where these would be, and under a limit in proportion to theirs."""
    hands_on: bool = False
    """Whether blocks read keys and values of earlier ones, which these put into a `UserDict` that all are given."""
    by_size: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """By batch size, the arguments of each layer that depend on the shape of a batch alone: masks, positions."""
    by_token: dict[str, HiddenStates] = field(default_factory=dict)
    """By name, those that every token has of its own: `(n_layers, batch, tokens, width)` a batch."""
    handed: dict[str, list[HiddenStates]] = field(default_factory=dict)
    """By the key under which a block put them, keys and values: `(batch, heads, tokens, d_head)` a batch of each."""

    def copy(self) -> "BlockArguments":
        """Return the same arguments for a copy of the hidden states, with a copy of what was handed on."""
        handed = {key: [held.copy() for held in pair] for key, pair in self.handed.items()}
        return BlockArguments(self.like, self.hands_on, self.by_size, self.by_token, handed)

    def add(self, states: Tensor, layers: Sequence[dict[str, Any]], of_tokens: Sequence[str]) -> None:
        """Add a batch.

        Args:
            states: `(batch, tokens, d_model)` before the first block.
            layers: what each block got beside them.
            of_tokens: the names of the arguments that every token has of its own.
        """
        for name in of_tokens:
            stacked = torch.stack([arguments[name] for arguments in layers])
            if name not in self.by_token:
                self.by_token[name] = self.like.another(stacked.numel() / states.numel())
            self.by_token[name].append(stacked)
        if len(states) not in self.by_size:  # without padding the others depend on the shape of a batch alone
            others = [{name: value for name, value in own.items() if name not in of_tokens} for own in layers]
            self.by_size[len(states)] = others

    def of(self, batch: int, states: Tensor, index: int) -> dict[str, Any]:
        """Return what block `index` gets beside the states of a batch, where these are."""
        device = states.device
        given = {name: self._filled(value, batch) for name, value in self.by_size[len(states)][index].items()}
        given |= {name: held[batch][index] for name, held in self.by_token.items()}
        return {name: _to(value, device) for name, value in given.items()}

    @contextmanager
    def calling(self, batch: int, states: Tensor, index: int) -> Iterator[dict[str, Any]]:
        """Give the same to a block that is run while the context is open, and keep what it hands on."""
        given = self.of(batch, states, index)
        mappings = [value for value in given.values() if isinstance(value, UserDict)] if self.hands_on else []
        before = [dict(mapping) for mapping in mappings]
        yield given
        for mapping, known in zip(mappings, before, strict=True):
            for key, pair in mapping.items():
                if pair is not known.get(key):
                    self._keep(key, pair, batch, states)

    def _keep(self, key: str, pair: Sequence[Tensor], batch: int, states: Tensor) -> None:
        if key not in self.handed:
            self.handed[key] = [self.like.another(tensor.numel() / states.numel()) for tensor in pair]
        for held, tensor in zip(self.handed[key], pair, strict=True):
            if batch < len(held):
                held[batch] = tensor
            else:
                held.append(tensor.contiguous())  # as on disk, so that a limit changes no bits

    def _filled(self, value: Any, batch: int) -> Any:
        """Return an argument; a mapping of this kind is a new one, with what earlier blocks handed on of this batch."""
        if not isinstance(value, UserDict):
            return value
        held = {key: pair for key, pair in self.handed.items() if batch < len(pair[0])}
        return type(value)({key: tuple(states[batch] for states in pair) for key, pair in held.items()})


def _to(value: Any, device: torch.device) -> Any:
    """Move every tensor of a nest of dicts, tuples and lists to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict | UserDict):
        return type(value)({key: _to(item, device) for key, item in value.items()})
    if isinstance(value, tuple | list):
        return type(value)(_to(item, device) for item in value)
    return value
