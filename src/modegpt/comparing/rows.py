"""Rows of a table that are kept as they are measured, a file each: the points of a sweep, the rows of a comparison."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import holds, read_json, read_number, write_json
from ..config import CompressionConfig
from ..disk import check_writable
from ..errors import InputError
from ..running.distributed import started_together
from ..running.folder_lock import FolderLock
from ..running.partial import check_fingerprint


class Rows:
    """The rows in a folder, which other runs are kept out of until the context that this is ends.

    Args:
        folder: of the files; it need not exist.
        table: the file that is made of all rows in the end.
        overwrite: whether what is there counts for nothing.

    Raises:
        InputError: another run is in the folder.
    """

    def __init__(self, folder: Path, table: Path, overwrite: bool) -> None:
        """Lock the folder if it is there, and read nothing yet."""
        self._folder, self._table, self._overwrite = folder, table, overwrite
        self._lock = FolderLock(folder) if folder.is_dir() else None

    def __enter__(self) -> "Rows":
        """Keep other runs out from here on, or from `begin`."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Let other runs in."""
        if self._lock is not None:
            self._lock.release()

    def finished(self, name: str, fingerprint: dict[str, Any]) -> dict[str, Any] | None:
        """Return a row that an equal call has measured; raise `InputError` for one of another call."""
        file = self._file(name)
        if self._overwrite or not file.is_file():
            return None
        row = read_json(file)
        if not isinstance(row.get("fingerprint"), dict):
            raise InputError(f"'{file}' is something else than this program wrote: remove it")
        check_fingerprint(row["fingerprint"], fingerprint, file)
        for entry in row["perplexity"]:
            entry |= {key: read_number(entry[key]) for key in ("perplexity", "nll")}
        return row

    def begin(self) -> None:
        """Make the folder; if all is to be overwritten, without the table and the rows. Other files in it stay."""
        self._folder.resolve().mkdir(parents=True, exist_ok=True)  # a link may lead to what is not there yet
        self._lock = self._lock or FolderLock(self._folder)
        if self._overwrite:
            self._table.unlink(missing_ok=True)
            for file in filter(is_row, self._folder.glob("*.json")):
                file.unlink()

    def keep(self, name: str, row: dict[str, Any], fingerprint: dict[str, Any]) -> dict[str, Any]:
        """Write a row, and return it with its fingerprint."""
        row = {**row, "fingerprint": fingerprint}
        write_json(row, self._file(name))
        return row

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def is_row(file: Path) -> bool:
    """Tell whether a file is a row that was kept, of whatever call."""
    try:
        return "fingerprint" in read_json(file)
    except (InputError, OSError):
        return False


def check_call(
    config: CompressionConfig, out: Path, inside: Sequence[str], what: str, reads: Iterable[str | Path]
) -> None:
    """Refuse settings with one sparsity, several processes, and a folder that holds no earlier result of its kind.

    Args:
        config: the settings of all rows.
        out: the folder of the result.
        inside: the folders in that which are written: of its rows first.
        what: the kind of the result, as users call it.
        reads: the model and the texts; none of them may be in those.
    """
    if config.allocation == "plan":
        raise InputError(f"a plan fixes the ranks and with them one sparsity; give the {what} another allocation")
    if started_together():
        raise InputError(f"a {what} runs in one process; start it without torchrun")
    if out.is_file():
        raise InputError(f"output '{out}' is a file; give a folder name")
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    check_writable(place, f"output '{out}'")
    for read in map(Path, reads):
        own = next((out / name for name in inside if holds(out / name, read)), None)
        if own is not None:
            raise InputError(
                f"'{own}' holds '{read}', which is read, and is written by the {what}: choose another folder"
            )
    if out.is_dir() and any(out.iterdir()) and not (out / inside[0]).is_dir():
        raise InputError(f"output folder '{out}' holds something that is no {what}; choose another")


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the table has it, without its fingerprint."""
    return {key: value for key, value in row.items() if key != "fingerprint"}
