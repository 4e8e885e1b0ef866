"""Joins safetensors files into one without loading a tensor: headers are rewritten, data is copied through.

The result is byte for byte what `safetensors.torch.save_file` writes for the same tensors, so a checkpoint put
together from layer files equals the one that `save_pretrained` writes.
"""

import json
from collections import Counter
from collections.abc import Container, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

HEADER_ALIGNMENT = 8
COPY_CHUNK = 1 << 20
# The order in which safetensors writes tensors: by dtype, widest first, then by name.
_DTYPE_ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")


class Entry(NamedTuple):
    """One tensor in a file: where its bytes are and what they mean."""

    path: Path
    start: int
    """Of its bytes, from the start of the file."""
    size: int
    dtype: str
    shape: list[int]


def main_dtype(entries: Iterable[Entry], among: Container[str]) -> str | None:
    """Return the dtype, of some, that most numbers have; None where none has one of these."""
    counts: Counter[str] = Counter()
    for entry in entries:
        if entry.dtype in among:
            counts[entry.dtype] += prod(entry.shape)
    return counts.most_common(1)[0][0] if counts else None


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata, without reading data.

    Raises:
        ValueError: the file is truncated or is no safetensors file.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + length > path.stat().st_size:
            raise ValueError(f"'{path}' is truncated or is not a safetensors file")
        encoded = file.read(length)
    try:
        header: dict[str, Any] = json.loads(encoded)
        metadata = header.pop("__metadata__", {})
        start = 8 + length
        entries = {}
        for name, item in header.items():
            first, end = item["data_offsets"]
            entries[name] = Entry(path, start + first, end - first, item["dtype"], item["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"'{path}' is not a safetensors file: its header cannot be read") from problem
    if entries and max(entry.start + entry.size for entry in entries.values()) != path.stat().st_size:
        raise ValueError(f"'{path}' is truncated: its data is shorter than its header says")
    return entries, metadata


def merge(entries: dict[str, Entry], target: Path) -> None:
    """Write the named tensors to one file with the metadata `format: pt`.

    Args:
        entries: tensors by their name in the new file.
        target: the file to write.
    """
    order = sorted(entries, key=lambda name: (_DTYPE_ORDER.index(entries[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        entry = entries[name]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + entry.size]}
        offset += entry.size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with target.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for name in order:
            _copy(entries[name], out)


def _copy(entry: Entry, out: Any) -> None:
    with entry.path.open("rb") as source:
        source.seek(entry.start)
        remaining = entry.size
        while remaining:
            chunk = source.read(min(remaining, COPY_CHUNK))
            if not chunk:
                raise ValueError(f"'{entry.path}' ended while it was being copied")
            out.write(chunk)
            remaining -= len(chunk)
