"""Which safetensors files of a folder are a model's: one, or those that an index names."""

import json
from pathlib import Path

from ..errors import InputError
from .safetensors_merge import Entry, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 50 * 10**9
"""Of one file: above this a checkpoint is in several, as transformers would split it too."""


def find_tensors(folder: Path) -> dict[str, Entry]:
    """Return where each tensor of a checkpoint folder is, empty if it has no safetensors files.

    As in transformers a single file goes before an index, which may be left of a checkpoint that it replaced.

    Raises:
        InputError: the index names a file that is missing, or it or a file is broken.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        paths = [folder / SINGLE]
    elif index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            paths = sorted({folder / name for name in names})
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise InputError(f"'{index}' is no index of safetensors files: fetch it again") from problem
    else:
        paths = []
    found: dict[str, Entry] = {}
    for file in paths:
        if not file.is_file():
            raise InputError(f"the checkpoint's index names '{file.name}', which is not in '{folder}': fetch it again")
        try:
            found |= read_header(file)[0]
        except ValueError as problem:
            raise InputError(f"shard {problem}: fetch it again") from problem
    return found
