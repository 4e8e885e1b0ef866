"""The dense model of a run: where its blocks come from, and what tells its weights from others."""

import copy
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..architectures import Architecture, Dimensions, architecture_of
from ..blocks import BlockSource, ModelBlocks, tied_tensors
from ..config import IN_MEMORY, CompressionConfig
from ..errors import InputError
from ..formats.checkpoint_files import find_tensors
from ..formats.packed import packing, plain
from ..formats.shard_fingerprint import fingerprint
from ..formats.text_part import about_text_part, text_part
from ..loading.models import compute_dtype, load_model, outer_config, own_dtype, read_generation_config
from ..loading.places import local_folder
from ..loading.shards import ShardBlocks, open_shards, skeleton
from ..loading.stored_tensors import about_unused, left_over, stored_dtype
from ..observing.in_turn import run_in_turn

_PIECE = 2**20
"""Numbers of a tensor that are summed at once for its checksum."""


@dataclass
class Source:
    """An opened dense model."""

    name: str
    config: Any
    architecture: Architecture
    dims: Dimensions
    blocks: BlockSource
    dtype: torch.dtype
    """Of its weights."""
    generation_config: GenerationConfig | None
    identity: Any
    """What distinguishes its weights from other weights."""
    notes: list[str]

    def runs_beside(self, config: CompressionConfig) -> bool:
        """Whether the dense model runs beside the compressed one."""
        return config.feeds_back and self.architecture.makes_up

    def block_dims(self, index: int) -> Dimensions:
        """Return the sizes of one dense block."""
        return self.architecture.block_dims(self.blocks.layers[index], self.dims)

    def states_held(self, n_streams: int, n_texts: int = 1) -> float:
        """Return how many streams' worth of hidden states so many take, with what blocks read beside them.

        Streams of one text share what each token has of its own.
        """
        own, handed = self.architecture.beside_states(self.config)
        return n_streams * (1 + handed / self.dims.d_model) + n_texts * own / self.dims.d_model

    def n_streams(self, config: CompressionConfig) -> int:
        """Return how many streams of hidden states a run holds at most.

        Beside the dense model's and the compressed one's, the probe takes a copy at the end, and where an MLP's output
        is normed, that of a block is kept while it is cut: never both at once. Of experts the inputs and what they
        lack are kept, and what a norm reads of them.
        """
        if not self.runs_beside(config):
            return 1
        return 4 + bool(self.architecture.mlp_norm) if self.architecture.experts else 3


def dense_config_of(name: str) -> tuple[Any, list[str]]:
    """Return the config of a hub name's, folder's or file's language model, unpacked, and what a result says of it."""
    outer = outer_config(name)
    said, notes = text_part(outer), about_text_part(outer)
    if (packed := packing(said)) is not None:
        notes.append(f"its weights are in {packed.bits} bits, by the config, and were unpacked as they were read")
    return plain(said), notes


def require_model(model: object) -> None:
    """Refuse what is neither the name of a model nor a causal language model that is in memory as a whole.

    Raises:
        InputError: says what came and what is allowed.
    """
    if isinstance(model, str | Path):
        return
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"the model is of type {kind}: give a model of transformers (of one with adapters, merge_and_unload()), a "
            "hub name or a folder"
        )
    if any(name.endswith(".base_layer") for name, _module in model.named_modules()):
        raise InputError("the model holds adapters: merge them first (merge_and_unload), or unload them")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("not all weights of the model are in memory: give its folder or hub name, which is streamed")
    if model.get_output_embeddings() is None:
        raise InputError(f"the model is of type {kind}, which has no language head: give a causal language model")


