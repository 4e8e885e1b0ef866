"""Everything a run settles before its first block: the text, the sizes, the dtypes, where blocks come from."""

import copy
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from ..architectures import Architecture, Dimensions, architecture_of
from ..blocks import BlockSource, ModelBlocks, tied_tensors
from ..calibration import begin_windows, check_source, draw_windows, load_text, start_token, tokenize
from ..config import IN_MEMORY, TOKEN_IDS, CompressionConfig
from ..errors import InputError
from ..evaluate import check_window
from ..formats.checkpoint_files import find_tensors
from ..formats.packed import packing, plain
from ..formats.shard_fingerprint import fingerprint
from ..formats.text_part import about_text_part, text_part
from ..loading.models import (
    beyond_vocabulary,
    check_model,
    compute_dtype,
    load_model,
    outer_config,
    own_dtype,
    read_generation_config,
)
from ..loading.places import local_folder
from ..loading.shards import ShardBlocks, open_shards, skeleton
from ..loading.stored_tensors import about_unused, left_over, stored_dtype
from ..loading.tokenizers import has_tokenizer, open_tokenizer
from ..observing.experts import run_in_turn
from ..ranks.whole import LayerSizes
from ..versions import versions

EXPERT_STEP = 8
"""Of the width of experts: torch's grouped products take no rows but those of a multiple of 16 bytes."""
IDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""What token ids may be given in."""
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

    def n_streams(self, config: CompressionConfig) -> int:
        """Return how many streams of hidden states a run holds at most.

        Beside the dense model's and the compressed one's, the probe takes a copy at the end, and where an MLP's output
        is normed, that of a block is kept while it is cut: never both at once. Of experts the inputs and what they
        lack are kept.
        """
        if not self.runs_beside(config):
            return 1
        return 4 if self.architecture.experts else 3


@dataclass
class Text:
    """The calibration windows, and the tokenizer that made them."""

    windows: Tensor
    tokenizer: Any
    tokenizer_of: str | None
    """The model whose tokenizer it is as it is; None where it was given as an object, or there is none."""
    about: dict[str, Any]


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


def open_text(
    calibration: str | Path | Tensor,
    config: CompressionConfig,
    model: PreTrainedModel | str,
    tokenizer: Any,
) -> Text:
    """Return `(samples, seq_len)` windows, checking all that can be checked before the model is loaded.

    Raises:
        InputError: the model, the data or the window is unusable.
    """
    name = None if isinstance(model, PreTrainedModel) else model
    tokenizer_of = _absolute(name) if name is not None and tokenizer is None else None
    model_config = model.config if isinstance(model, PreTrainedModel) else check_model(model)[0]
    architecture_of(model_config)
    if not isinstance(calibration, str | Path | Tensor):
        raise InputError(
            f"calibration is of type {type(calibration).__name__}; give (samples, seq_len) token ids as a tensor, a "
            "data set or a file"
        )
    if isinstance(calibration, Tensor):
        if calibration.ndim != 2 or calibration.dtype not in IDS or not calibration.numel():
            raise InputError(
                f"calibration has shape {tuple(calibration.shape)} and dtype {calibration.dtype}; "
                "give (samples, seq_len) token ids, a data set or a file"
            )
        calibration = calibration.to("cpu", torch.int64)
        check_window(model_config, calibration.shape[1])
        if tokenizer is None and name is not None and has_tokenizer(name):
            tokenizer = open_tokenizer(name)
        return Text(calibration, tokenizer, tokenizer_of, _about(TOKEN_IDS, calibration))
    data = str(calibration)
    check_source(data)
    check_window(model_config, config.seq_len)
    if tokenizer is None:
        if name is None:
            raise InputError("text for a model in memory needs its tokenizer: pass tokenizer=..., or token ids")
        tokenizer = open_tokenizer(name)
    tokens, start = tokenize(load_text(data, "calibration"), tokenizer), start_token(model_config, tokenizer)
    own = config.seq_len - (start is not None)
    if not own:
        raise InputError("seq_len 1 leaves no room behind the model's first token; give 2 or more")
    windows = draw_windows(tokens, config.samples, own, config.sampling, config.seed, data)
    windows = begin_windows(windows.flatten(), config.seq_len, start).view(len(windows), -1)
    return Text(windows, tokenizer, tokenizer_of, {**_about(data, windows), "file": _file(data), "start_token": start})


def check_ids(text: Text, source: Source) -> None:
    """Raise `InputError` if a token of the text is outside the model's vocabulary."""
    if (bounds := beyond_vocabulary(text.windows, source.blocks.model)) is not None:
        low, high, rows = bounds
        raise InputError(
            f"the calibration text has tokens from {low} to {high}, and the model has {rows} of them: give "
            "ids by this model's own tokenizer"
        )


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


