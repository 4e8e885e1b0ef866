"""What a disk may refuse, and files that are whole or not there."""

import errno
import os
import tempfile
from contextlib import suppress
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


def write_whole(content: str | bytes, path: str | Path) -> None:
    """Write a file through a temporary one beside it, so that a reader never sees half of it.

    A pipe, a device, or what a link points to is not replaced: it is written where it is.

    Raises:
        OSError: the disk refused it, and nothing is left of it; names `path`.
    """
    path, data = Path(path), content.encode() if isinstance(content, str) else content
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)  # noqa: PTH105 - Path.replace is the same call; this one says it is atomic
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(problem.errno, problem.strerror, str(path)) from problem
