"""A compressed model as one of its dense family's stock classes, for whatever knows these alone.

Serving engines, converters and quantizers know `LlamaForCausalLM` and its `config.json`. Such a config has room for one
MLP width and one head dim. So MLPs stay as narrow as the widest of them, and everything else that was cut is filled up
with zeros. A model whose MLPs alone were cut, all to one width, loses nothing by that.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..architectures import Architecture, architecture_of
from ..blocks import layers_prefix
from ..checkpoint import assemble, check_description, check_output
from ..decompose.psd import all_finite
from ..default_device import on_the_cpu
from ..disk import DISK
from ..errors import InputError, NumericalError, refused
from ..formats.packed import quantization
from ..loading.models import open_config, open_model, own_dtype
from ..loading.tokenizers import has_tokenizer, open_tokenizer, save_tokenizer
from ..modeling_modegpt import auto_map, decoder_layers
from .appearing import appearing, writing
from .widen import rest, widen_block

OTHERWISE = ("modegpt", "model_type", "architectures", "auto_map", "_name_or_path")
"""Of a compressed config: what the stock one has otherwise, or not at all."""


@on_the_cpu()
def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the dense family's stock class that computes what a compressed one does.

    Its MLPs are as wide as the widest compressed one; queries, keys and values have the dense sizes again, with zeros
    where they were cut, and so has the key-value cache. Logits are those of `model` but for the order in which a kernel
    sums. It is on the CPU; there, weights outside the blocks are shared with `model`. Cost: a copy of the blocks.

    Args:
        model: a compressed model, with any head; it stays as it is.

    Raises:
        InputError: it is not compressed, quantized, not in memory as a whole, holds weights that the stock class does
            not (adapters that are not merged), or the stock class has no MLPs of that width.
    """
    return _stock(model, consume=False)


def export_stock(name: str, out: str | Path, *, dtype: str = "auto", overwrite: bool = False) -> dict[str, Any]:
    """Write a compressed checkpoint as a stock one (`stock_model`), with its tokenizer.

    Memory: the model and one block; of a mixture also what transformers copies as it writes its experts apart. The
    folder appears when it is whole; one that is replaced stays until then.

    Args:
        name: a compressed checkpoint, folder or hub name.
        out: folder to write to.
        dtype: of the written weights; `auto` keeps that of the checkpoint.
        overwrite: whether an existing `out` is replaced.

    Returns:
        What was written; its keys are documented in docs/json-output.md.

    Raises:
        InputError: `out` may not be written, `stock_model` refuses the model, or it has another head.
        NumericalError: a weight is too large for `dtype`.
        WriteError: the disk refused a file; nothing is left of it.
    """
    check_output(out, overwrite, name)
    config = open_config(name)
    if not getattr(config, "modegpt", None):
        raise InputError(f"model '{name}' is not compressed: it is a stock one already")
    check_description(config.modegpt, config.num_hidden_layers, name)
    saved, causal = (config.architectures or [None])[0], auto_map(config)["AutoModelForCausalLM"].rpartition(".")[2]
    if saved != causal:
        raise InputError(f"model '{name}' was saved as a {saved}, and export reads a {causal}: use modegpt.stock_model")
    tokenizer = open_tokenizer(name) if has_tokenizer(name) else None
    with appearing(Path(out).resolve(), overwrite) as folder:
        # Nothing is computed: a processor that is slow in half precision does no harm.
        stored = own_dtype(config)
        model = open_model(name, stored if dtype == "auto" else getattr(torch, dtype))
        before, layers = model.num_parameters(), model.config.modegpt["layers"]
        stock = _stock(model, consume=True)
        for weight, tensor in stock.state_dict().items():
            if not all_finite(tensor):
                raise NumericalError(f"'{weight}' holds NaN or infinity in {str(tensor.dtype).removeprefix('torch.')}")
        with writing(out):
            # Of errors that are not the disk's, the settings of a config or of generation are the cause.
            with refused(f"transformers does not save '{name}' as a {type(stock).__name__}", but=DISK):
                stock.save_pretrained(folder)
            if tokenizer is not None:
                save_tokenizer(tokenizer, folder, name)
    mlp, attention = zeros(stock, layers)
    return {
        "model": name,
        "out": str(out),
        "class": type(stock).__name__,
        "dtype": str(stock.dtype).removeprefix("torch."),
        "mlp_width": architecture_of(stock.config).mlp_width(stock.config),
        "narrows": _narrows(stock.config),
        "parameters": {"compressed": before, "exported": stock.num_parameters()},
        "zeros": {
            "mlp": mlp,
            "attention": attention,
            "shared_experts": stock.num_parameters() - before - mlp - attention,
        },
    }


def zeros(stock: PreTrainedModel, layers: list[dict[str, int]]) -> tuple[int, int]:
    """Return how many parameters MLPs and attention of a stock model have more than those of the compressed one.

    Args:
        stock: the stock model.
        layers: `config.modegpt["layers"]` of the compressed one.
    """
    architecture = architecture_of(stock.config)
    dims, mlp, attention = architecture.dimensions(stock.config), 0, 0
    for block, layer in zip(decoder_layers(stock, architecture.describe()), layers, strict=True):
        cost = architecture.rank_costs(dims, architecture.biases_of(block))
        if architecture.cuts_mlp(block):
            mlp += cost["mlp"] * (architecture.block_dims(block, dims).d_int - layer["mlp_width"])
        attention += cost["qk"] * (dims.d_head - 2 * layer["rope_pairs"] - layer["qk_plain"])
        attention += cost["vo"] * (dims.d_head - layer["value_dim"])
    return mlp, attention


