"""Where the files of what a user calls MODEL are: at a hub name, in a local folder, or in a `.gguf` file."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils.peft_utils import find_adapter_config_file

from ..errors import InputError, MissingExtraError, first_line, refused

VOCABULARY = "tokenizer.model"
"""A SentencePiece model: transformers makes a `tokenizer.json` of it and leaves it out when it saves."""
ADAPTER = "adapter_config.json"
"""What PEFT writes with every adapter."""
MERGE = "merge it into its model (merge_and_unload), and give the folder that is saved then"


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """Split a MODEL into the path or hub name and the arguments that transformers' `from_pretrained` needs."""
    path = Path(name)
    if is_gguf(path):
        if not path.is_file():
            raise InputError(f"model file '{name}' does not exist; give a .gguf file, a model folder or a hub name")
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtraError("opening a .gguf file", "gguf", "gguf")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        if (path / ADAPTER).is_file():
            raise InputError(f"folder '{name}' holds an adapter, and no model: {MERGE}")
        raise InputError(f"model folder '{name}' has no config.json; give a folder that save_pretrained wrote")
    if path.is_file():
        raise InputError(f"model '{name}' is a file; give a model folder, a .gguf file or a hub name")
    if not path.is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as problem:
            raise InputError(
                f"model '{name}' does not exist; give a model folder, a .gguf file or a hub name"
            ) from problem
    return name, {}


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a `.gguf` file, by its name."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def local_folder(name: str) -> Path | None:
    """Return the folder of a model's files: a local one, or the hub's cache of it; None for a `.gguf` file."""
    path = Path(name)
    if path.is_dir():
        return path
    if is_gguf(path):
        return None
    return _fetched(name, ("*.safetensors", "*.json", VOCABULARY))


def files_beside(name: str, patterns: Sequence[str]) -> Path:
    """Return the folder of what matches some patterns among the files of a local folder or of a hub name."""
    return Path(name) if Path(name).is_dir() else _fetched(name, patterns)


def _fetched(name: str, patterns: Sequence[str]) -> Path:
    try:
        # `consolidated*` of Mistral's repositories are the same weights once more.
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns="consolidated*"))
    except (OSError, ValueError, HfHubHTTPError) as problem:
        raise InputError(f"model '{name}' cannot be fetched: {first_line(problem)}") from problem


@contextmanager
def opening(what: str) -> Iterator[None]:
    """Say in one line why `what` cannot be opened.

    Code which comes with a model is not run; transformers, unless it is told so, asks on standard output.
    """
    try:
        with refused(f"{what} cannot be opened"):
            yield
    except InputError as problem:
        if "trust_remote_code" not in str(problem.__cause__):
            raise
        said = "needs code that comes with it, which is not run: only families that transformers has are supported"
        raise InputError(f"{what} {said}") from problem


def check_no_adapter(name: str) -> None:
    """Raise `InputError` if an adapter lies beside a model.

    transformers would put it into the model that it loads, and a run that reads the weights would leave it out.
    """
    if is_gguf(Path(name)):
        return
    with opening(f"model '{name}'"):
        found = find_adapter_config_file(name)
    if found is not None:
        raise InputError(f"model '{name}' has an adapter beside its weights ({ADAPTER}): {MERGE}")
