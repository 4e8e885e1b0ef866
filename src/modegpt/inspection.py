"""Reads what a compressed checkpoint holds, from its config and the safetensors headers alone: no weight is loaded."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from .architectures import ARCHITECTURES, Architecture
from .blocks import required_tensors
from .checkpoint import REPORT_NAME, check_description, read_json
from .errors import InputError, refused
from .formats.checkpoint_files import find_tensors
from .formats.safetensors_merge import Entry, main_dtype
from .formats.text_part import MULTIMODAL, text_part
from .modeling_modegpt import MODEL_TYPE_PREFIX, PREFIX, compressed_class
from .ranks.whole import told

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of one element by safetensors' name of the dtype; what is not listed (an index, say) is no parameter."""


def calibrated_on(model: str) -> str | None:
    """Return the text that a compressed checkpoint says it was calibrated on, a file by its whole path; else None."""
    try:
        text = read_json(Path(model) / REPORT_NAME)["calibration"]
        data = text.get("file") or text["data"]
        return data if isinstance(data, str) else None
    except (OSError, InputError, KeyError, TypeError, AttributeError):
        return None


def describe(folder: str | Path) -> dict[str, Any]:
    """Return ranks, parameters, key-value cache and sparsity of a compressed checkpoint, by layer and in all.

    Args:
        folder: what `modegpt compress` or `save_pretrained` of a compressed model wrote.

    Raises:
        InputError: the folder is missing, unreadable or not a compressed checkpoint, or lacks a weight.
    """
    path = Path(folder)
    config = _read_config(path)
    whole, text, architecture = _open_config(path, config)
    dims = architecture.dimensions(text)
    check_description(config["modegpt"], dims.n_layers, path)
    tensors = find_tensors(path)
    if not tensors:
        raise InputError(f"folder '{path}' has no .safetensors file of a model; the checkpoint is incomplete")
    _check_whole(path, whole, architecture, tensors)
    shapes = {
        f".{name}": entry.shape
        for name, entry in tensors.items()
        if entry.dtype in BYTES and not name.endswith(architecture.buffers)
    }
    element = _element_bytes(tensors)
    # In a multimodal model other parts have layers, too.
    inner = config["modegpt"].get("multimodal", {}).get("language_model", "")
    blocks = f"{inner}.{config['modegpt']['architecture']['layers']}".removeprefix(".")
    layers, dense_cache = [], 0
    # A model of which someone dropped the last layers still describes them.
    for index, entry in enumerate(config["modegpt"]["layers"][: dims.n_layers]):
        inside = f".{blocks}.{index}."
        own = {name.split(inside, 1)[1]: shape for name, shape in shapes.items() if inside in name}
        full = {**dims.full_ranks, "mlp": architecture.layer_width(text, index)}
        ranks = {
            "mlp": entry["mlp_width"],
            "qk": 2 * entry["rope_pairs"] + entry["qk_plain"],
            "vo": entry["value_dim"],
        }
        cut = tuple(f"{path}." for path in (architecture.down, architecture.experts) if path)
        unranked = architecture.unranked(any(name.startswith(cut) for name in own))
        outputs = {name.removesuffix(".weight"): shape[0] for name, shape in own.items() if name.endswith(".weight")}
        cost = architecture.rank_costs(dims, lambda path, own=own: f"{path}.bias" in own)
        kept = sum(map(prod, own.values()))
        dense = kept + sum(cost[module] * (full[module] - ranks[module]) for module in full)
        dense_cache += architecture.dense_cached(dims, outputs) * element
        layers.append(
            {
                "ranks": told(ranks, unranked),
                "dense_ranks": told(full, unranked),
                "parameters": kept,
                "sparsity": 1 - kept / dense,
                "kv_bytes_per_token": architecture.cached(dims, ranks, outputs) * element,
                "dense_parameters": dense,
            }
        )
    kept, dense = (sum(layer[key] for layer in layers) for key in ("parameters", "dense_parameters"))
    total = sum(map(prod, shapes.values()))
    return {
        "folder": str(folder),
        "model_type": config["model_type"],
        "format_version": config["modegpt"]["version"],
        "dtype": str(config.get("dtype") or config.get("torch_dtype")),
        "dense": dims.full_ranks,
        "parameters": {"dense": total + dense - kept, "compressed": total},
        "sparsity": {"blocks": 1 - kept / dense, "total": (dense - kept) / (total + dense - kept)},
        "kv_bytes_per_token": {
            "dense": dense_cache,
            "compressed": sum(layer["kv_bytes_per_token"] for layer in layers),
        },
        "file_bytes": sum(file.stat().st_size for file in {entry.path for entry in tensors.values()}),
        "layers": layers,
    }


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"folder '{path}' has no config.json; give a folder that modegpt compress wrote")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise InputError(f"'{file}' is no valid JSON ({problem}): the checkpoint is broken") from problem
    try:
        compressed = isinstance(config["modegpt"]["layers"], list)
    except (KeyError, TypeError):
        compressed = False
    if not compressed:
        raise InputError(f"folder '{path}' is not a compressed checkpoint; give a folder that modegpt compress wrote")
    return config


def _element_bytes(tensors: dict[str, Entry]) -> int:
    """Return the bytes of one weight, which are also those of one cached number: those that most weights have."""
    most = main_dtype(tensors.values(), BYTES)
    return BYTES[most] if most else 0


def _open_config(path: Path, config: dict[str, Any]) -> tuple[PreTrainedConfig, PreTrainedConfig, Architecture]:
    """Return a checkpoint's config as transformers reads it, that of its language model, and the dense one's family."""
    kind = str(config.get("model_type")).removeprefix(MODEL_TYPE_PREFIX)
    if kind not in ARCHITECTURES and kind not in MULTIMODAL:
        raise InputError(
            f"'{path}' is of model_type '{kind}', which this version does not know: install a newer modegpt"
        )
    stock = f"{ARCHITECTURES[kind].name}Config" if kind in ARCHITECTURES else CONFIG_MAPPING[kind].__name__
    opened: Any = compressed_class(stock)
    opened = opened.from_pretrained(path)  # which reads what JSON has no word for, such as infinity
    text = text_part(opened)
    return opened, text, ARCHITECTURES[text.model_type.removeprefix(MODEL_TYPE_PREFIX)].resolve(text)


def _check_whole(path: Path, config: PreTrainedConfig, architecture: Architecture, tensors: dict[str, Entry]) -> None:
    """Raise `InputError` unless a checkpoint holds each weight of its model, in its shape.

    One that was quantized since holds others, which transformers alone knows.
    """
    if getattr(config, "quantization_config", None) is not None:
        return
    named = config.architectures[0] if config.architectures else architecture.causal_class
    model_class: Any = compressed_class(named.removeprefix(PREFIX))
    with torch.device("meta"), refused(f"transformers makes no model of the config in '{path}'"):
        model = model_class(config)
    model.tie_weights()
    wanted = model.state_dict()
    # transformers takes a tied weight under either of its names.
    others = {first: other for other, first in model.all_tied_weights_keys.items()}
    for name in required_tensors(model):
        stored = tensors.get(name) or tensors.get(others.get(name, name))
        if stored is None:
            raise InputError(f"the files in '{path}' lack the weight '{name}': copy the checkpoint again")
        if stored.shape != list(wanted[name].shape):
            raise InputError(
                f"the files in '{path}' hold '{name}' in shape {tuple(stored.shape)}, and its config asks for "
                f"{tuple(wanted[name].shape)}: copy the checkpoint again"
            )
