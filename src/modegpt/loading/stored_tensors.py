"""The tensors of a checkpoint folder: in which file each is, under which name, and what its numbers mean."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ..architectures import architecture_of
from ..errors import InputError
from ..formats.packed import BLOCKS, FLOATS, PLAIN, Packing, unpack, unpack_fours
from ..formats.safetensors_merge import Entry, main_dtype
from ..formats.text_part import names_in_files
from ..modeling_modegpt import base_of

COMPUTED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$", r"\.attention\.bias$")
"""Of older checkpoints: buffers that are not stored any more."""


def check_packing(files: dict[str, Entry], packing: Packing | None) -> None:
    """Raise `InputError` unless it is known what every weight in 8 or 4 bits means."""
    for name, entry in files.items():
        bits = 4 if in_blocks(name, files) else 8
        if packing is None and (bits == 4 or entry.dtype in FLOATS):
            said = f"the checkpoint has '{name}' in {bits} bits"
            raise InputError(f"{said}, and its config does not say how it is quantized")
        if packing is not None:
            packing.scale_of(name, entry.dtype, files)


def stored_name(name: str, stored: Any, model: PreTrainedModel) -> str | None:
    """Return the name under which a shard holds a tensor: checkpoints of a base model leave out its prefix.

    Those of a multimodal model put another before it.
    """
    if name in stored:
        return name
    candidates, names, other = [name.removeprefix(model.base_model_prefix + ".")], [name], name
    for module, file in architecture_of(model.config).file_names:
        if module in name:
            names.append(name.replace(module, file, 1))
        other = other.replace(module, file, 1)
    names.append(other)
    candidates += [*names, *(candidate for each in names for candidate in names_in_files(each))]
    return next((candidate for candidate in candidates if candidate in stored), None)


def stored_names(name: str, stored: Any, model: PreTrainedModel) -> list[str]:
    """Return the names under which shards hold a tensor: one; of fused experts, and of joined parts, all; or none."""
    for end in ("", BLOCKS[0]):
        if (found := stored_name(name + end, stored, model)) is not None:
            return [found]
    architecture = architecture_of(model.config)
    for module, files in architecture.joined_files:
        if module in name:
            return _all(stored_name(name.replace(module, file, 1), stored, model) for file in files)
    block, _, key = name.partition(architecture.experts or name)
    gate, up, down = architecture.expert_files
    parts = {".gate_up_proj": (gate, up), ".up_proj": (up,), ".down_proj": (down,)}.get(key, ())
    numbers = range(architecture.dimensions(model.config).n_experts)
    return _all(stored_name(f"{block}{part.format(n)}.weight", stored, model) for n in numbers for part in parts)


def left_over(files: dict[str, Entry], model: PreTrainedModel) -> list[str]:
    """Return the names of stored tensors that have no place in a model, but for what its class knows and leaves out.

    Scales of packed weights have one, and so have masks and rotary frequencies, which are computed anew.
    """
    placed = {stored for name in model.state_dict() for stored in stored_names(name, files, model)}
    base: Any = base_of(model)  # which knows of weights that files hold for layers that read those of others
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *(base._keys_to_ignore_on_load_unexpected or ())]
    passed = re.compile("|".join((*ignored, *COMPUTED)))
    packed = {name.rpartition(".")[0] for name, entry in files.items() if entry.dtype not in PLAIN}
    rest = (name for name in files.keys() - placed if not passed.search(name))
    return sorted(name for name in rest if name.rpartition(".")[0] not in packed)


def about_unused(names: list[str]) -> list[str]:
    """Return what a result says of stored tensors that have no place in the model."""
    if not names:
        return []
    number = f"{len(names)} tensors, '{names[0]}' among them," if len(names) > 1 else f"the tensor '{names[0]}'"
    return [f"the files hold {number} for which a causal language model of this config has no place: left out"]


def is_joined(name: str, model: PreTrainedModel) -> bool:
    """Whether files may hold a tensor in parts that stand one after another in it."""
    return any(module in name for module, _files in architecture_of(model.config).joined_files)


def is_swapped(name: str, files: dict[str, Entry], model: PreTrainedModel) -> bool:
    """Whether the files hold a weight of all experts with its last two dims swapped, as those of Qwen 3 VL do.

    Gates and ups are `(experts, 2·d_int, d_model)` and downs `(experts, d_model, d_int)`, or both are swapped: which of
    it, the two shapes together always tell.
    """
    experts, _, key = name.rpartition(".")
    pair = [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    if f"{experts}.{key}" not in pair:
        return False
    stored = [stored_name(each, files, model) for each in pair]
    shapes = [files[each].shape for each in stored if each is not None]
    if [len(shape) for shape in shapes] != [3, 3]:
        return False
    wanted = [model.get_parameter(each).shape for each in pair]
    by_input, as_wanted = (gates[1] == downs[2] for gates, downs in (shapes, wanted))
    return by_input != as_wanted


def _all(names: Iterable[str | None]) -> list[str]:
    """Return the names, or none where one is missing."""
    found = list(names)
    return [] if None in found else [each for each in found if each is not None]


def meant_shape(name: str, files: dict[str, Entry]) -> list[int]:
    """Return the shape of a weight when it is unpacked."""
    shape = files[name].shape
    if not in_blocks(name, files) or len(shape) != 4:
        return shape
    n_experts, n_rows, n_blocks, n_bytes = shape
    return [n_experts, 2 * n_bytes * n_blocks, n_rows]


def in_blocks(name: str, files: dict[str, Entry]) -> bool:
    """Whether a stored tensor is a weight in 4 bits, without its scales."""
    blocks, scales = BLOCKS
    return name.endswith(blocks) and name.removesuffix(blocks) + scales in files and files[name].dtype == "U8"


def stored_dtype(files: dict[str, Entry]) -> torch.dtype | None:
    """Return what most of a checkpoint's numbers are, where a config does not say; None of no plain floats.

    transformers then takes that of the first tensor.
    """
    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return names.get(main_dtype(files.values(), names) or "")


def read_stored(files: dict[str, Entry], name: str, packing: Packing | None) -> Tensor:
    """Return a tensor as it is stored, a packed one in float32."""
    try:
        with safe_open(files[name].path, framework="pt") as file:
            # A copy, so that the pages of the memory-mapped file are given back with it.
            tensor = file.get_tensor(name).clone()
    except SafetensorError as problem:
        raise InputError(f"'{files[name].path}' is broken ({problem}): fetch or save the model again") from problem
    if packing is None or (scale := packing.scale_of(name, files[name].dtype, files)) is None:
        return tensor
    with _unpacking(name):
        return unpack(tensor, read_stored(files, scale, None), packing.block)


def read_fours(files: dict[str, Entry], name: str, dtype: torch.dtype) -> Tensor:
    """Return the weight of all experts whose numbers in 4 bits are stored under a name, in a dtype."""
    blocks, scales = BLOCKS
    scale = read_stored(files, name.removesuffix(blocks) + scales, None)
    with _unpacking(name):
        return unpack_fours(read_stored(files, name, None), scale, dtype)


@contextmanager
def _unpacking(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise InputError(f"'{name}' cannot be unpacked: {problem}") from problem
