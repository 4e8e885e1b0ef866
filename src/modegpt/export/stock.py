"""A compressed model as one of its dense family's stock classes, for whatever knows these alone.

Serving engines, converters and quantizers know `LlamaForCausalLM` and its `config.json`. Such a config has room for one
MLP width and one head dim. So MLPs stay as narrow as the widest of them, and everything else that was cut is filled up
with zeros. A model whose MLPs alone were cut, all to one width, loses nothing by that.
"""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..architectures import Architecture, Dimensions, architecture_of
from ..blocks import layers_prefix
from ..checkpoint import assemble, check_output
from ..errors import InputError, WriteError
from ..modeling_modegpt import decoder_layers
from ..models import has_tokenizer, open_config, open_model, open_tokenizer
from ..shards import skeleton
from .widen import rest, widen_block

OTHERWISE = ("modegpt", "model_type", "architectures", "auto_map", "_name_or_path")
"""Of a compressed config: what the stock one has otherwise, or not at all."""


def stock_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the dense family's stock class that computes what a compressed one does.

    Its MLPs are as wide as the widest compressed one; queries, keys and values have the dense sizes again, with zeros
    where they were cut, and so has the key-value cache. Logits are those of `model` but for the order in which a kernel
    sums. It is on the CPU; there, weights outside the blocks are shared with `model`. Cost: a copy of the blocks.

    Args:
        model: a compressed model, on one device; it stays as it is.

    Raises:
        InputError: it is not compressed, or the stock class has no MLPs of that width.
    """
    return _stock(model, consume=False)


def export_stock(name: str, out: str | Path, *, dtype: str = "auto", overwrite: bool = False) -> dict[str, Any]:
    """Write a compressed checkpoint as a stock one (`stock_model`), with its tokenizer.

    Memory: the model and one block. The folder appears when it is whole; one that is replaced stays until then.

    Args:
        name: a compressed checkpoint, folder or hub name.
        out: folder to write to.
        dtype: of the written weights; `auto` keeps that of the checkpoint.
        overwrite: whether an existing `out` is replaced.

    Returns:
        What was written; its keys are documented in docs/json-output.md.

    Raises:
        InputError: `out` may not be written, or `stock_model` refuses the model.
        WriteError: the disk refused a file; nothing is left of it.
    """
    check_output(out, overwrite, name)
    config = open_config(name)
    if not getattr(config, "modegpt", None):
        raise InputError(f"model '{name}' is not compressed: it is a stock one already")
    # Nothing is computed: a processor that is slow in half precision does no harm.
    stored = getattr(config, "dtype", None) or torch.float32
    model = open_model(name, stored if dtype == "auto" else getattr(torch, dtype))
    before, layers = model.num_parameters(), model.config.modegpt["layers"]
    stock = _stock(model, consume=True)
    with _appearing(Path(out).resolve()) as folder:
        stock.save_pretrained(folder)
        if has_tokenizer(name):
            open_tokenizer(name).save_pretrained(folder)
    attention = padded_attention(stock, layers)
    return {
        "model": name,
        "out": str(out),
        "class": type(stock).__name__,
        "dtype": str(stock.dtype).removeprefix("torch."),
        "mlp_width": architecture_of(stock.config).mlp_width(stock.config),
        "parameters": {"compressed": before, "exported": stock.num_parameters()},
        "zeros": {"mlp": stock.num_parameters() - before - attention, "attention": attention},
    }


def padded_attention(stock: PreTrainedModel, layers: list[dict[str, int]]) -> int:
    """Return how many parameters the attention of a stock model has more than that of the compressed one.

    Args:
        stock: the stock model.
        layers: `config.modegpt["layers"]` of the compressed one.
    """
    architecture = architecture_of(stock.config)
    dims, padded = Dimensions.of(architecture, stock.config), 0
    for block, layer in zip(decoder_layers(stock, architecture.describe()), layers, strict=True):
        cost = architecture.rank_costs(dims, lambda path, block=block: block.get_submodule(path).bias is not None)
        padded += cost["qk"] * (dims.d_head - 2 * layer["rope_pairs"] - layer["qk_plain"])
        padded += cost["vo"] * (dims.d_head - layer["value_dim"])
    return padded


def _stock(model: PreTrainedModel, consume: bool) -> PreTrainedModel:
    """See `stock_model`; with `consume` each block of the compressed model is let go of when it has been read."""
    # Not by its class: that of a model whose code came with the checkpoint is another one.
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "_stock"):
        raise InputError(f"a {type(model).__name__} is not a compressed model: give one that modegpt made")
    stock_class: Any = model._stock
    description = model.config.modegpt
    blocks = decoder_layers(model, description["architecture"])
    config = _stock_config(model.config, stock_class, blocks)
    architecture = architecture_of(config)
    dims, empty = Dimensions.of(architecture, config), skeleton(config)
    targets = decoder_layers(empty, architecture.describe())
    _check_shapes(architecture, empty, blocks)
    prefix = layers_prefix(model, blocks)
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
    result.generation_config = copy.deepcopy(model.generation_config)
    # So that it is saved under the names of the family's files (experts apart), not under those it was put together by.
    result._weight_conversions = None  # pyright: ignore[reportArgumentType]
    return result


def _stock_config(compressed: PreTrainedConfig, stock_class: Any, blocks: nn.ModuleList) -> PreTrainedConfig:
    """Return the dense config, with the width of the widest MLP of the compressed `blocks`."""
    fields = {name: value for name, value in compressed.to_dict().items() if name not in OTHERWISE}
    config = stock_class.config_class.from_dict(fields)
    config.architectures = [stock_class.__name__]
    architecture = architecture_of(config)
    widths = [
        layer["mlp_width"]
        for block, layer in zip(blocks, compressed.modegpt["layers"], strict=True)
        if not architecture.experts or architecture.mixture(block) is not None
    ]
    if widths:
        architecture.set_mlp_width(config, max(widths))
    return config


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


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Give a folder to fill, which takes the name `out` at the end, or is removed if something goes wrong."""
    new, old = (out.with_name(f"{out.name}.{end}") for end in ("exporting", "replaced"))
    for folder in (new, old):
        if folder.exists():
            raise InputError(f"'{folder}' exists, perhaps of an export that was killed: move it away or remove it")
    try:
        new.mkdir(parents=True)
        yield new
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as problem:
        raise WriteError(f"the export could not be written to '{out}': {problem}") from problem
    finally:
        shutil.rmtree(new, ignore_errors=True)
