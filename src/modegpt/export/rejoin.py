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
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..architectures import ARCHITECTURES, architecture_of
from ..blocks import required_tensors
from ..checkpoint import MODELING_FILE, REPORT_NAME, assemble, check_output, modeling_source, write_json
from ..disk import DISK
from ..errors import InputError, refused
from ..formats.checkpoint_files import INDEX, MAX_FILE_BYTES, SINGLE, find_tensors
from ..formats.packed import quantization
from ..formats.safetensors_merge import Entry, main_dtype, merge, read_header
from ..formats.text_part import MULTIMODAL, has_text_part, multimodal_class, text_part
from ..loading.models import outer_config, quietly
from ..loading.places import files_beside, local_folder
from ..modeling_modegpt import MODEL_TYPE_PREFIX, PREFIX, auto_map, compressed_class
from .appearing import appearing, writing

SAME = ("hidden_size", "num_hidden_layers", "vocab_size")
"""Sizes in which a compressed language model is as the dense one."""
OWN = ("text_config", "model_type", "architectures", "auto_map", "_name_or_path", "dtype", "quantization_config")
"""Of the multimodal config: what the result has otherwise, or not at all."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    model's own class. Towers and what leads from them are those of `whole`, in the dtype of the language model; so are
    processors and tokenizer. Memory: the towers, the embeddings and one block; of an export the whole model. The folder
    appears when it is whole; one that is replaced stays until then.

    Args:
        name: the compressed language model: folder or hub name.
        whole: the multimodal model that it was taken out of: folder or hub name.
        out: folder to write to.
        overwrite: whether an existing `out` is replaced.

    Returns:
        What was written; its keys are documented in docs/json-output.md.

    Raises:
        InputError: `out` may not be written, or the two do not belong together.
        WriteError: the disk refused a file; nothing is left of it.
    """
    check_output(out, overwrite, name)
    check_output(out, overwrite, whole)
    outer, config = outer_config(whole), outer_config(name)
    _check_pair(name, config, whole, outer)
    folder = local_folder(name)
    tensors = {} if folder is None else find_tensors(folder)
    dtype = DTYPES.get(main_dtype(tensors.values(), DTYPES) or "")
    if folder is None or dtype is None:
        raise InputError(f"model '{name}' has no safetensors files in 16 or 32 bits: give what modegpt compress wrote")
    towers = _Towers(whole, outer, dtype)
    towers.check_embedding(tensors, name)
    joined = _joined_config(outer, config, towers, dtype)
    with appearing(Path(out).resolve(), overwrite) as target:
        if getattr(config, "modegpt", None):
            with writing(out):
                _write(target, towers.state, {towers.renamed(each): entry for each, entry in tensors.items()})
                joined.save_pretrained(target)
                (target / MODELING_FILE).write_bytes(modeling_source())
        else:
            renamed = {towers.renamed(each): tensor for each, tensor in _read(tensors).items()}
            model = assemble(type(towers.model), joined, towers.state | renamed)
            with writing(out), refused(f"transformers does not save '{name}' as a {type(model).__name__}", but=DISK):
                model.save_pretrained(target)
        with writing(out):
            for source in (folder, files_beside(whole, BESIDE)):
                for file in sorted({file for pattern in BESIDE for file in source.glob(pattern)}):
                    shutil.copyfile(file, target / file.name)
            if (folder / REPORT_NAME).is_file():
                shutil.copyfile(folder / REPORT_NAME, target / REPORT_NAME)
    buffers = ARCHITECTURES[config.model_type.removeprefix(MODEL_TYPE_PREFIX)].buffers
    own = [entry for each, entry in tensors.items() if entry.dtype in DTYPES and not each.endswith(buffers)]
    beside = [parameter for each, parameter in towers.model.named_parameters() if each in towers.state]
    return {
        "model": name,
        "whole": whole,
        "out": str(out),
        "class": joined.architectures[0],  # pyright: ignore[reportOptionalSubscript]
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": {
            "language_model": sum(prod(entry.shape) for entry in own),
            "towers": sum(parameter.numel() for parameter in beside),
        },
    }


def _check_pair(name: str, config: PreTrainedConfig, whole: str, outer: PreTrainedConfig) -> None:
    """Raise `InputError` unless one is a language model as it may be in the other."""
    if has_text_part(config):
        raise InputError(f"model '{name}' is multimodal: give the language model that modegpt compress made")
    if outer.model_type not in MULTIMODAL:
        known = ", ".join(MULTIMODAL)
        raise InputError(f"model '{whole}' is of type '{outer.model_type}', not a dense multimodal one ({known})")
    dense = text_part(outer)
    for which, each in ((name, config), (whole, outer), (whole, dense)):
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


