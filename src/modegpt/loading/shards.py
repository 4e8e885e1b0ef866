"""Blocks straight from the safetensors shards of a checkpoint: only what is in use is ever in memory."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel

from ..architectures import architecture_of
from ..around_blocks import pull_back_logits, run_behind_blocks, run_identity_blocks
from ..blocks import Calibration, check_weights, layers_prefix, required_tensors
from ..errors import InputError, refused
from ..formats.checkpoint_files import find_tensors
from ..formats.packed import FLOATS, PLAIN, Packing
from ..formats.safetensors_merge import Entry
from ..hidden_states import HiddenStates
from ..modeling_modegpt import base_of, decoder_layers
from .stored_tensors import (
    check_packing,
    in_blocks,
    is_joined,
    is_swapped,
    meant_shape,
    read_fours,
    read_stored,
    stored_name,
    stored_names,
)


def why_not_streamable(files: dict[str, Entry], model: PreTrainedModel, layers: nn.ModuleList) -> str | None:
    """Return why a checkpoint cannot be streamed (`model` is its skeleton, `layers` its blocks), or None if it can.

    Raises:
        InputError: a weight is stored as something else than numbers of 16 bits or more, or floats of 8 or 4.
    """
    if not files:
        return "it has no safetensors files"
    hidden = [name for module in layers.modules() for name in module._non_persistent_buffers_set]
    if hidden:
        return f"its blocks hold a buffer ('{hidden[0]}') that no file stores"
    wanted = model.state_dict()
    for name in required_tensors(model):
        stored, shape = stored_names(name, files, model), list(wanted[name].shape)
        if len(stored) > 1:
            rows = shape[0] if is_joined(name, model) else shape[0] * shape.pop(1)
            shape = [rows // len(stored), *shape[1:]]
        if is_swapped(name, files, model):
            shape[1:] = shape[:0:-1]
        if not stored or any(meant_shape(each, files) != shape for each in stored):
            return f"its shards store '{name}' under another name or shape"
        fours = in_blocks(stored[0], files)
        if not fours and wanted[name].is_floating_point() and (kind := files[stored[0]].dtype) not in (*PLAIN, *FLOATS):
            raise InputError(f"the checkpoint has '{stored[0]}' as {kind}: give it in 16 or 32 bits, or 8-bit floats")
    return None


def unties(files: dict[str, Entry], model: PreTrainedModel, dtype: torch.dtype, packing: Packing | None) -> bool:
    """Whether a checkpoint holds two different weights for what its config ties (`model` is its skeleton).

    transformers then goes by the files, by what they are in the dtype to run in. Cost: where the files hold both, both
    are read.
    """
    for pair in model.all_tied_weights_keys.items() if model.config.tie_word_embeddings else ():
        stored = [name for each in pair if (name := stored_name(each, files, model)) is not None]
        if len(stored) == 2 and not torch.equal(*(read_stored(files, name, packing).to(dtype) for name in stored)):
            return True
    return False


def open_shards(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, packing: Packing | None
) -> "ShardBlocks | str":
    """Return the blocks of a checkpoint folder, or why it cannot be read block by block.

    Args:
        folder: with the files.
        config: of the dense model, unpacked; it learns where the files untie what it ties.
        dtype: to run in.
        device: where embeddings are looked up.
        packing: of weights in 8 or 4 bits.

    Raises:
        InputError: a file is broken, or it is not known what a weight means.
    """
    files, empty = find_tensors(folder), skeleton(config)
    check_packing(files, packing)
    if unties(files, empty, dtype, packing):
        config.tie_word_embeddings = False
        empty = skeleton(config)
    layers = decoder_layers(empty, architecture_of(config).describe())
    if (obstacle := why_not_streamable(files, empty, layers)) is not None:
        return obstacle
    return ShardBlocks(files, empty, layers, dtype, device, packing)


class ShardBlocks:
    """The blocks of a checkpoint folder, one at a time.

    Args:
        files: where each tensor is, from `find_tensors`.
        model: the checkpoint's skeleton.
        layers: the skeleton's blocks.
        dtype: to run in.
        device: where embeddings are looked up.
        packing: of weights in 8 or 4 bits.
    """

    def __init__(
        self,
        files: dict[str, Entry],
        model: PreTrainedModel,
        layers: nn.ModuleList,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | None = None,
    ) -> None:
        """Note where everything is; no weight is read."""
        self.files, self.dtype, self.device, self._packing = files, dtype, device, packing
        self.model, self.layers = model, layers
        self.copies = True
        self._held: PreTrainedModel | None = None
        self.prefix = layers_prefix(self.model, self.layers)
        self._architecture = architecture_of(model.config)

    def take(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.take`."""
        block = copy.deepcopy(self.layers[index])
        self._load(block, f"{self.prefix}.{index}.", device)
        return check_weights(block.eval(), index)

    def peek(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.peek`."""
        return self.take(index, device)

    def blank(self, index: int, device: torch.device) -> nn.Module:
        """See `BlockSource.blank`."""
        block = copy.deepcopy(self.layers[index]).to_empty(device=device)
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            tensor.data = tensor.data.to(self._architecture.stored_dtype(name, tensor.dtype, self.dtype))
        return block.eval()

    def other_tensors(self) -> dict[str, Tensor]:
        """See `BlockSource.other_tensors`; the tensors are read from the shards, in their stored dtype, or float32."""
        inside = self.prefix + "."
        return {name: self._read(name) for name in required_tensors(self.model) if not name.startswith(inside)}

    def embed(self, windows: Tensor, batch_size: int, hidden: HiddenStates, cache: Cache | None = None) -> Calibration:
        """See `BlockSource.embed`. Embeddings and norms are in memory during this call only, or as long as `around`."""
        model = self._held
        if model is None:
            model = self._copy()
            self._load_outside(model, base_of(model))
        layers = self._layers_of(model)
        return Calibration(hidden, run_identity_blocks(model, layers, windows, batch_size, hidden, cache))

    @contextmanager
    def around(self) -> Iterator[None]:
        """See `BlockSource.around`."""
        self._held = self._without_blocks()
        try:
            yield
        finally:
            self._held = None

    def logits(self, states: Iterable[Tensor]) -> Iterator[Tensor]:
        """See `BlockSource.logits`. Embeddings, norms and the head are in memory as those of `embed` are."""
        model = self._without_blocks() if self._held is None else self._held
        yield from run_behind_blocks(model, self._layers_of(model), states)

    def pull_back(self, states: Iterable[Tensor], draw: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """See `BlockSource.pull_back`. Embeddings, norms and the head are in memory during this call only."""
        model = self._without_blocks()
        yield from pull_back_logits(model, self._layers_of(model), states, draw)

    def _without_blocks(self) -> PreTrainedModel:
        """Return the model with all its weights but those of its blocks."""
        model = self._copy()
        self._load_outside(model, model)
        return model

    def _copy(self) -> PreTrainedModel:
        """Copy all of the skeleton but its blocks, which hold no weights and are shared."""
        return copy.deepcopy(self.model, {id(block): block for block in self.layers})

    def _layers_of(self, model: PreTrainedModel) -> nn.ModuleList:
        return decoder_layers(model, {"layers": layers_prefix(base_of(self.model), self.layers)})

    def _load_outside(self, model: PreTrainedModel, part: nn.Module) -> None:
        """Give every module of a part of the model its tensors, but for those inside the blocks."""
        names = {id(module): name for name, module in model.named_modules()}
        tied = set(model.state_dict()).difference(required_tensors(model))
        for module in part.modules():
            name = names[id(module)]
            if name == self.prefix or name.startswith(self.prefix + "."):
                continue
            own = [
                key for key, value in module._parameters.items() if value is not None and f"{name}.{key}" not in tied
            ]
            if own or module._buffers:
                self._load_own(model, module, name, own)
        model.tie_weights()

    def _load_own(self, model: PreTrainedModel, module: nn.Module, name: str, keys: list[str]) -> None:
        """Give one module outside the blocks its own tensors; buffers that no file holds are computed anew."""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device=self.device)
        if module._buffers:  # as the parameters are on the meta device until here, no random numbers are drawn for them
            model._init_weights(module)
        for key in keys:
            tensor = self._read(f"{name}.{key}").to(self.device, self.dtype)
            module._parameters[key] = nn.Parameter(tensor, requires_grad=False)

    @property
    def packed(self) -> int:
        """In how many bits packed weights are stored, 8 or 4; 0 where none are."""
        fours = any(in_blocks(name, self.files) for name in self.files)
        return 4 if fours else 8 * any(entry.dtype in FLOATS for entry in self.files.values())

    def whole(self) -> dict[str, Tensor]:
        """Return all tensors of the model, on the CPU, in the dtypes to run in."""
        wanted = self.model.state_dict()
        return {name: self._read(name, self._dtype_of(name, wanted[name])) for name in required_tensors(self.model)}

    def _dtype_of(self, name: str, wanted: Tensor) -> torch.dtype:
        """Return the dtype to run a tensor in; `wanted` is that of the skeleton."""
        return self._architecture.stored_dtype(name, wanted.dtype, self.dtype)

    def _load(self, module: nn.Module, prefix: str, device: torch.device) -> None:
        parameters, wanted = {name for name, _parameter in module.named_parameters()}, module.state_dict()
        for name in list(wanted):  # buffers are among these, as the numbers of an activation
            path, _, key = name.rpartition(".")
            tensor = self._read(prefix + name, self._dtype_of(name, wanted[name])).to(device)
            own = nn.Parameter(tensor, requires_grad=False) if name in parameters else tensor
            setattr(module.get_submodule(path), key, own)

    def _read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in a dtype, or as it is stored; what is stored apart is never in another one as a whole."""
        stored = stored_names(name, self.files, self.model)
        if in_blocks(stored[0], self.files):
            return read_fours(self.files, stored[0], dtype or torch.bfloat16)
        if len(stored) == 1:
            tensor = read_stored(self.files, stored[0], self._packing)
            if is_swapped(name, self.files, self.model):
                tensor = tensor.mT.contiguous()
            return tensor if dtype is None else tensor.to(dtype)
        first = read_stored(self.files, stored[0], self._packing)
        fused = first.new_empty(len(stored), *first.shape, dtype=dtype or first.dtype)
        for part, own in zip(fused, stored, strict=True):
            part.copy_(read_stored(self.files, own, self._packing))
        return fused.view(self.model.get_parameter_or_buffer(name).shape)


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the dense model on the meta device: every module and shape, no memory.

    Raises:
        InputError: no model can be made of the config.
    """
    with torch.device("meta"), refused(f"transformers makes no {config.model_type} model of this config"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model.eval()
