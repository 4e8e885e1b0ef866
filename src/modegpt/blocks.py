"""Hands out decoder blocks one at a time, from a model in memory, and runs them over the calibration text."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from .architectures import Architecture
from .around_blocks import pull_back_logits, run_behind_blocks, run_identity_blocks
from .block_arguments import BlockArguments
from .decompose.psd import all_finite
from .errors import NumericalError
from .hidden_states import HiddenStates
from .modeling_modegpt import decoder_layers

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}
"""Enough for matrix products to run at full speed; an MLP's activations then take some 100 MB on a CPU and one or two
GB on a GPU, at the width of a 7B model."""


@dataclass
class Calibration:
    """The hidden states that enter the next block, and what every block is called with beside them."""

    hidden: HiddenStates
    """One `(batch, tokens, d_model)` tensor a batch, on the GPU, on the host or on disk."""
    arguments: BlockArguments
    weights: Sequence[Tensor] | None = None
    """By batch, how much each token counts in the moments, `(batch, tokens)`; None where all count alike."""
    offsets: Sequence[Tensor] | None = None
    """By batch, where its windows begin in the text of all processes, `(batch,)`, in tokens (modulo a period). Which
    tokens are taken where some are enough goes by it, not by batches or by how many processes share the text."""

    def copy(self) -> "Calibration":
        """Return the same calibration with hidden states of its own."""
        return Calibration(self.hidden.copy(), self.arguments.copy(), self.weights, self.offsets)


class BlockSource(Protocol):
    """Where blocks come from: a model in memory (`ModelBlocks`) or a folder of shards (`ShardBlocks`)."""

    model: PreTrainedModel
    """The model, whose tensors may be on the meta device."""
    layers: nn.ModuleList
    prefix: str
    """Name of the block list in the model, for example `model.layers`."""
    copies: bool
    """Whether a block is read, or converted, whenever one is asked for."""

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

    def embed(self, windows: Tensor, batch_size: int, hidden: HiddenStates, cache: Cache | None = None) -> Calibration:
        """Return the hidden states before block 0 and the arguments of every block.

        With a cache, for one batch, the windows go on where its tokens end, and blocks add to it as they run.
        """
        ...

    def around(self) -> AbstractContextManager[None]:
        """While the context is open, what is around the blocks stays in memory: for many short calls of these."""
        ...

    def logits(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield `(rows, vocab)` logits for each `(rows, d_model)` of hidden states behind the last block."""
        ...

    def pull_back(self, states: Iterable[Tensor], draw: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield what `draw` gives for these logits, pulled back to the hidden states (`pull_back_logits`)."""
        ...


class ModelBlocks:
    """The blocks of a model that is in memory.

    Args:
        model: a dense causal language model.
        architecture: its family.
        consume: whether the model may be taken apart: its blocks are then handed out themselves, not as copies.
        widen: whether the blocks and what is around them run in float32, as copies, whatever the model's own dtype.
    """

    def __init__(self, model: PreTrainedModel, architecture: Architecture, consume: bool, widen: bool = False) -> None:
        """Keep the model and find its blocks."""
        self.model = model
        self.consume, self.copies = consume, widen
        self._path = architecture.describe()
        self._around: tuple[PreTrainedModel, nn.ModuleList] | None = None
        self.layers = decoder_layers(model, self._path)
        self.prefix = layers_prefix(model, self.layers)

    def take(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.take`."""
        block = self.layers[index]
        block = block if self.consume else copy.deepcopy(block)
        if self.consume:
            self.layers[index] = copy.deepcopy(block).to("meta")
        block = block.to(device)
        return check_weights(block.float() if self.copies else block, index)

    def peek(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.peek`."""
        block = self.layers[index]
        if self.copies or any(parameter.device != device for parameter in block.parameters()):
            block = copy.deepcopy(block).to(device)
        return check_weights(block.float() if self.copies else block, index)

    def blank(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.blank`."""
        return self.take(index, device)

    def other_tensors(self) -> dict[str, Tensor]:
        """See `BlockSource.other_tensors`."""
        state = self.model.state_dict()
        return {name: state[name] for name in required_tensors(self.model) if not name.startswith(self.prefix + ".")}

    def embed(self, windows: Tensor, batch_size: int, hidden: HiddenStates, cache: Cache | None = None) -> Calibration:
        """See `BlockSource.embed`."""
        return Calibration(hidden, run_identity_blocks(*self._outside(), windows, batch_size, hidden, cache))

    @contextmanager
    def around(self) -> Iterator[None]:
        """See `BlockSource.around`."""
        self._around = self._outside()
        try:
            yield
        finally:
            self._around = None

    def logits(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `BlockSource.logits`."""
        return run_behind_blocks(*self._outside(), states)

    def pull_back(self, states: Iterable[Tensor], draw: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """See `BlockSource.pull_back`."""
        return pull_back_logits(*self._outside(), states, draw)

    def _outside(self) -> tuple[PreTrainedModel, nn.ModuleList]:
        """Return what holds all around the blocks as it runs, the model or a float32 copy, and its block list."""
        if not self.copies:
            return self.model, self.layers
        if self._around is not None:
            return self._around
        copied: dict[int, Any] = {id(own): nn.Parameter(own.to("meta"), False) for own in self.layers.parameters()}
        copied |= {id(own): own.to("meta") for own in self.layers.buffers()}
        model = copy.deepcopy(self.model, copied).float()  # in which the blocks hold nothing
        return model, decoder_layers(model, self._path)


class PrefetchedBlocks:
    """Blocks of a source, in order; on a GPU the next one is read and copied while the present one is worked on.

    Args:
        source: where blocks come from.
        device: where they go. On a CPU nothing is fetched ahead, so that one block is in memory at a time.
        n_layers: of the model.
    """

    def __init__(self, source: BlockSource, device: torch.device, n_layers: int) -> None:
        """Fetch nothing yet."""
        self._source, self._device, self._n_layers = source, device, n_layers
        ahead = device.type == "cuda"
        self._pool = ThreadPoolExecutor(1) if ahead else None
        # One for all blocks: torch keeps what is freed for the stream that it was allocated in.
        self._stream = torch.cuda.Stream(device) if ahead else None
        self._next: tuple[int, Future[nn.Module]] | None = None

    def take(self, index: int) -> nn.Module:
        """Return block `index`, and begin to fetch the one after it."""
        if self._pool is None:
            return self._source.take(index, self._device)
        ahead, self._next = self._next, None
        block = self._arrived(ahead[1].result() if ahead is not None and ahead[0] == index else self._fetch(index))
        if index + 1 < self._n_layers:
            self._next = (index + 1, self._pool.submit(self._fetch, index + 1))
        return block

    def peek(self, index: int) -> nn.Module:
        """Return a block that is still to be taken, only to be run."""
        if self._next is not None and self._next[0] == index:  # the source may have given it away for good
            return self._arrived(self._next[1].result())
        return self._source.peek(index, self._device)

    def _fetch(self, index: int) -> nn.Module:
        # A stream of its own: on the default stream the copy would wait for the present block's kernels.
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            block = self._source.take(index, self._device)
        self._stream.synchronize()
        return block

    def _arrived(self, block: nn.Module) -> nn.Module:
        # Else the block after next could be written over this one while its last kernels still wait to run.
        if self._stream is not None:
            used = torch.cuda.current_stream(self._device)
            for tensor in (*block.parameters(), *block.buffers()):
                tensor.record_stream(used)
        return block


def layers_prefix(model: nn.Module, layers: nn.ModuleList) -> str:
    """Return the name of the block list in the model, for example `model.layers`."""
    return next(name for name, module in model.named_modules() if module is layers)


def required_tensors(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors a checkpoint must hold: one name for tied weights."""
    tied = tied_tensors(model)
    return [name for name in model.state_dict() if name not in tied]


def tied_tensors(model: PreTrainedModel) -> set[str]:
    """Return the names of weights that are those of another name: not what the config says, but what is so.

    Where the files hold two different weights, transformers does not tie them, whatever the config says.
    """
    said = getattr(model.config, "tie_word_embeddings", False)  # of some multimodal models nothing is
    tied = model.all_tied_weights_keys.items() if said else ()
    find = model.get_parameter_or_buffer
    return {name for name, other in tied if find(name) is find(other)}


def check_weights(block: nn.Module, index: int) -> nn.Module:
    """Return the block; raise `NumericalError` naming layer and matrix if a weight is NaN or infinite."""
    for name, parameter in block.named_parameters():
        if not all_finite(parameter):
            raise NumericalError(f"layer {index}: NaN or infinity in the weights of {name}")
    return block


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
    for batch, hidden in enumerate(calibration.hidden):
        hidden = hidden.to(device)
        with calibration.arguments.calling(batch, hidden, index) as arguments:
            output = block(hidden, **arguments)
        output = output[0] if isinstance(output, tuple) else output
        if on_batch is not None:
            on_batch(hidden, output)
        yield output


def advance(
    block: nn.Module,
    index: int,
    calibration: Calibration,
    device: torch.device,
    on_batch: Callable[[Tensor, Tensor], None] | None = None,
) -> None:
    """Replace the hidden states by what a block makes of them; arguments as for `run_block`."""
    for batch, output in enumerate(run_block(block, index, calibration, device, on_batch)):
        calibration.hidden[batch] = output
