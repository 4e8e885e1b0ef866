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
from modegpt.checks.densify import densify as densified
from modegpt.checks.densify import in_float64
from modegpt.config import CompressionConfig
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import record_moments
from modegpt.observing.in_turn import in_turn
from modegpt.running.surgery import blank_moments, compress_block, cut_modules

from .families import Family, tokens

__all__ = ["compressed_from", "densify", "errors", "greedy", "in_float64", "run_python"]


def compressed_from(family: Family, dense: Any, ranks: list[dict[str, int]], solver: str = "best") -> Any:
    """Compress a copy of `dense` to `ranks`, with the moments of the dense model on random tokens."""
    model, architecture, dims = copy.deepcopy(dense), family.architecture, family.dims
    blocks = decoder_layers(model, architecture.describe())
    config = CompressionConfig(solver=solver)
    cut = [cut_modules(own, architecture.block_dims(block, dims)) for own, block in zip(ranks, blocks, strict=True)]
    device = torch.device("cpu")
    moments = [
        blank_moments(modules, block, architecture, dims, config, device)
        for modules, block in zip(cut, blocks, strict=True)
    ]
    with torch.no_grad(), in_turn(model), contextlib.ExitStack() as stack:
        for block, of_block in zip(blocks, moments, strict=True):
            stack.enter_context(record_moments(block, architecture, dims, of_block))
        model(tokens(rows=8, length=32, seed=2))
    layers = []
    for index, (block, of_block) in enumerate(zip(blocks, moments, strict=True)):
        outcome = compress_block(block, architecture, dims, of_block, ranks[index], config, model.config, index)
        layers.append(outcome.layer)
    return build(compressed_config(dense.config, architecture, layers), model.state_dict())


def densify(family: Family, compressed: Any, dense: Any) -> Any:
    """Return a stock dense model that computes what `compressed` should."""
    return densified(family.architecture, family.dims, compressed, dense)


def errors(compressed: Any) -> Tensor:
    """Return the errors that the report gives, `(layers, modules)`."""
    return torch.tensor([list(layer["error"].values()) for layer in compressed.modegpt_report["layers"]])


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
