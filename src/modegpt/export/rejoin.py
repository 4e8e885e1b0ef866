"""A compressed language model back inside the multimodal model that it was taken out of.

Of Gemma 3, Mistral Small, Qwen 3.5 and the like `modegpt compress` takes the language model. Here it gets its towers
back, which were not touched: what turns an image (or sound) into hidden states that stand among those of the text.
"""

import copy
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..architectures import ARCHITECTURES, architecture_of
from ..checkpoint import (
    MODELING_FILE,
    REPORT_NAME,
    check_description,
    check_output,
    modeling_source,
    write_weights,
)
from ..disk import DISK
from ..errors import InputError, refused
from ..formats.checkpoint_files import find_tensors
from ..formats.packed import FLOATS, PLAIN, packing, plain, quantization
from ..formats.safetensors_merge import Entry, read_header
from ..formats.text_part import INTERLEAVED_TABLES, MULTIMODAL, has_text_part, is_text, text_part
from ..inspection import describe
from ..loading.models import outer_config, quietly
from ..loading.places import check_no_adapter, files_beside, local_folder
from ..loading.shards import open_shards
from ..loading.stored_tensors import left_over, read_stored, stored_dtype
from ..modeling_modegpt import MODEL_TYPE_PREFIX, PREFIX, auto_map, compressed_class
from .appearing import appearing, writing
from .towers import Towers

SAME = ("hidden_size", "num_hidden_layers", "vocab_size")
"""Sizes in which a compressed language model is as the dense one."""
OWN = ("text_config", "model_type", "architectures", "auto_map", "_name_or_path", "dtype", "quantization_config")
"""Of the multimodal config: what the result has otherwise, or not at all."""
BESIDE = (
    "*processor*.json",
    "*token*",
    "*vocab*",
    "merges.txt",
    "tekken.json",
    "chat_template*",
    "generation_config.json",
)
"""What processors, tokenizers and the settings of generation are saved as."""


