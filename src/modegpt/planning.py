"""The dry run: what a compression would do to every layer, and about what it would cost."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .allocation import Allocation
from .compress import prepare
from .config import CompressionConfig
from .loading.models import compute_dtype
from .pages.plots import require_matplotlib
from .progress import Progress
from .ranks.units import score_parts
from .ranks.whole import LayerSizes
from .report import budget, protocol
from .running.dense_pass import held_bytes, room_ahead
from .running.fisher import DEPTH
from .running.fisher import EVERY as PROBED_EVERY
from .running.lending import lent
from .running.own_text import LENGTHS, cache_bytes
from .running.preparation import Source, cached_numbers, plain_text
from .running.surgery import solver_of

NEEDS_TEXT = ("influence", "influence-blocks", "owl", "error")
"""Allocation rules that score the blocks on calibration text."""


def make_plan(
    model: PreTrainedModel | str | Path,
    calibration: str | Path | torch.Tensor,
    config: CompressionConfig,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score and allocate as `compress` would, and compress nothing.

    Arguments and errors as for `compress`. Rules that need no scores read no calibration text; token ids have a shape,
    which is then that of the text.

    Returns:
        `layers` (score, sparsity, ranks, parameters of each), `parameters`, `sparsity`, `kv_bytes_per_token`,
        `estimate` (memory and time without scoring), `scoring_seconds`, `warnings`; `compress --plan` takes the same
        JSON back.
    """
    given = config.allocation in NEEDS_TEXT or isinstance(calibration, torch.Tensor)
    run = prepare(model, calibration if given else plain_text(config), config, tokenizer, progress)
    run.check()
    start = time.perf_counter()
    with lent(model):
        scores = run.scores()
    scoring = None if scores is None else round(time.perf_counter() - start, 3)
    allocation = run.allocate(scores)
    source, sizes = run.source, run.sizes
    dense = sum(parameter.numel() for parameter in source.blocks.model.parameters())
    removed = [size.removed(ranks) for size, ranks in zip(sizes, allocation.ranks, strict=True)]
    layers = []
    for index, (size, ranks) in enumerate(zip(sizes, allocation.ranks, strict=True)):
        score = None if scores is None else scores[index].tolist()
        parameters = {"dense": size.total, "compressed": size.total - removed[index]}
        layers.append(
            {"score": score, "sparsity": removed[index] / size.total, "ranks": ranks, "parameters": parameters}
        )
    return {
        "model": source.name,
        "config": config.as_dict(),
        "temperature": allocation.temperature,
        "layers": layers,
        **budget(sizes, allocation.ranks, dense, config.asked),
        "kv_bytes_per_token": _cache_bytes(source, allocation, run.out_dtype),
        "estimate": estimate(source, sizes, config, run.text.windows.shape, run.device),
        "scoring_seconds": scoring,
        "warnings": source.notes + allocation.warnings,
        **protocol(),
    }


