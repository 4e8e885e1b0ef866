"""Speed and memory of one model, or of two in turn, over a grid of batch sizes and prompt lengths.

A round reads the prompt and then decodes token after token, greedily, in a plain loop over the model with a key-value
cache: transformers' `generate` adds its own checks and logits processors to that, which are the same for all models.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from transformers import DynamicCache, PreTrainedModel, StaticCache

from .cache_name import CACHE
from .errors import InputError
from .loading.models import device_of
from .measuring.costs import Costs, cache_bytes, costs_of
from .positions import position_limit
from .progress import Progress


@dataclass(frozen=True)
class BenchSettings:
    """What is measured, and how often."""

    batch_sizes: tuple[int, ...] = (1, 8)
    lengths: tuple[int, ...] = (128, 512)
    """Tokens of the prompts."""
    new_tokens: int = 32
    """Tokens decoded after the first one, which reading the prompt gives."""
    repeats: int = 5
    warmup: int = 1
    """Rounds before the timed ones."""
    compile: bool = False
    """Compile the decoding step, on a static cache (CUDA graphs on a GPU), as `generate` does; prompts stay eager."""
    seed: int = 0
    """Of the random prompts."""


PRESETS = {"paper": BenchSettings(batch_sizes=(256,), lengths=(1,), new_tokens=255, repeats=3)}
"""`paper`: 256 sequences of 256 tokens, one token at a time with a cache, as SliceGPT's code does it for the paper."""


def check_settings(
    settings: BenchSettings, configs: Sequence[Any], hint: str = "give smaller lengths or fewer new tokens"
) -> None:
    """Raise `InputError` where a count is below 1, or the longest sequence has more positions than a model knows.

    Args:
        settings: to be checked.
        configs: of the models.
        hint: says what to do about a sequence that is too long.
    """
    counts = {name: getattr(settings, name) for name in ("new_tokens", "repeats")}
    for name in ("batch_sizes", "lengths"):
        values = getattr(settings, name)
        if not values:
            raise InputError(f"{name} is empty; give at least one number")
        counts[name] = min(values)
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name} {value} is not a positive whole number")
    if settings.warmup < 0:
        raise InputError(f"warmup {settings.warmup} is negative; give 0 or more rounds")
    total = max(settings.lengths) + settings.new_tokens
    for config in configs:
        limit = position_limit(config)
        if limit is not None and total > limit:
            raise InputError(
                f"a prompt of {max(settings.lengths)} tokens and {settings.new_tokens} new ones exceed the model's "
                f"{limit} positions; {hint}"
            )


@torch.no_grad()
def benchmark(
    models: dict[str, PreTrainedModel], settings: BenchSettings, progress: Progress | None = None
) -> tuple[dict[str, Costs], list[dict[str, Any]]]:
    """Measure every point of the grid, each round with all models in turn and the order swapped from round to round.

    Args:
        models: by name, in evaluation mode, on one device. Ratios are of the first over each other one.
        settings: grid and repeats.
        progress: called with a stage, rounds done and rounds in all.

    Returns:
        The models' costs, and one JSON-ready row for each point; `docs/json-output.md` lists the keys.

    Raises:
        InputError: a point does not fit into the GPU's memory.
    """
    costs = {name: costs_of(model) for name, model in models.items()}
    vocabulary = min(model.config.get_text_config(decoder=True).vocab_size for model in models.values())
    rows, n_rounds = [], settings.warmup + settings.repeats
    grid = [(batch, length) for batch in settings.batch_sizes for length in settings.lengths]
    generator = torch.Generator().manual_seed(settings.seed)
    for point, (batch, length) in enumerate(grid):
        ids = torch.randint(vocabulary, (batch, length), generator=generator)
        # Each point has shapes of its own: what was compiled for the last one would count against torch's limit.
        torch.compiler.reset()
        try:
            timings: dict[str, list[Timing]] = {name: [] for name in models}
            runners = {name: Runner(model, ids, settings) for name, model in models.items()}
            for index in range(n_rounds):
                for name in list(models) if index % 2 == 0 else reversed(models):
                    timing = runners[name].run()
                    if index >= settings.warmup:
                        timings[name].append(timing)
                if progress is not None:
                    progress("measuring", point * n_rounds + index + 1, len(grid) * n_rounds)
            rows.append(_row(runners, timings, costs, settings))
        except torch.OutOfMemoryError:
            raise InputError(
                f"batch size {batch} at {length} + {settings.new_tokens} tokens does not fit into the GPU's memory; "
                "give smaller batch sizes or lengths"
            ) from None
    return costs, rows


@dataclass
class Timing:
    """One round of one model."""

    prefill: float
    """Seconds from the prompt to the first token."""
    steps: list[float]
    """Seconds of each token after it."""


class Runner:
    """One model at one point of the grid."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, settings: BenchSettings) -> None:
        """Prepare the prompts and, for a compiled step, the static cache that its graph is bound to."""
        self.shape = ids.shape
        self._device = device_of(model)
        self._model, self._ids, self._new_tokens = model, ids.to(self._device), settings.new_tokens
        self._static = self._step = None
        if settings.compile:
            self._static = StaticCache(config=model.config, max_cache_len=ids.shape[1] + settings.new_tokens)
            mode = "reduce-overhead" if self._device.type == "cuda" else None
            self._step = torch.compile(_next_token, fullgraph=True, dynamic=False, mode=mode)

    def run(self) -> Timing:
        """Read the prompt, decode, and return the time of each token."""
        prefill, *steps = self._round(self._step or _next_token)[0].intervals()
        return Timing(prefill, steps)

    def memory(self, weights: int) -> dict[str, int]:
        """Return what an eager round takes: the filled cache, and at its peak all tensors, the weights included."""
        device = self._device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            cache = self._round(_next_token)[1]
            peak = torch.cuda.max_memory_allocated(device) - before
        else:
            with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
                cache = self._round(_next_token)[1]
            peak = _profiled_peak(profile)
        held = cache_bytes(cache)
        # A static cache was there before.
        return {"peak_memory_bytes": weights + peak + (0 if self._static is None else held), "cache_bytes": held}

    def _round(self, step: Callable[..., Tensor]) -> tuple["_Clock", Any]:
        """Read the prompt and decode; return the clock, which has a mark after each token, and the filled cache."""
        if self._static is not None:
            self._static.reset()
        cache = DynamicCache(config=self._model.config) if self._static is None else self._static
        clock = _Clock(self._device)
        clock.mark()
        token = _next_token(self._model, self._ids, cache)
        clock.mark()
        for _ in range(self._new_tokens):
            # Cloned, because a CUDA graph writes each of its results into the same memory.
            token = step(self._model, token, cache).clone()
            clock.mark()
        return clock, cache


def _next_token(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Append `ids` to the cache and return the likeliest next token of each sequence, as `(batch, 1)`."""
    return model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)


class _Clock:
    """Marks moments of a device's work: events in the stream of a GPU, which then never waits for Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def intervals(self) -> list[float]:
        """Return the seconds between one mark and the next."""
        pairs = itertools.pairwise(self._marks)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]
        return [later - earlier for earlier, later in pairs]


def _profiled_peak(profile: Any) -> int:
    """Return the most bytes that were held at once of those allocated on the CPU under a profiler."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes, initial=0))


def _row(
    runners: dict[str, Runner], timings: dict[str, list[Timing]], costs: dict[str, Costs], settings: BenchSettings
) -> dict[str, Any]:
    """Return the row of one point: every model's figures, and the first one's speedups over the others."""
    batch, length = next(iter(runners.values())).shape
    figures: dict[str, dict[str, Any]] = {}
    for name, runner in runners.items():
        prefill = [timing.prefill for timing in timings[name]]
        decode = [sum(timing.steps) for timing in timings[name]]
        halfway = length + (settings.new_tokens + 1) // 2
        figures[name] = {
            "prefill_tokens_per_second": batch * length / statistics.median(prefill),
            "decode_tokens_per_second": batch * settings.new_tokens / statistics.median(decode),
            "first_token_seconds": statistics.median(prefill),
            "token_seconds": statistics.median(step for timing in timings[name] for step in timing.steps),
            **runner.memory(costs[name].weight_bytes),
            "prefill_macs": batch * costs[name].prefill_macs(length),
            "decode_macs": batch * costs[name].decode_macs(halfway),
            "prefill_seconds": prefill,
            "decode_seconds": decode,
        }
    first, *others = figures

    def speedup(other: str, key: str) -> dict[str, float]:
        return spread([b / a for a, b in zip(figures[first][key], figures[other][key], strict=True)])

    return {
        "batch_size": batch,
        "prompt_tokens": length,
        "new_tokens": settings.new_tokens,
        "models": figures,
        "speedups": {
            other: {task: speedup(other, f"{task}_seconds") for task in ("prefill", "decode")} for other in others
        },
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