def _narrows(config: PreTrainedConfig) -> bool:
    """Whether a family's config can say that its MLPs, or experts, are narrower: not BLOOM's, MPT's and Llama 4's."""
    architecture, narrow = architecture_of(config), copy.deepcopy(config)
    width = architecture.mlp_width(config)
    architecture.set_mlp_width(narrow, width // 2)
    return architecture.mlp_width(narrow) != width


def _stock(model: PreTrainedModel, consume: bool) -> PreTrainedModel:
    """See `stock_model`; with `consume` each block of the compressed model is let go of when it has been read."""
    # Not by its class: that of a model whose code came with the checkpoint is another one.
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "_stock"):
        raise InputError(f"a {type(model).__name__} is not a compressed model: give one that modegpt made")
    if about := quantization(model.config):
        raise InputError(
            f"the model is quantized ({about.get('quant_method')}): export it before, and quantize the export"
        )
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise InputError("a part of the model is not in memory: open it without device_map, and export that")
    stock_class: Any = model._stock
    description = model.config.modegpt
    if "multimodal" in description:
        raise InputError(
            f"a {type(model).__name__} is multimodal: export the language model, and rejoin what is written"
        )
    blocks = decoder_layers(model, description["architecture"])
    config = _stock_config(model, stock_class, blocks)
    architecture = architecture_of(config)
    with torch.device("meta"):
        empty = stock_class._from_config(config)
    targets, dims = decoder_layers(empty, architecture.describe()), architecture.dimensions(config)
    prefix = layers_prefix(model, blocks)
    _check_names(empty, model)
    _check_shapes(architecture, empty, blocks)
    own, device = model.state_dict().items(), model.device
    state = {name: tensor.cpu() for name, tensor in own if not name.startswith(f"{prefix}.")}
    for index, (source, layer) in enumerate(zip(blocks, description["layers"], strict=True)):
        target = copy.deepcopy(targets[index]).to_empty(device=device)
        for name, tensor in target.named_parameters():
            tensor.data = tensor.data.to(source.get_parameter(name).dtype)
        widen_block(architecture, dims, target, source, layer)
        state |= {f"{prefix}.{index}.{name}": tensor.cpu() for name, tensor in target.state_dict().items()}
        if consume:
            source.to("meta")
    result = assemble(stock_class, config, state)
    if result.can_generate():
        result.generation_config = copy.deepcopy(model.generation_config)
    # So that it is saved under the names of the family's files (experts apart), not under those it was put together by.
    result._weight_conversions = None  # pyright: ignore[reportArgumentType]
    return result


def _stock_config(model: PreTrainedModel, stock_class: Any, blocks: nn.ModuleList) -> PreTrainedConfig:
    """Return the dense config, with the width of the widest MLP of the compressed `blocks`."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in OTHERWISE}
    config = stock_class.config_class.from_dict(fields)
    config.architectures, config.dtype = [stock_class.__name__], model.dtype
    architecture = architecture_of(config)
    widest, widths = architecture.mlp_width(config), list[int]()
    for index, (block, layer) in enumerate(zip(blocks, model.config.modegpt["layers"], strict=True)):
        if architecture.cuts_mlp(block):  # where it is some times as wide as the config says, it stays so
            widths.append(-(-layer["mlp_width"] * widest // architecture.layer_width(config, index)))
    if widths:
        architecture.set_mlp_width(config, max(widths))
    return config


def _check_names(empty: PreTrainedModel, model: PreTrainedModel) -> None:
    """Raise `InputError` if the compressed model holds other tensors than its stock class (`empty`)."""
    own = {name for name in model.state_dict() if not name.endswith(".rope_index")}
    if unlike := sorted(own ^ set(empty.state_dict())):
        raise InputError(
            f"a {type(empty).__name__} and the compressed model do not hold the same weights: '{unlike[0]}' is in one "
            "of them alone; merge adapters before"
        )


def _check_shapes(architecture: Architecture, empty: PreTrainedModel, blocks: nn.ModuleList) -> None:
    """Raise `InputError` if a stock model (`empty`) has other sizes than its config was given for these blocks."""
    width, beside = architecture.mlp_width(empty.config), architecture.shared_down.rpartition(".")[0] + "."
    for index, (target, source) in enumerate(zip(decoder_layers(empty, architecture.describe()), blocks, strict=True)):
        own = source.state_dict()
        for name, tensor in rest(architecture, target).items():
            if tensor.shape != own[name].shape and not (architecture.shared_experts and name.startswith(beside)):
                raise InputError(
                    f"{type(empty).__name__} cannot have {architecture.width} {width}, which the compressed model has: "
                    f"'{name}' of layer {index}, which is not compressed, would get another size with it"
                )
