"""A folder that is there when it is whole, and not before."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoint import check_output
from ..disk import DISK, is_full
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
        whole = f"'{out}' itself is whole: remove it" if out.exists() else "rename or remove it"
        raise InputError(f"'{old}' is what '{out.name}' was before a call that was interrupted; {whole}")
    parents = [parent for parent in out.parents if not parent.exists()]
    with writing(out):
        try:
            new.mkdir(parents=True)
        except FileExistsError as problem:
            said = "is of another call, or of one that was killed: wait for it, or remove it"
            raise InputError(f"'{new}' {said}") from problem
    try:
        yield new
        check_output(out, overwrite)  # it may have appeared in the meantime
        with writing(out):
            _replace(new, out, old)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        for parent in parents:
            with suppress(OSError):
                parent.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def writing(out: str | Path) -> Iterator[None]:
    """Say in one line what the disk refuses."""
    try:
        yield
    except DISK as problem:
        advice = "make room, and try again" if is_full(problem) else "choose another output"
        raise WriteError(f"'{out}' could not be written: {problem}; {advice}") from problem


def _replace(new: Path, out: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
