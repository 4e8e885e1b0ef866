"""Tensors of no said device stand on the CPU here, whatever the process does otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """While the context is open, a tensor that is made without a device is on the CPU.

    A notebook may have called `torch.set_default_device("cuda")`: indices and windows of tokens would then meet what is
    meant to stay on the host.
    """
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield
