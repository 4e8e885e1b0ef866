"""Float32 products in full float32, whatever the process does otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """While the context is open, no float32 product is taken in TF32 or bfloat16, on a GPU or a CPU.

    A training script, or a container, may have allowed that: TF32 keeps 10 of 23 bits, fewer than moments and solvers
    are written for. The setting is the process's own, so it is put back.
    """
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before PyTorch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    # By backend: what sets all of them at once refuses to be read where one was set by itself.
    known: Any = torch.backends
    backends = known.cuda.matmul, known.mkldnn.matmul
    found = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, found, strict=True):
            backend.fp32_precision = precision