def plain_text(config: CompressionConfig) -> Tensor:
    """Return windows that stand for a text which nothing will read: their shape, and no tokens."""
    return torch.zeros(1, 1, dtype=torch.int64).expand(config.samples, config.seq_len)


def _about(data: str, windows: Tensor) -> dict[str, Any]:
    return {"data": data, "samples": len(windows), "seq_len": windows.shape[1], "tokens": windows.numel()}


def _absolute(model: str) -> str:
    """Return the whole path of what exists; a hub name as it is."""
    return os.path.abspath(model) if Path(model).exists() else model  # noqa: PTH100 - a link to a blob keeps its name


def _file(data: str) -> str | None:
    """Return the whole path of a text in a file; None of a known data set."""
    return str(Path(data).resolve()) if Path(data).is_file() else None


def open_source(model: PreTrainedModel | str, device: torch.device) -> Source:
    """Open a dense model as a stream of blocks: from its shards where it can be, else loaded whole."""
    if isinstance(model, PreTrainedModel):
        config, name = _untied(model), _absolute(getattr(model.config, "_name_or_path", "") or IN_MEMORY)
        architecture = architecture_of(config)
        _check_tensors(model, config)
        blocks: BlockSource = ModelBlocks(model, architecture, consume=False)
        stored, generation_config, identity, notes = model.dtype, model.generation_config, _checksum(model), []
    else:
        name = _absolute(model)
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
        notes += about_text_part(whole) or about_unused(unused)
    dims = architecture.dimensions(config)
    return Source(name, config, architecture, dims, blocks, stored, generation_config, identity, notes)


def run_fingerprint(
    source: Source, text: Text, config: CompressionConfig, out_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides the result of a run, by field, as JSON values."""
    settings = config.as_dict()
    for irrelevant in ("device", "max_host_memory"):
        settings.pop(irrelevant, None)
    model_config = json.loads(source.config.to_json_string(use_diff=False))
    model_config.pop("_name_or_path", None)  # how the call spelled it: the weights are told by themselves
    ids = hashlib.sha256(str(tuple(text.windows.shape)).encode())
    ids.update(text.windows.to(torch.int64).contiguous().numpy().tobytes())
    return {
        "model": source.identity,
        "model config": hashlib.sha256(json.dumps(model_config, sort_keys=True).encode()).hexdigest(),
        "calibration tokens": ids.hexdigest(),
        "output dtype": str(out_dtype).removeprefix("torch."),
        "device type": device.type,
        "versions": versions(),
        **{f"setting {name}": value for name, value in settings.items()},
    }


def output_dtype(config: CompressionConfig, source: Source) -> torch.dtype:
    """Return the dtype of the written weights."""
    return source.dtype if config.dtype == "auto" else getattr(torch, config.dtype)


def layer_sizes(block: nn.Module, architecture: Architecture, dims: Dimensions) -> LayerSizes:
    """Return what one rank of each module costs in a dense block, biases included, and the block's parameters."""
    dims = architecture.block_dims(block, dims)
    cost = architecture.rank_costs(dims, architecture.biases_of(block))
    whole = {"qk"} if architecture.norms(block) else set()
    if architecture.whole_attention:
        whole |= {"qk", "vo"}
    if not architecture.cuts_mlp(block):
        whole.add("mlp")
        # It has no rank to cut, but its size decides the shares of the budget.
        cost["mlp"] = sum(parameter.numel() for parameter in architecture.whole_mlp(block)) // dims.d_int
    return LayerSizes(
        full=dims.full_ranks,
        cost=cost,
        step={
            "mlp": EXPERT_STEP if architecture.experts else 1,
            "qk": 2 if dims.rotary_dim else 1,
            "vo": 1,
        },
        total=sum(parameter.numel() for parameter in block.parameters()),
        whole=frozenset(whole),
    )


def cached_numbers(
    blocks: Iterable[nn.Module], architecture: Architecture, dims: Dimensions, ranks: list[dict[str, int]]
) -> dict[str, int]:
    """Return how many numbers a token puts into the key-value cache, `dense` and `compressed`.

    Args:
        blocks: the dense ones, whose tensors may be on the meta device.
        architecture: their family, resolved.
        dims: their sizes.
        ranks: of every layer of the compressed model.
    """
    numbers = {"dense": 0, "compressed": 0}
    for block, own in zip(blocks, ranks, strict=True):
        outputs = {path: getattr(module, "out_features", 0) for path, module in block.named_modules()}
        numbers["dense"] += architecture.dense_cached(dims, outputs)
        numbers["compressed"] += architecture.cached(dims, own, outputs)
    return numbers


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
