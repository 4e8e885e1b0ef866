"""Hands out decoder blocks one at a time, from a model in memory, and runs them over the calibration text."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .architectures import Architecture
from .errors import NumericalError
from .hidden_states import HiddenStates
from .modeling_modegpt import decoder_layers

TOKENS_PER_BATCH = 4096


@dataclass
class Calibration:
    """The hidden states that enter the next block, and what every block is called with beside them."""

    hidden: HiddenStates
    """One `(batch, tokens, d_model)` tensor a batch, on the host or on disk."""
    arguments: dict[int, list[dict[str, Any]]]
    """By batch size, the keyword arguments of each layer (masks, position embeddings)."""


class BlockSource(Protocol):
    """Where blocks come from: a model in memory (`ModelBlocks`) or a folder of shards (`ShardBlocks`)."""

    model: PreTrainedModel
    """The model, whose tensors may be on the meta device."""
    layers: nn.ModuleList
    prefix: str
    """Name of the block list in the model, for example `model.layers`."""

    def take(self, index: int, device: torch.device) -> nn.Module:
        """Return block `index` on `device`, to be changed at will; raise `NumericalError` on NaN or infinity."""
        ...

    def peek(self, index: int, device: torch.device) -> nn.Module:
        """Return block `index` on `device`, only to be run."""
        ...

    def blank(self, index: int, device: torch.device) -> nn.Module:
        """Return a block of the shape of block `index` on `device`, whose weights do not matter."""
        ...

    def other_tensors(self) -> dict[str, Tensor]:
        """Return every parameter and persistent buffer outside the blocks, by its name in the model."""
        ...

    def embed(self, windows: Tensor, batch_size: int | None, hidden: HiddenStates) -> Calibration:
        """Return the hidden states before block 0 and the arguments of every block."""
        ...


class ModelBlocks:
    """The blocks of a model that is in memory.

    Args:
        model: a dense causal language model.
        architecture: its family.
        consume: whether the model may be taken apart: its blocks are then handed out themselves, not as copies.
    """

    def __init__(self, model: PreTrainedModel, architecture: Architecture, consume: bool) -> None:
        """Keep the model and find its blocks."""
        self.model = model
        self.consume = consume
        self.layers = decoder_layers(model, architecture.describe())
        self.prefix = layers_prefix(model, self.layers)

    def take(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.take`."""
        block = self.layers[index]
        block = block if self.consume else copy.deepcopy(block)
        if self.consume:
            self.layers[index] = copy.deepcopy(block).to("meta")
        return check_weights(block.to(device), index)

    def peek(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.peek`."""
        return check_weights(copy.deepcopy(self.layers[index]).to(device), index)

    def blank(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.blank`."""
        return self.take(index, device)

    def other_tensors(self) -> dict[str, Tensor]:
        """See `BlockSource.other_tensors`."""
        state = self.model.state_dict()
        return {name: state[name] for name in required_tensors(self.model) if not name.startswith(self.prefix + ".")}

    def embed(self, windows: Tensor, batch_size: int | None, hidden: HiddenStates) -> Calibration:
        """See `BlockSource.embed`."""
        return run_identity_blocks(self.model, self.layers, windows, batch_size, hidden)


def layers_prefix(model: nn.Module, layers: nn.ModuleList) -> str:
    """Return the name of the block list in the model, for example `model.layers`."""
    return next(name for name, module in model.named_modules() if module is layers)


def required_tensors(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors a checkpoint must hold: one name for tied weights."""
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return [name for name in model.state_dict() if name not in tied]


def check_weights(block: nn.Module, index: int) -> nn.Module:
    """Return the block; raise `NumericalError` naming layer and matrix if a weight is NaN or infinite."""
    for name, parameter in block.named_parameters():
        # The sum of finite weights is finite, and it needs no mask of the matrix's size.
        if not torch.isfinite(parameter.sum(dtype=torch.float64)):
            raise NumericalError(f"layer {index}: NaN or infinity in the weights of {name}")
    return block


class _Recorder(nn.Module):
    """Stands in for a block: returns its input and notes the arguments it was called with."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # Some decoders read an attribute of the block (its attention type, say) to choose the mask it gets.
        self._attributes = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        self.arguments: dict[str, Any] = {}
        self.states: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__.get("_attributes", {})
        return attributes[name] if name in attributes else super().__getattr__(name)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """Note the input and the arguments, and return the input."""
        self.states, self.arguments = hidden_states, arguments
        return hidden_states


@torch.no_grad()
def run_identity_blocks(
    model: PreTrainedModel, layers: nn.ModuleList, windows: Tensor, batch_size: int | None, hidden: HiddenStates
) -> Calibration:
    """Run the model with identity blocks: the hidden states before block 0 and the arguments of every block.

    Args:
        model: everything outside its blocks must hold weights; the blocks themselves are not touched.
        layers: the model's block list.
        windows: `(samples, seq_len)` token ids.
        batch_size: sequences a batch; by default so many that a batch has about 4096 tokens.
        hidden: where the hidden states go.
    """
    batch_size = batch_size or max(1, TOKENS_PER_BATCH // windows.shape[1])
    originals, recorders = list(layers), [_Recorder(layer) for layer in layers]
    arguments: dict[int, list[dict[str, Any]]] = {}
    try:
        for index, recorder in enumerate(recorders):
            layers[index] = recorder
        for batch in windows.split(batch_size):
            model.base_model(input_ids=batch.to(model.device), use_cache=False)
            states = recorders[0].states
            assert states is not None
            hidden.append(states)
            # Without padding the arguments depend on the shape of a batch alone.
            arguments.setdefault(len(batch), [recorder.arguments for recorder in recorders])
    finally:
        for index, original in enumerate(originals):
            layers[index] = original
    return Calibration(hidden, arguments)


@torch.no_grad()
def run_block(
    block: nn.Module,
    index: int,
    calibration: Calibration,
    device: torch.device,
    on_batch: Callable[[Tensor, Tensor], None] | None = None,
) -> Iterator[Tensor]:
    """Yield the output of a block for each batch.

    Args:
        block: on `device`.
        index: layer number, which decides its arguments.
        calibration: its inputs.
        device: where the block runs.
        on_batch: called with input and output of each batch.
    """
    for hidden in calibration.hidden:
        hidden = hidden.to(device)
        output = block(hidden, **_to(calibration.arguments[len(hidden)][index], device))
        output = output[0] if isinstance(output, tuple) else output
        if on_batch is not None:
            on_batch(hidden, output)
        yield output


def _to(value: Any, device: torch.device) -> Any:
    """Move every tensor of a nest of dicts, tuples and lists to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to(item, device) for item in value)
    return value
