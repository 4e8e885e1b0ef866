"""What tells one checkpoint's files from another's, without reading them whole."""

import hashlib
import os
from collections.abc import Iterable, Iterator

from .safetensors_merge import Entry

SAMPLED, EVERY = 1 << 12, 1 << 23
"""Bytes of a tensor that tell whether it is another one: so many of each stretch of so many, or of it all."""


def fingerprint(files: dict[str, Entry]) -> dict[str, str]:
    """Identify each shard by size, header, the first and last mebibyte of its data, and samples of every tensor.

    A copy on another machine is the same. A change of a few numbers may pass. Cost: a read for each tensor and 8 MiB.
    """
    result = {}
    paths = sorted({entry.path for entry in files.values()})
    folder = os.path.commonpath([path.parent for path in paths]) if paths else ""
    for path in paths:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(length + (1 << 20)))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
            for place, length in _samples(entry for entry in files.values() if entry.path == path):
                file.seek(place)
                digest.update(file.read(length))
        result[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return result


def _samples(entries: Iterable[Entry]) -> Iterator[tuple[int, int]]:
    """Yield places in a file and numbers of bytes to read there: in the middle of stretches of equal length."""
    for entry in sorted(entries, key=lambda entry: entry.start):
        count = -(-entry.size // EVERY)
        for index in range(count):
            first, end = (entry.size * step // count for step in (index, index + 1))
            length = min(SAMPLED, end - first)
            yield entry.start + first + (end - first - length) // 2, length
