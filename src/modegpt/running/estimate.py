"""About what a run would cost, from the sizes of the model and of the text."""

import time
from dataclasses import replace
from typing import Any

import torch

from ..config import CompressionConfig
from ..loading.models import compute_dtype
from ..ranks.whole import LayerSizes
from .dense_pass import held_bytes, room_ahead
from .fisher import DEPTH
from .fisher import EVERY as PROBED_EVERY
from .own_text import LENGTHS, block_room, cache_bytes
from .source import Source
from .surgery import solver_of


def estimate(
    source: Source, sizes: list[LayerSizes], config: CompressionConfig, text: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """Estimate memory and time of the run from the model's sizes and this machine's measured matrix products.

    `text` is the shape of the calibration windows.

    Memory: one block, the moment of its MLP, or of each of its experts, in float64 and two working copies of one, that
    of the gates in float32, and what is held of the last blocks if they are measured together (`room_ahead` in
    `running.dense_pass`); or, if that is more, the embeddings, and the cache and blocks that are kept while the model
    writes. On the host, the hidden states. Time: two passes over the blocks, through the experts that a token is sent
    to (one more for a `late` solver where a block puts out no sum; elsewhere its stages are halves of a pass), one of
    the coverage windows that the model writes, and the moments at the float32 (on a GPU: stored) rate, `3·d_int³` a
    layer or expert at the float64 rate, or the float32 one where an MLP's solver works in it, as do its copies.
    Attention scores, disk and the blocks that a GPU with room for them keeps while the model writes are left out, so
    read it as the right order, not as a promise.
    """
    dims = replace(source.dims, d_int=max(size.full["mlp"] for size in sizes))
    n_windows, seq_len = text
    n_tokens = round(n_windows * (1 + config.coverage_share)) * seq_len
    n_written = n_tokens - n_windows * seq_len
    architecture = source.architecture
    twice = solver_of("mlp", config).late and not (architecture.adds_mlp or architecture.whole_attention)
    n_passes = 2 + twice
    dtype = compute_dtype(device, source.dtype)
    block, blocks = max(size.total for size in sizes), sum(size.total for size in sizes)
    outside = sum(parameter.numel() for parameter in source.blocks.model.parameters()) - blocks
    states = round(source.states_held(source.n_streams(config)) * n_tokens * dims.d_model * dtype.itemsize)
    n_mlps = max(1, dims.n_experts)
    active = getattr(source.config, architecture.experts_per_token) if dims.n_experts else 1
    solved_in = torch.float32 if source.runs_beside(config) and not dims.n_experts else torch.float64
    memory = block * dtype.itemsize + (n_mlps * 8 + 2 * solved_in.itemsize + 4) * dims.d_int**2
    spare = config.host_to_spare
    around = outside * dtype.itemsize
    if n_written:
        written = [-(-n_written // len(LENGTHS))] * len(LENGTHS)
        room = block_room(device, spare) if source.blocks.copies else 0
        around += min(blocks * dtype.itemsize, block * dtype.itemsize + room)
        around += sum(cache_bytes(source, written, device, spare))
    if source.runs_beside(config) and not dims.n_experts and spare:
        moments = 12 * dims.d_int**2 + 8 * (dims.n_heads * dims.d_head) ** 2
        n_blocks = min(DEPTH, dims.n_layers)
        held = n_blocks * held_bytes(source, moments, n_tokens, PROBED_EVERY, dtype.itemsize)
        memory += held if held <= room_ahead(device) else 0
    # Of a block's parameters, those that a token does not pass are in the experts that it is not sent to.
    experts = sum(size.weight("mlp") for size in sizes if "mlp" not in size.whole)
    passed = blocks - experts * (n_mlps - active) // n_mlps
    n_cut = sum("mlp" not in size.whole for size in sizes)
    passes = n_passes * 2 * passed + n_cut * active * dims.d_int**2
    rates = {each: _rate(each, device) for each in dict.fromkeys((dtype, solved_in))}
    seconds = (n_tokens * passes + 2 * n_written * passed) / rates[dtype]
    seconds += n_cut * n_mlps * 3 * dims.d_int**3 / rates[solved_in]
    return {
        "device_bytes": max(memory, around),
        "host_bytes": states,
        "seconds": seconds,
        "basis": f"measured: {_told(rates)}",
    }


def _told(rates: dict[torch.dtype, float]) -> str:
    return ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {str(dtype).removeprefix('torch.')}" for dtype, rate in rates.items()
    )


def _rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a square matrix product on this machine."""
    size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator(device).manual_seed(0)  # its own: the global random state is left alone
    matrix = torch.randn(size, size, device=device, generator=generator).to(dtype)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
