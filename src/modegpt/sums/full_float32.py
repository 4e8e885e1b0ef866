"""Float32 products in full float32, whatever the process does otherwise."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class _Setting:
    """The process's own setting: the first that asks changes it, and the last that is done puts it back."""

    def __init__(self) -> None:
        self._lock, self._n_open = threading.Lock(), 0
        self._put_back: Callable[[], None] = lambda: None

    def change(self) -> None:
        """Change it, unless another thread, or this one further out, has done so."""
        with self._lock:
            if not self._n_open:
                self._put_back = _set_full()
            self._n_open += 1

    def release(self) -> None:
        """Put it back, unless somebody still needs it."""
        with self._lock:
            self._n_open -= 1
            if not self._n_open:
                self._put_back()


_SETTING = _Setting()


@contextmanager
def full_float32() -> Iterator[None]:
    """While the context is open, no float32 product is taken in TF32 or bfloat16, on a GPU or a CPU.

    A training script, or a container, may have allowed that: TF32 keeps 10 of 23 bits, fewer than moments and solvers
    are written for. The setting is that of all threads, so it is put back when no thread is in such a context. A thread
    that is in `torch.autocast`, which takes products in 16 bits, leaves it for the time.
    """
    _SETTING.change()
    try:
        with ExitStack() as stack:
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _SETTING.release()


def _set_full() -> Callable[[], None]:
    """Change the setting, and return what puts it back."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before PyTorch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        return lambda: torch.set_float32_matmul_precision(before)
    # By backend: what sets all of them at once refuses to be read where one was set by itself.
    known: Any = torch.backends
    backends = known.cuda.matmul, known.mkldnn.matmul
    found = [backend.fp32_precision for backend in backends]

    def put_back() -> None:
        for backend, precision in zip(backends, found, strict=True):
            backend.fp32_precision = precision

    for backend in backends:
        backend.fp32_precision = "ieee"
    return put_back