class _Towers:
    """All of a multimodal model but its language model, in memory."""

    def __init__(self, whole: str, outer: PreTrainedConfig, dtype: torch.dtype) -> None:
        """Load it; of the language model one block and the embeddings come with it.

        Raises:
            InputError: a weight is missing, or of another shape than the config says.
        """
        self.name = whole
        model_class = getattr(transformers, multimodal_class(outer.model_type))
        with quietly(and_silently=True), refused(f"model '{whole}' cannot be loaded"):
            self.model, found = model_class.from_pretrained(
                whole, config=_shallow(outer), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
        kind, base = outer.text_config.model_type, self.model.base_model
        parts = ((path, part) for path, part in base.named_modules() if isinstance(part, PreTrainedModel))
        self.inner = next(path for path, part in parts if part.config.model_type == kind)
        """Where the language model is, from the base model."""
        self.prefix = f"{self.model.base_model_prefix}.{self.inner}."
        names = [name for name in required_tensors(self.model) if not name.startswith((self.prefix, "lm_head."))]
        unlike = {each[0] for each in found["mismatched_keys"]} | set(found["missing_keys"])
        if broken := sorted(unlike.intersection(names)):
            raise InputError(f"the files of model '{whole}' lack '{broken[0]}', or hold it in another shape")
        tensors = self.model.state_dict()
        self.state = {name: tensors[name] for name in names}

    def renamed(self, name: str) -> str:
        """Return what a tensor of the language model is called in the multimodal one."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def check_embedding(self, tensors: dict[str, Entry], name: str) -> None:
        """Raise `InputError` unless the embeddings of a language model, which nothing changes, are those in here."""
        own = self.model.get_input_embeddings().weight
        place = next((each for each in tensors if self.renamed(each) == f"{self.prefix}embed_tokens.weight"), None)
        if place is None or not torch.equal(_read({place: tensors[place]})[place].to(own), own):
            raise InputError(
                f"the embeddings of model '{name}' are not those of the language model in '{self.name}': give the "
                "multimodal model that it was compressed from"
            )


def _shallow(outer: PreTrainedConfig) -> PreTrainedConfig:
    """Return a multimodal config whose language model has one block."""
    shallow: Any = copy.deepcopy(outer)
    fields = shallow.text_config.to_dict()
    count = fields.pop("num_hidden_layers")
    fields = {
        name: each[:1] if isinstance(each, list) and len(each) == count else each for name, each in fields.items()
    }
    # Of Gemma 4: which layers differ, and how many of them read keys of others.
    fields |= {
        name: value for name, value in {"per_layer_config": {}, "num_kv_shared_layers": 0}.items() if name in fields
    }
    shallow.text_config = type(shallow.text_config).from_dict({**fields, "num_hidden_layers": 1})
    return shallow


def _joined_config(outer: PreTrainedConfig, config: PreTrainedConfig, towers: _Towers, dtype: torch.dtype) -> Any:
    """Return the config of the result."""
    stock, generates = type(outer), type(towers.model).__name__
    fields = {name: value for name, value in outer.to_dict().items() if name not in OWN}
    compressed = getattr(config, "modegpt", None)
    kind: Any = compressed_class(stock.__name__) if compressed else stock
    text = copy.deepcopy(outer.text_config)
    if not compressed:
        architecture = architecture_of(config)
        architecture.set_mlp_width(text, architecture.mlp_width(config))
    joined = kind.from_dict({**fields, "text_config": text.to_dict()})
    joined.tie_word_embeddings = config.tie_word_embeddings
    joined.dtype = joined.text_config.dtype = dtype
    joined.architectures = [generates]
    if compressed:
        name = stock.__name__.removesuffix("Config")
        joined.modegpt = {
            **compressed,
            "multimodal": {"name": name, "generates": generates, "language_model": towers.inner},
        }
        joined.architectures, joined.auto_map = [PREFIX + generates], auto_map(joined)
    return joined


def _read(tensors: dict[str, Entry]) -> dict[str, Tensor]:
    """Return tensors by the names that they have in their files."""
    found = {}
    for name, entry in tensors.items():
        with safe_open(entry.path, framework="pt") as file:
            found[name] = file.get_tensor(name)
    return found


def _write(target: Path, towers: dict[str, Tensor], language_model: dict[str, Entry]) -> None:
    """Write the weights: to one file, or, where that would be too large, to one for each that they are read from."""
    apart = target / "towers.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in towers.items()}, apart)
    entries = read_header(apart)[0] | language_model
    total = sum(entry.size for entry in entries.values())
    sources = sorted({entry.path for entry in entries.values()})
    if total <= MAX_FILE_BYTES:
        merge(entries, target / SINGLE)
    else:
        names = {path: f"model-{i + 1:05d}-of-{len(sources):05d}.safetensors" for i, path in enumerate(sources)}
        for path, file in names.items():
            merge({name: entry for name, entry in entries.items() if entry.path == path}, target / file)
        weight_map = {name: names[entry.path] for name, entry in sorted(entries.items())}
        write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, target / INDEX)
    apart.unlink()
