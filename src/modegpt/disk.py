"""What a disk may refuse."""

import errno
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from .errors import InputError

DISK = (OSError, SafetensorError)
"""What writing a file may raise."""


def is_full(problem: Exception) -> bool:
    """Whether one of `DISK` says that there is no room, which the writer of safetensors files does not tell apart."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return not isinstance(problem, OSError) or problem.errno in full


def check_writable(folder: Path, what: str) -> None:
    """Raise `InputError`, which begins with `what` is to be written, if nothing can be written to a folder."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as problem:
        raise InputError(f"{what}: nothing can be written to '{folder}' ({problem.strerror})") from problem
