"""An unfinished checkpoint: each compressed layer is on disk as soon as it is done, and the run can go on from there.

Layout of `<out>.partial/`: `fingerprint.json` (what the run is), `scores.json` and `coverage.json` (what all layers
depend on), `layers/00000.safetensors` ... (the tensors of a layer, its outcome in the metadata), `hidden/` (hidden
states that memory has no room for), `model/` (the final folder in the making), `previous/` (the folder that it
replaces) and `replaced/` (the same, once it is to be removed). Every file appears by a rename, and `model/` becomes
`<out>` by one. Nothing else is ever removed. A run locks the folder.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from ..checkpoint import MODELING_FILE, REPORT_NAME, modeling_source, read_json, write_json, write_weights
from ..disk import DISK, is_full
from ..errors import InputError, WriteError
from ..formats.safetensors_merge import Entry, read_header
from ..inspection import describe
from ..loading.tokenizers import save_tokenizer
from .folder_lock import FolderLock
from .surgery import BlockOutcome
from .text import Text

IDENTITY = "fingerprint.json"
OWN = ("model", "previous", "replaced", "rest.safetensors", "hidden", "layers", "scores.json", "coverage.json")
"""What a partial folder may hold beside its fingerprint, which goes last, so that what is left of it is known again."""


class PartialCheckpoint:
    """Layer files on the way to a checkpoint.

    Args:
        out: the final folder.
        fingerprint: everything that decides the result, by field.
        resume: continue what `<out>.partial` holds; it must have the same fingerprint.
        overwrite: discard an unfinished run that is not resumed, and replace an existing `out` at the end.

    While it lives, or until `release`, no other run writes to the same place: the folder is locked, as far as its file
    system can (a killed process leaves no lock).
    """

    def __init__(self, out: Path, fingerprint: dict[str, Any], resume: bool, overwrite: bool) -> None:
        """Open or create the folder.

        Raises:
            InputError: an unfinished run is there and neither `resume` nor `overwrite` is set, or it is another run, or
                one that is still at it.
        """
        self.out, self.fingerprint, self._overwrite = out, fingerprint, overwrite
        self.folder = partial_folder(out)
        self._lock = FolderLock(self.folder) if self.folder.is_dir() else None
        try:
            self._open(resume)
        except BaseException:
            self.release()
            raise

    def _open(self, resume: bool) -> None:
        out, fingerprint, overwrite = self.out, self.fingerprint, self._overwrite
        self._layers = self.folder / "layers"
        self._previous = self.folder / "previous"
        if _is_run(self.folder):
            if self._previous.is_dir() and not out.exists():
                self._previous.rename(out)  # killed between the two renames of an earlier run's end
            found = self._found(overwrite)
            if resume and (found == fingerprint or not overwrite):
                check_fingerprint(found, fingerprint, self.folder)
                shutil.rmtree(self.hidden, ignore_errors=True)
                self._layers.mkdir(exist_ok=True)
                return
            if not overwrite:
                raise InputError(
                    f"'{self.folder}' holds an unfinished run: continue it with --resume, "
                    "or discard it with --overwrite"
                )
            self.discard()
        if self.folder.is_dir():  # of a kill in the moment in which the fingerprint is written
            (self.folder / f"{IDENTITY}.tmp").unlink(missing_ok=True)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(
                f"'{self.folder}', where an unfinished run is kept, exists and holds something else: "
                "move it away, or choose another output"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"'{self.folder}' cannot be made ({problem.strerror}): choose another output") from problem
        self.release()  # the folder may be another one now
        self._lock = FolderLock(self.folder)
        write_json(fingerprint, self.folder / IDENTITY)
        _flush(self.folder / IDENTITY)
        self._layers.mkdir()

    def _found(self, overwrite: bool) -> dict[str, Any]:
        """Return the fingerprint that is there; of one that is broken, and may be discarded, an empty one."""
        try:
            return read_json(self.folder / IDENTITY)
        except InputError as problem:
            if overwrite:
                return {}
            raise InputError(f"{problem}, or discard the unfinished run with --overwrite") from problem

    def release(self) -> None:
        """Let other runs write there again."""
        if self._lock is not None:
            self._lock.release()

    @property
    def hidden(self) -> Path:
        """Where hidden states may be kept while the run goes on: the next try clears what a kill has left of them."""
        return self.folder / "hidden"

    def discard(self) -> None:
        """Remove everything: the run has failed in a way that going on would not mend, or is done."""
        _remove(self.folder)

    def holds_work(self) -> bool:
        """Tell whether an hour or more may have gone into what is kept: layers, scores, or text that was written."""
        kept = [self.folder / f"{name}.json" for name in ("scores", "coverage")]
        return self.finished_layers() > 0 or any(file.is_file() for file in kept)

    def finished_layers(self) -> int:
        """Return how many layers, from the first, are complete on disk."""
        count = 0
        while self._readable(self._file(count)):
            count += 1
        return count

    def write_layer(self, index: int, tensors: dict[str, Tensor], outcome: BlockOutcome) -> None:
        """Put a layer on disk: written, flushed to the device, then renamed."""
        metadata = {"outcome": json.dumps(vars(outcome))}
        path = self._file(index)
        temporary = path.with_suffix(".tmp")
        with self._refusals_explained(f"layer {index}"):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
            _flush(temporary)
            temporary.replace(path)
            _flush_folder(self._layers)

    def read_layer(self, index: int) -> tuple[dict[str, Tensor], BlockOutcome]:
        """Read a finished layer back."""
        with safe_open(self._file(index), framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, BlockOutcome(**json.loads(file.metadata()["outcome"]))

    def read_tensor(self, name: str) -> Tensor | None:
        """Return what an earlier try kept under a name (`scores`, `coverage`), if it got so far."""
        path = self.folder / f"{name}.json"
        try:
            found = read_json(path) if path.is_file() else None
            return None if found is None else torch.tensor(found["values"], dtype=getattr(torch, found["dtype"]))
        except (InputError, KeyError, TypeError, ValueError):  # cut by a kill or a full disk, or edited
            return None

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Keep what all layers depend on: computed again, on another machine, it might round to something else."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        file = self.folder / f"{name}.json"
        with self._refusals_explained(name):
            write_json({"dtype": dtype, "values": tensor.tolist()}, file)
            _flush(file)

    def finish(
        self,
        other: dict[str, Tensor],
        n_layers: int,
        config: PreTrainedConfig,
        generation_config: GenerationConfig | None,
        text: Text,
        report: dict[str, Any],
    ) -> None:
        """Put the final folder together and give it its name.

        Args:
            other: the tensors outside the blocks, in their final dtype.
            n_layers: layers in the model; all are on disk.
            config: the compressed model's.
            generation_config: the dense model's.
            text: its tokenizer, if it has one, is saved beside the weights.
            report: the run's report, saved as `report.json`.
        """
        with self._refusals_explained("the checkpoint"):
            model = self.folder / "model"
            shutil.rmtree(model, ignore_errors=True)
            model.mkdir()
            rest = self.folder / "rest.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in other.items()}, rest, {"format": "pt"})
            self._write_weights([rest, *(self._file(index) for index in range(n_layers))], model)
            config.save_pretrained(model)
            if generation_config is not None:
                generation_config.save_pretrained(model)
            if text.tokenizer is not None:
                save_tokenizer(text.tokenizer, model, text.tokenizer_of)
            (model / MODELING_FILE).write_bytes(modeling_source())
            write_json(report, model / REPORT_NAME)
            for file in model.iterdir():
                if file.is_file():
                    _flush(file)
            self._publish(model)

    def _publish(self, model: Path) -> None:
        """Give the finished folder its name; an existing one stays whole until then."""
        if self.out.exists() and not self._overwrite:
            raise WriteError(
                f"'{self.out}' was not there when this run began, and is not replaced: move it away, then go on with "
                "--resume"
            )
        if self.out.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            self.out.rename(self._previous)
        model.rename(self.out)
        _flush_folder(self.out.parent)
        with suppress(OSError):  # half removed, it must not be taken for one that is to be put back
            self._previous.rename(self.folder / "replaced")
        self.discard()

    def _write_weights(self, files: list[Path], target: Path) -> None:
        entries: dict[str, Entry] = {}
        for file in files:
            entries |= read_header(file)[0]
        write_weights(entries, target, lambda own, name: _link(next(iter(own.values())).path, name))

    @contextmanager
    def _refusals_explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except DISK as problem:
            advice = "make room" if is_full(problem) else "mend that"
            raise WriteError(
                f"{what} could not be written to '{self.folder}': {problem}; finished layers are kept: {advice}, then "
                "go on with --resume"
            ) from problem

    def _file(self, index: int) -> Path:
        return self._layers / f"{index:05d}.safetensors"

    @staticmethod
    def _readable(path: Path) -> bool:
        try:
            read_header(path)
        except (OSError, ValueError):
            return False
        return True


def check_fingerprint(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise `InputError` naming the first field in which an unfinished run differs from the one asked for."""
    # Settings before what follows from them, of which a hash alone is known: another seed draws other tokens.
    for name in sorted(found.keys() | wanted.keys(), key=lambda name: (_is_hash(found.get(name)), name)):
        if found.get(name) != wanted.get(name):
            raise InputError(
                f"'{where}' holds another run: its {name} is {_short(found.get(name))}, and {_short(wanted.get(name))} "
                "was asked for; give the same settings, or discard it with --overwrite"
            )


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def finished_report(out: Path, fingerprint: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the report in `out` if it is the finished result of the same run, else None: also of a broken one.

    Raises:
        InputError: it is that of another run, and is not to be replaced; names what differs.
    """
    path = out / REPORT_NAME
    if not path.is_file():
        return None
    try:
        report = read_json(path)
        describe(out)  # the weights are there
    except InputError:
        return None
    found = report.get("fingerprint")
    if found != fingerprint and isinstance(found, dict) and not overwrite:
        check_fingerprint(found, fingerprint, out)
    return report if found == fingerprint else None


def clear_leftovers(out: Path, fingerprint: dict[str, Any]) -> None:
    """Remove what a finished run no longer needs, if it was killed before it did so itself."""
    folder = partial_folder(out)
    with suppress(InputError):
        if _is_run(folder) and read_json(folder / IDENTITY) == fingerprint:
            lock = FolderLock(folder)
            _remove(folder)
            lock.release()
    with suppress(OSError):
        folder.rmdir()  # of a kill between the last two steps: it is empty


def _remove(folder: Path) -> None:
    """Remove what a run keeps in its partial folder, and the folder, if nothing else is in it."""
    for name in OWN:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
            path.with_name(f"{name}.tmp").unlink(missing_ok=True)
    if any((folder / name).exists() for name in OWN):
        return  # something cannot be removed: with its fingerprint, the next run knows it again
    (folder / IDENTITY).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _is_run(folder: Path) -> bool:
    return (folder / IDENTITY).is_file()


def partial_folder(out: Path) -> Path:
    """Return where the unfinished run to a folder is kept."""
    return out.with_name(out.name + ".partial")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _link(file: Path, name: Path) -> None:
    """Give a file a second name; where the file system has no hard links (FAT, some network shares), a copy gets it."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


def _flush_folder(folder: Path) -> None:
    """Let the names in a folder outlast a loss of power, where the system can."""
    with suppress(OSError):  # Windows opens no folders
        _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