def rejoin(name: str, whole: str, out: str | Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write a multimodal checkpoint with a compressed language model in it.

    The language model is `modegpt compress`'s, or `modegpt export`'s of it: the result is then of the multimodal
    model's own class. It may have been trained since. Towers and what leads from them are those of `whole`, in the
    dtype of the language model; so are processors and tokenizer. Memory: the towers, the embeddings and one block; of
    an export the whole model. The folder appears when it is whole; one that is replaced stays until then.

    Args:
        name: the compressed language model: folder or hub name.
        whole: the multimodal model that it was taken out of: folder or hub name.
        out: folder to write to.
        overwrite: whether an existing `out` is replaced.

    Returns:
        What was written; its keys are documented in docs/json-output.md.

    Raises:
        InputError: `out` may not be written, the two do not belong together, or weights are missing.
        WriteError: the disk refused a file; nothing is left of it.
    """
    for each in (name, whole):
        check_output(out, overwrite, each)
        check_no_adapter(each)
    outer, config = outer_config(whole), outer_config(name)
    _check_pair(name, config, whole, outer)
    folder = local_folder(name)
    tensors = {} if folder is None else find_tensors(folder)
    dtype = stored_dtype(tensors)
    if folder is None or dtype is None:
        raise InputError(f"model '{name}' has no safetensors files in 16 or 32 bits: give what modegpt compress wrote")
    _check_unpacked(whole, outer)
    sources = (folder, files_beside(whole, BESIDE))
    beside = [file for source in sources for pattern in BESIDE for file in source.glob(pattern) if file.is_file()]
    towers = Towers(whole, outer, dtype)
    joined = _joined_config(outer, config, towers, dtype)
    with appearing(Path(out).resolve(), overwrite) as target:
        if getattr(config, "modegpt", None):
            with writing(out):
                _write(target, towers.state, {towers.renamed(each): entry for each, entry in tensors.items()})
                joined.save_pretrained(target)
                (target / MODELING_FILE).write_bytes(modeling_source())
            with refused(f"model '{name}' is broken"):
                describe(target)  # which finds every weight, in its shape
        else:
            model = _assembled(towers, joined, _language_model(name, folder, config, dtype), name)
            with writing(out), refused(f"transformers does not save '{name}' as a {towers.class_name}", but=DISK):
                model.save_pretrained(target)
        with writing(out):
            for file in beside:
                shutil.copyfile(file, target / file.name)
            if (folder / REPORT_NAME).is_file():
                shutil.copyfile(folder / REPORT_NAME, target / REPORT_NAME)
    buffers = ARCHITECTURES[config.model_type.removeprefix(MODEL_TYPE_PREFIX)].buffers
    own = [entry for each, entry in tensors.items() if entry.dtype in PLAIN and not each.endswith(buffers)]
    return {
        "model": name,
        "whole": whole,
        "out": str(out),
        "class": joined.architectures[0],
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": {"language_model": sum(prod(entry.shape) for entry in own), "towers": towers.n_parameters},
        "warnings": _unlike(tensors, towers, name, whole),
    }


def _check_pair(name: str, config: PreTrainedConfig, whole: str, outer: PreTrainedConfig) -> None:
    """Raise `InputError` unless one is a language model as it may be in the other."""
    if has_text_part(config):
        raise InputError(f"model '{name}' is multimodal: give the language model that modegpt compress made")
    if outer.model_type not in MULTIMODAL:
        known = ", ".join(MULTIMODAL)
        raise InputError(f"model '{whole}' is of type '{outer.model_type}', not a dense multimodal one ({known})")
    said = text_part(outer)
    dense = plain(said)
    for which, each in ((name, config), (whole, dense)):
        if quantization(each):
            raise InputError(f"model '{which}' is quantized: give it in 16 or 32 bits, and quantize the result")
    kind = config.model_type.removeprefix(MODEL_TYPE_PREFIX)
    if kind != dense.model_type:
        raise InputError(
            f"model '{name}' is of type '{kind}', and the language model in '{whole}' of type '{dense.model_type}'"
        )
    for size in SAME:
        own, other = getattr(config, size), getattr(dense, size)
        if own != other:
            raise InputError(f"model '{name}' has {size} {own}, and the language model in '{whole}' {other}")
    causal, saved = ARCHITECTURES[kind].causal_class, (config.architectures or [None])[0]
    if description := getattr(config, "modegpt", None):
        check_description(description, config.num_hidden_layers, name)
        causal = PREFIX + causal
    if saved != causal:
        raise InputError(f"model '{name}' was saved as a {saved}, and a {causal} is what was taken out of '{whole}'")


def _check_unpacked(whole: str, outer: PreTrainedConfig) -> None:
    """Raise `InputError` if towers, and not the language model alone, are in 8 bits."""
    folder = local_folder(whole) if packing(text_part(outer)) is not None else None
    files = {} if folder is None else find_tensors(folder)
    for name, entry in files.items():
        if entry.dtype in FLOATS and not is_text(name):
            raise InputError(f"model '{whole}' has '{name}' in 8 bits, too: give it in 16 or 32 bits")


def _unlike(tensors: dict[str, Entry], towers: Towers, name: str, whole: str) -> list[str]:
    """Return a warning where the embeddings, which compression leaves as they are, are not those of the whole model."""
    own = towers.embedding
    place = next((each for each in tensors if each.endswith("embed_tokens.weight")), None)
    if place is not None and torch.equal(read_stored(tensors, place, None).to(own), own):
        return []
    return [
        f"the embeddings of '{name}' are not those in '{whole}': unless they were trained since, it is another model "
        "that this one was taken out of"
    ]


def _joined_config(outer: PreTrainedConfig, config: PreTrainedConfig, towers: Towers, dtype: torch.dtype) -> Any:
    """Return the config of the result."""
    stock, compressed = type(outer), getattr(config, "modegpt", None)
    fields = {name: value for name, value in outer.to_dict().items() if name not in OWN}
    kind: Any = compressed_class(stock.__name__) if compressed else stock
    text = copy.deepcopy(outer.text_config)
    if not compressed:
        architecture = architecture_of(config)
        architecture.set_mlp_width(text, architecture.mlp_width(config))
    texts = {name: value for name, value in text.to_dict().items() if name != "quantization_config"}
    with refused(f"transformers makes no {kind.__name__} of these"):
        joined = kind.from_dict({**fields, "text_config": texts})
    joined.tie_word_embeddings = joined.text_config.tie_word_embeddings = config.tie_word_embeddings
    joined.dtype = joined.text_config.dtype = dtype
    joined.architectures = [towers.class_name]
    if compressed:
        name = stock.__name__.removesuffix("Config")
        whole: dict[str, Any] = {"name": name, "generates": towers.class_name, "language_model": towers.inner}
        if outer.text_config.model_type in INTERLEAVED_TABLES:
            whole["interleaved_tables"] = True
        joined.modegpt = {**compressed, "multimodal": whole}
        joined.architectures, joined.auto_map = [PREFIX + towers.class_name], auto_map(joined)
    return joined


def _language_model(name: str, folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of an export by the names of its modules, in which experts are fused that files hold apart.

    Raises:
        InputError: a weight is missing, has no place, or is of another shape than the config says.
    """
    opened = open_shards(folder, copy.deepcopy(config), dtype, torch.device("cpu"), None)
    if isinstance(opened, str):
        raise InputError(f"model '{name}' is broken: {opened}; export it again")
    if rest := left_over(opened.files, opened.model):
        raise InputError(f"model '{name}' holds '{rest[0]}', which has no place in its class: export it again")
    return opened.whole()


def _assembled(towers: Towers, config: Any, language_model: dict[str, Tensor], name: str) -> PreTrainedModel:
    """Return a model of the stock class from its parts.

    Raises:
        InputError: a weight is of another shape than the config says: so are towers of which some are as wide as the
            language model's MLPs (Idefics 2).
    """
    state = towers.state | {towers.renamed(each): tensor for each, tensor in language_model.items()}
    with quietly(and_silently=True), refused(f"'{name}' does not go into a {towers.class_name}"):
        model, found = type(towers.model).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=config.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    unlike = [each[0] for each in found["mismatched_keys"]]
    if unlike := sorted({*unlike, *found["missing_keys"], *found["unexpected_keys"]}):
        raise InputError(
            f"'{name}' does not go into a {towers.class_name} with MLPs of its width: '{unlike[0]}' is missing, or of "
            "another shape; give what modegpt compress wrote, or export again"
        )
    model.name_or_path = model.config.name_or_path = ""
    return model


def _write(target: Path, towers: dict[str, Tensor], language_model: dict[str, Entry]) -> None:
    """Write the weights of the towers and of the language model."""
    apart = target / "towers.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in towers.items()}, apart)
    write_weights(read_header(apart)[0] | language_model, target)
    apart.unlink()