def open_source(model: PreTrainedModel | str, device: torch.device) -> Source:
    """Open a dense model as a stream of blocks: from its shards where it can be, else loaded whole."""
    if isinstance(model, PreTrainedModel):
        config, name = _untied(model), absolute(getattr(model.config, "_name_or_path", "") or IN_MEMORY)
        architecture = architecture_of(config)
        _check_tensors(model, config)
        blocks: BlockSource = ModelBlocks(
            model, architecture, consume=False, widen=compute_dtype(device, model.dtype) != model.dtype
        )
        stored, generation_config, identity, notes = model.dtype, model.generation_config, _checksum(model), []
    else:
        name = absolute(model)
        whole = outer_config(name)
        said = text_part(whole)
        packed, config = packing(said), plain(said)
        architecture, folder = architecture_of(config), local_folder(name)
        stored = own_dtype(config)
        if getattr(config, "dtype", None) is None and folder is not None:
            stored = stored_dtype(find_tensors(folder)) or stored
        dtype = compute_dtype(device, stored)
        opened = "it has no safetensors files" if folder is None else open_shards(folder, config, dtype, device, packed)
        if isinstance(opened, ShardBlocks) and folder is not None:
            blocks, identity = opened, fingerprint(opened.files)
            generation_config = read_generation_config(folder, opened.model)
            notes, unused = [], left_over(opened.files, opened.model)
            if bits := opened.packed:
                notes.append(f"its weights, stored in {bits} bits, were unpacked as they were read")
        else:
            loaded, unused = load_model(name, dtype)  # which refuses packed ones
            config.tie_word_embeddings = loaded.config.tie_word_embeddings
            blocks = ModelBlocks(loaded, architecture, consume=True)
            generation_config, identity = loaded.generation_config, _checksum(loaded)
            notes = [f"the model was loaded whole, not streamed: {opened}"]
        run_in_turn(blocks.model)
        taken = [f"{said}: modegpt rejoin puts back what is made of it" for said in about_text_part(whole)]
        notes += taken or about_unused(unused)
    dims = architecture.dimensions(config)
    return Source(name, config, architecture, dims, blocks, stored, generation_config, identity, notes)


def check_generation(source: Source) -> None:
    """Raise `InputError` if transformers does not save the generation settings: else it says so after all the work."""
    if source.generation_config is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            source.generation_config.save_pretrained(folder)
        except ValueError as problem:
            why = " ".join(str(problem).splitlines()[:2])
            raise InputError(f"transformers does not save the model's generation_config: {why}") from problem


def output_dtype(config: CompressionConfig, source: Source) -> torch.dtype:
    """Return the dtype of the written weights."""
    return source.dtype if config.dtype == "auto" else getattr(torch, config.dtype)


def absolute(model: str) -> str:
    """Return the whole path of what exists; a hub name as it is."""
    return os.path.abspath(model) if Path(model).exists() else model  # noqa: PTH100 - a link to a blob keeps its name


def _check_tensors(model: PreTrainedModel, config: Any) -> None:
    """Refuse a model in memory whose tensors are not those that transformers makes of its config.

    The compressed model is made of that config, too: a mask of a pruned layer would be lost, its weight made at random.

    Raises:
        InputError: names the first tensor that differs.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    said = {name: tuple(tensor.shape) for name, tensor in skeleton(copy.deepcopy(config)).state_dict().items()}
    for name in (*said, *own):
        if own.get(name) != said.get(name):
            here, there = (f"of shape {shapes[name]}" if name in shapes else "not there" for shapes in (own, said))
            raise InputError(
                f"the model's weights are not those of its config: '{name}' is {here}, and by the config {there}; make "
                "pruned or wrapped layers plain (prune.remove, merge_and_unload), and let the config tell all sizes"
            )


def _checksum(model: PreTrainedModel) -> str:
    """Identify the weights of a model in memory by the exact bits of each tensor's float64 sums.

    They are summed in pieces, as torch makes a float64 copy of what it sums.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        pieces = tensor.flatten().split(_PIECE)
        plain = sum(piece.sum(dtype=torch.float64) for piece in pieces)
        absolute = sum(piece.abs().sum(dtype=torch.float64) for piece in pieces)
        digest.update(f"{name} {tuple(tensor.shape)} {float(plain).hex()} {float(absolute).hex()}\n".encode())
    return digest.hexdigest()


def _untied(model: PreTrainedModel) -> Any:
    """Return the config of a model in memory, corrected where its head is not tied as that says."""
    if tied_tensors(model) or not model.config.tie_word_embeddings:
        return model.config
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    return config
