"""A compressed model in well under a second, and the dense model that it must equal."""

import contextlib
import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modegpt.checkpoint import build, compressed_config
from modegpt.config import CompressionConfig
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import BlockMoments, record_moments
from modegpt.surgery import compress_block

from .families import Family, tokens


def compressed_from(family: Family, dense: Any, ranks: list[dict[str, int]]) -> Any:
    """Compress a copy of `dense` to `ranks`, with the moments of the dense model on random tokens."""
    model, architecture, dims = copy.deepcopy(dense), family.architecture, family.dims
    blocks = decoder_layers(model, architecture.describe())
    moments = [BlockMoments.zeros(dims) for _ in blocks]
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for block, of_block in zip(blocks, moments, strict=True):
            stack.enter_context(record_moments(block, architecture, of_block))
        model(tokens(rows=8, length=32, seed=2))
    layers = []
    for index, (block, of_block) in enumerate(zip(blocks, moments, strict=True)):
        outcome = compress_block(
            block, architecture, dims, of_block, ranks[index], CompressionConfig(), model.config, index
        )
        layers.append(outcome.layer)
    return build(compressed_config(dense.config, architecture, layers), model.state_dict())


def densify(family: Family, compressed: Any, dense: Any) -> Any:
    """Return a stock dense model that computes what `compressed` should: its weights, and zeros where they end.

    MLP neurons and value coordinates may stand anywhere, so they come first; a query or key coordinate stands where
    its rotary pair stands in the dense head, which decides its frequency.
    """
    architecture, dims = family.architecture, family.dims
    model = copy.deepcopy(dense).to(compressed.dtype)
    own_blocks = decoder_layers(compressed, architecture.describe())
    prefix = next(name for name, module in compressed.named_modules() if module is own_blocks)
    outside = {name: tensor for name, tensor in compressed.state_dict().items() if not name.startswith(prefix)}
    assert set(model.load_state_dict(outside, strict=False).missing_keys) <= {
        name for name in model.state_dict() if name.startswith(prefix) or name == "lm_head.weight"
    }
    for target, source in zip(decoder_layers(model, architecture.describe()), own_blocks, strict=True):
        attention = source.get_submodule(architecture.attention)
        index = getattr(attention, "rope_index", None)
        for role, n_heads in (("query", dims.n_heads), ("key", dims.n_kv_heads)):
            rows = _head_rows(index, attention._qk_dim, n_heads, dims)
            _embed(architecture.projection(target, role), architecture.projection(source, role), rows, None)
        for role in ("value", "output"):
            n_heads = dims.n_kv_heads if role == "value" else dims.n_heads
            narrow = architecture.projection(source, "value").out_features // dims.n_kv_heads
            places = (torch.arange(n_heads)[:, None] * dims.d_head + torch.arange(narrow)).flatten()
            rows, columns = (places, None) if role == "value" else (None, places)
            _embed(architecture.projection(target, role), architecture.projection(source, role), rows, columns)
        for wide, narrow in zip(architecture.up_projections(target), architecture.up_projections(source), strict=True):
            _embed(wide, narrow, torch.arange(narrow.out_features), None)
        down = architecture.projection(source, "down")
        _embed(architecture.projection(target, "down"), down, None, torch.arange(down.in_features))
        _copy_the_rest(target, source)
    return model


def _head_rows(index: Tensor | None, qk_dim: int, n_heads: int, dims: Any) -> Tensor:
    """Return the row in the dense projection of each row of the compressed one."""
    if index is None:
        by_head = torch.arange(qk_dim).repeat(n_heads, 1)
    else:
        by_key_head = torch.cat((index, index + dims.rotary_dim // 2), dim=1)
        by_head = by_key_head.repeat_interleave(n_heads // dims.n_kv_heads, dim=0)
    return (by_head + dims.d_head * torch.arange(n_heads)[:, None]).flatten()


@torch.no_grad()
def _embed(wide: Any, narrow: Any, rows: Tensor | None, columns: Tensor | None) -> None:
    weight = torch.zeros_like(wide.weight)
    every_row, every_column = torch.arange(weight.shape[0]), torch.arange(weight.shape[1])
    rows = every_row if rows is None else rows
    weight[rows[:, None], every_column if columns is None else columns] = narrow.weight
    wide.weight.copy_(weight)
    if wide.bias is not None:
        wide.bias.zero_()
        wide.bias[rows] = narrow.bias


@torch.no_grad()
def _copy_the_rest(target: Any, source: Any) -> None:
    """Copy what has the same shape and is no projection: the norms."""
    for name, parameter in target.named_parameters():
        if "norm" in name:
            parameter.copy_(source.get_parameter(name))


@torch.no_grad()
def greedy(model: Any, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Tensor:
    """Decode greedily by full forward passes without a cache: what every way of generating must give."""
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(new_tokens):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        extra = {} if model.config.model_type.endswith("opt") else {"position_ids": positions}
        logits = model(ids, attention_mask=mask, use_cache=False, **extra).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return ids


def run_python(*arguments: str | Path, cache: Path) -> str:
    """Run a fresh Python, offline, with its copy of shipped code under `cache`; return all that it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache / "modules"), "TQDM_DISABLE": "1"}
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr
