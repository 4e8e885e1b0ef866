"""The run's report: what was asked, what came out, on what machine."""

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from psutil import Process

from .ranks.whole import LayerSizes
from .versions import versions

OTHER_DTYPES = "computed in different dtypes"
"""With which the warning of it begins."""


def machine() -> dict[str, Any]:
    """Describe the machine in the terms that matter for speed."""
    about: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


def protocol() -> dict[str, Any]:
    """Return what must stand beside any figure: command, versions and machine."""
    return {"command": shlex.join(sys.argv), "versions": versions(), "machine": machine()}


def mixed_dtypes(dtypes: dict[str, str]) -> list[str]:
    """Return a warning if models that are compared were computed in different dtypes, by label."""
    if len(set(dtypes.values())) < 2:
        return []
    found = ", ".join(f"{label} in {dtype}" for label, dtype in dtypes.items())
    return [f"{OTHER_DTYPES}, which differ by themselves: {found}; --dtype gives all of them one"]


def budget(
    sizes: Sequence[LayerSizes], ranks: Sequence[dict[str, int]], n_parameters: int, requested: float | None
) -> dict[str, Any]:
    """Return `sparsity` (requested, of the blocks, of the whole model) and `parameters` (dense, compressed).

    `requested` is None for ranks that a plan gives: what it removes is what was asked for.
    """
    removed = sum(size.removed(layer) for size, layer in zip(sizes, ranks, strict=True))
    shares = {"blocks": removed / sum(size.total for size in sizes), "total": removed / n_parameters}
    return {
        "sparsity": {"requested": shares["blocks"] if requested is None else requested, **shares},
        "parameters": {"dense": n_parameters, "compressed": n_parameters - removed},
    }


def peak_memory_bytes() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # on Windows
        return Process().memory_info().peak_wset  # pyright: ignore[reportAttributeAccessIssue]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_gpu_memory_bytes(device: torch.device) -> int:
    """Return what is free of a CUDA device's memory, in bytes, torch's own store included; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    stored = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + stored


def room_bytes(device: torch.device, least: int, part: int) -> int:
    """Return what may be kept to save time: `least` bytes, or a `part`-th of a CUDA device's free memory if more."""
    return max(least, free_gpu_memory_bytes(device) // part)


def peak_gpu_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors held on a CUDA device, in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


class Stopwatch:
    """Adds up wall-clock seconds by stage."""

    def __init__(self, device: torch.device) -> None:
        """Start the total; CUDA work is waited for at the end of each stage."""
        self._device = device
        self._start = time.perf_counter()
        self._stages: dict[str, float] = {}
        self._inside = 0.0
        """Seconds that ended stages inside the present one have taken."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the context to the stage `name`, but for that of other stages inside it."""
        start, outside, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            passed = time.perf_counter() - start
            self._stages[name] = self._stages.get(name, 0.0) + passed - self._inside
            self._inside = outside + passed

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage and, under `total`, of the whole run."""
        stages = {name: round(value, 3) for name, value in self._stages.items()}
        return {"total": round(time.perf_counter() - self._start, 3), **stages}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
