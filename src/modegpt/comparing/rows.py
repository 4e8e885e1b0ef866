"""Rows of a table that are kept as they are measured, a file each: the points of a sweep, the rows of a comparison."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import read_json, write_json
from ..config import CompressionConfig
from ..errors import InputError
from ..running.partial import check_fingerprint


class Rows:
    """The rows in a folder.

    Args:
        folder: of the files; it need not exist.
        overwrite: whether rows that are there count for nothing.
    """

    def __init__(self, folder: Path, overwrite: bool) -> None:
        """Look at nothing yet."""
        self._folder, self._overwrite = folder, overwrite

    def finished(self, name: str, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """Return a row that an equal call has measured; raise `InputError` for one of another call."""
        file = self._file(name)
        if self._overwrite or not file.is_file():
            return None
        row = read_json(file)
        check_fingerprint(row["fingerprint"], fingerprint, file)
        return row

    def begin(self) -> None:
        """Make the folder, without the rows that are to be overwritten."""
        if self._overwrite:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, row: dict[str, Any], fingerprint: dict[str, Any]) -> dict[str, Any]:
        """Write a row, and return it with its fingerprint."""
        row = {**row, "fingerprint": fingerprint}
        write_json(row, self._file(name))
        return row

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def check_call(config: CompressionConfig, out: Path, inside: str, what: str) -> None:
    """Refuse settings with one sparsity, several processes, and a folder that holds no earlier result of its kind.

    Args:
        config: the settings of all rows.
        out: the folder of the result.
        inside: the folder of its rows in that.
        what: the kind of the result, as users call it.
    """
    if config.allocation == "plan":
        raise InputError(f"a plan fixes the ranks and with them one sparsity; give the {what} another allocation")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(f"a {what} runs in one process; start it without torchrun")
    if out.is_file():
        raise InputError(f"output '{out}' is a file; give a folder name")
    if out.is_dir() and any(out.iterdir()) and not (out / inside).is_dir():
        raise InputError(f"output folder '{out}' holds something that is no {what}; choose another")


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the table has it, without its fingerprint."""
    return {key: value for key, value in row.items() if key != "fingerprint"}