def estimate(
    source: Source, sizes: list[LayerSizes], config: CompressionConfig, text: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """Estimate memory and time of the run from the model's sizes and this machine's measured matrix products.

    `text` is the shape of the calibration windows.

    Memory: one block, the moment of its MLP, or of each of its experts, in float64 and two working copies of one, that
    of the gates in float32, and what is held of the last blocks if they are measured together (`room_ahead` in
    `running.dense_pass`); or, if that is more, one block, the embeddings, and the cache while the model writes. On
    the host, the hidden states. Time: two passes over the blocks, through the experts that a token is sent to (one
    more for a `late` solver where a block puts out no sum; elsewhere its stages are halves of a pass), one of the
    coverage windows that the model writes, and the moments at the float32 (on a GPU: stored) rate, `3·d_int³` a layer
    or expert at the float64 rate, or the float32 one where an MLP's solver works in it, as do its copies. Attention
    scores, disk and the blocks that a GPU with room for them keeps while the model writes are left out, so read it as
    the right order, not as a promise.
    """
    dims = source.dims
    n_windows, seq_len = text
    n_tokens = round(n_windows * (1 + config.coverage_share)) * seq_len
    n_written = n_tokens - n_windows * seq_len
    architecture = source.architecture
    twice = solver_of("mlp", config).late and not (architecture.adds_mlp or architecture.whole_attention)
    n_passes = 2 + twice
    dtype = compute_dtype(device, source.dtype)
    block = max(size.total for size in sizes)
    outside = sum(parameter.numel() for parameter in source.blocks.model.parameters()) - sum(s.total for s in sizes)
    states = source.n_streams(config) * n_tokens * dims.d_model * dtype.itemsize
    n_mlps = max(1, dims.n_experts)
    active = getattr(source.config, architecture.experts_per_token) if dims.n_experts else 1
    solved_in = torch.float32 if source.runs_beside(config) and not dims.n_experts else torch.float64
    memory = block * dtype.itemsize + (n_mlps * 8 + 2 * solved_in.itemsize + 4) * dims.d_int**2
    spare = config.max_host_memory is None
    around = outside * dtype.itemsize
    if n_written:
        written = [-(-n_written // len(LENGTHS))] * len(LENGTHS)
        around += block * dtype.itemsize + sum(cache_bytes(source, written, device, spare))
    if source.runs_beside(config) and not dims.n_experts and spare:
        moments = 12 * dims.d_int**2 + 8 * (dims.n_heads * dims.d_head) ** 2
        n_blocks = min(DEPTH, dims.n_layers)
        held = n_blocks * held_bytes(source, moments, n_tokens, PROBED_EVERY, dtype.itemsize)
        memory += held if held <= room_ahead(device) else 0
    # Of a block's parameters, those that a token does not pass are in the experts that it is not sent to.
    experts = sum(size.weight("mlp") for size in sizes if "mlp" not in size.whole)
    passed = sum(size.total for size in sizes) - experts * (n_mlps - active) // n_mlps
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


def require_plotting() -> None:
    """Raise `MissingExtraError` unless a plan can be drawn."""
    require_matplotlib("a plot", "plot")


def plot_plan(plan: dict[str, Any], path: str | Path) -> None:
    """Draw scores and sparsity by layer as bars, readable in print and without colour vision.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_plotting()
    from matplotlib.figure import Figure

    layers = plan["layers"]
    rule = plan["config"]["allocation"]
    scores = [score_parts(rule, layer["score"]) for layer in layers if layer["score"] is not None]
    figure = Figure(figsize=(8, 5 if scores else 3), layout="constrained")
    axes = figure.subplots(2 if scores else 1, 1, sharex=True, squeeze=False)[:, 0]
    numbers = range(len(layers))
    if scores:
        width = 0.8 / len(scores[0])
        for part, label in enumerate(scores[0]):
            places = [number + (part - (len(scores[0]) - 1) / 2) * width for number in numbers]
            colour, hatch = (("#0072b2", ""), ("#e69f00", "//"), ("#009e73", ".."))[part]
            column = [score[label] for score in scores]
            axes[0].bar(places, column, width, label=label, color=colour, hatch=hatch, edgecolor="white")
        axes[0].set_ylabel("score")
        axes[0].set_title("damage by module" if rule == "error" else "importance")
        if len(scores[0]) > 1:
            axes[0].legend(frameon=False)
    axes[-1].bar(numbers, [100 * layer["sparsity"] for layer in layers], 0.8, color="#0072b2")
    mean = 100 * plan["sparsity"]["blocks"]
    axes[-1].axhline(mean, color="black", linestyle="--", linewidth=1)
    axes[-1].set_title(f"parameters removed (dashed: {mean:.1f} % of all blocks)")
    axes[-1].set_ylabel("%")
    axes[-1].set_xlabel("layer")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _cache_bytes(source: Source, allocation: Allocation, dtype: torch.dtype) -> dict[str, int]:
    numbers = cached_numbers(source.blocks.layers, source.architecture, source.dims, allocation.ranks)
    return {name: number * dtype.itemsize for name, number in numbers.items()}


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
