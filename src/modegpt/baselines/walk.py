"""The blocks of a model in memory, visited in order with the calibration text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..architectures import Architecture, architecture_of
from ..blocks import TOKENS_PER_BATCH, ModelBlocks, advance, run_block
from ..decompose.psd import all_finite
from ..errors import NumericalError
from ..hidden_states import HiddenStates
from ..modeling_modegpt import decoder_layers


class Decoder:
    """The blocks of a model and what is known of its family.

    Args:
        model: dense, in memory. Its blocks are handed out themselves, so what is done to them shows further on.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the blocks."""
        self.architecture = architecture_of(model.config)
        self.dims = self.architecture.dimensions(model.config)
        self.layers = blocks_of(model)


class Walk(Decoder):
    """A model and the hidden states that enter its next block.

    Args:
        model: dense, in memory.
        windows: `(samples, seq_len)` token ids.
    """

    def __init__(self, model: PreTrainedModel, windows: Tensor) -> None:
        """Embed the windows."""
        super().__init__(model)
        self.model, self.windows = model, windows
        self.blocks = ModelBlocks(model, self.architecture, consume=False)
        self.device = model.device
        tokens = TOKENS_PER_BATCH.get(self.device.type, TOKENS_PER_BATCH["cpu"])
        self.calibration = self.blocks.embed(windows, max(1, tokens // windows.shape[1]), HiddenStates())

    def run(self, index: int) -> Iterator[Tensor]:
        """Yield the output of a block for each batch; the hidden states stay."""
        return run_block(self.layers[index], index, self.calibration, self.device)

    def advance(self, index: int, on_batch: Callable[[Tensor, Tensor], None] | None = None) -> None:
        """Replace the hidden states by what a block makes of them; `on_batch` sees both of each batch.

        Raises:
            NumericalError: one of them is NaN or infinite; names the layer.
        """

        def check(before: Tensor, after: Tensor) -> None:
            if not all_finite(after):
                raise NumericalError(f"layer {index}: NaN or infinity in the hidden states on the calibration text")
            if on_batch is not None:
                on_batch(before, after)

        advance(self.layers[index], index, self.calibration, self.device, check)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder blocks of a model."""
    return decoder_layers(model, architecture_of(model.config).describe())


def layer_parameters(model: PreTrainedModel) -> list[int]:
    """Return the parameters of each decoder block."""
    return [sum(parameter.numel() for parameter in block.parameters()) for block in blocks_of(model)]


@contextmanager
def reading(modules: Sequence[Any], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the context is open, `see` gets the number of each of the modules and the `(tokens, width)` it reads."""
    with ExitStack() as stack:
        for number, module in enumerate(modules):

            def hook(_module: Any, inputs: Any, number: int = number) -> None:
                see(number, inputs[0].flatten(0, -2))

            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


def not_plain(architecture: Architecture) -> str | None:
    """Return what the blocks of a family have in place of an attention that can be cut and one MLP."""
    if architecture.experts:
        return "its blocks have experts"
    return "its blocks have attention that must stay whole" if architecture.whole_attention else None
