"""A folder that is there when it is whole, and not before."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..checkpoint import check_output
from ..errors import InputError, WriteError


@contextmanager
def appearing(out: Path, overwrite: bool) -> Iterator[Path]:
    """Give a folder to fill, which takes the name `out` at the end, or is removed if anything goes wrong.

    An `out` that is to be replaced keeps its name until then, and gets it back if the last step fails.

    Raises:
        InputError: a folder of an earlier try is in the way, or `out` exists and is not to be replaced.
        WriteError: the disk refused something.
    """
    new, old = (out.with_name(f"{out.name}.{end}") for end in ("exporting", "replaced"))
    if old.exists():
        raise InputError(f"'{old}' is what '{out.name}' was before an export that was killed: rename or remove it")
    try:
        new.mkdir(parents=True)
    except FileExistsError as problem:
        raise InputError(
            f"'{new}' is of another export, or of one that was killed: wait for it, or remove it"
        ) from problem
    except OSError as problem:
        raise WriteError(f"the folder for '{out}' cannot be made: {problem}") from problem
    try:
        yield new
        check_output(out, overwrite)  # it may have appeared in the meantime
        _replace(new, out, old)
    except (OSError, SafetensorError) as problem:
        raise WriteError(
            f"the export could not be written to '{out}': {problem}; make room, and export again"
        ) from problem
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _replace(new: Path, out: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
