"""The compressed checkpoint: its config, its files, and putting a model together in memory."""

import errno
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from . import modeling_modegpt
from .architectures import Architecture
from .disk import write_whole
from .errors import InputError
from .formats.checkpoint_files import INDEX, MAX_FILE_BYTES, SINGLE
from .formats.safetensors_merge import Entry, merge
from .modeling_modegpt import FORMAT_VERSION, PREFIX, auto_map, check_version, compressed_class

REPORT_NAME = "report.json"
MODELING_FILE = "modeling_modegpt.py"
LAYER_KEYS = ("rope_pairs", "qk_plain", "value_dim", "mlp_width")
"""What the config says of each layer."""


def compressed_config(
    dense: PreTrainedConfig, architecture: Architecture, layers: list[dict[str, int]]
) -> PreTrainedConfig:
    """Return the compressed model's config: the dense fields, and the key `modegpt`.

    Args:
        dense: the dense model's config.
        architecture: its family; written into the key so that the checkpoint describes itself.
        layers: for each layer `rope_pairs`, `qk_plain`, `value_dim` and `mlp_width`.
    """
    fields = dense.to_dict()
    for stale in ("model_type", "architectures", "auto_map", "quantization_config", "_name_or_path"):
        fields.pop(stale, None)
    config = compressed_class(f"{architecture.name}Config").from_dict(fields)  # pyright: ignore[reportAttributeAccessIssue]
    config.modegpt = {"version": FORMAT_VERSION, "architecture": architecture.describe(), "layers": layers}
    config.architectures = [PREFIX + architecture.causal_class]
    config.auto_map = auto_map(config)
    return config


def check_description(description: Any, n_layers: int, name: str | Path) -> None:
    """Raise `InputError` unless the key `modegpt` of a config says all that a reader needs, in a version known here.

    Args:
        description: the key's value; of more layers than the model has, which someone took some from, the first count.
        n_layers: of the model.
        name: what is read.
    """
    try:
        check_version(description)
        said = len(description["layers"]) >= n_layers and isinstance(description["architecture"]["layers"], str)
        for layer in description["layers"]:
            said = said and all(isinstance(layer[key], int) for key in LAYER_KEYS)
    except ValueError as problem:
        raise InputError(f"'{name}' cannot be read: {problem}") from problem
    except (KeyError, TypeError):
        said = False
    if not said:
        raise InputError(f"the key 'modegpt' in the config of '{name}' is broken: copy the checkpoint again")


def build(config: PreTrainedConfig, state: dict[str, Tensor]) -> PreTrainedModel:
    """Put a compressed causal language model together from its config and its tensors, which it takes over."""
    return assemble(compressed_class(config.architectures[0].removeprefix(PREFIX)), config, state)  # pyright: ignore[reportOptionalSubscript]


def assemble(model_class: Any, config: PreTrainedConfig, state: dict[str, Tensor]) -> PreTrainedModel:
    """Make a model of a class from its config and its tensors, which it takes over, in the config's dtype."""
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=config.dtype).eval()
    # transformers makes the text "None" of the missing name, and PEFT would write that into its adapters.
    model.name_or_path = model.config.name_or_path = ""
    return model


def check_output(
    out: str | Path, overwrite: bool, model: str | Path | None = None, text: str | Path | None = None
) -> None:
    """Raise `InputError` if `out` exists and may not or cannot be replaced, or holds the model or text that is read."""
    path = Path(out)
    if _leads_nowhere(path):
        raise InputError(f"output '{out}' leads through a link that points back to itself: choose another folder")
    if path.is_file():
        raise InputError(f"output '{out}' is a file; give a folder name")
    for what, read in (("model", model), ("calibration text", text)):
        if read is not None and holds(path, Path(read)):
            raise InputError(f"output '{out}' holds the {what} '{read}' and would replace it: choose another folder")
    if holds(path, Path.cwd()):
        raise InputError(f"output '{out}' is or holds the folder that the call is made in: choose another")
    if path.resolve().is_mount():  # the last step, a rename, would be refused after all the work
        raise InputError(f"output '{out}' is a mount point, which cannot be replaced: give a folder inside it")
    if path.exists() and not overwrite:
        raise InputError(f"output folder '{out}' exists; choose another, or add --overwrite to replace it")
    if path.exists() and not os.access(path, os.W_OK | os.X_OK):  # a folder that is moved must be writable itself
        raise InputError(f"output folder '{out}' cannot be written to, so it cannot be replaced: choose another")
    own = ("config.json", REPORT_NAME, MODELING_FILE)  # a broken result may lack one of them
    if path.is_dir() and any(path.iterdir()) and not any((path / name).exists() for name in own):
        raise InputError(
            f"output folder '{out}' holds other things than a model, and --overwrite would delete them: choose another "
            "folder, or remove this one"
        )


def check_apart(out: Path, files: Mapping[str, Entry]) -> None:
    """Raise `InputError` if a file of the weights that are read lies in `out`, wherever links lead."""
    for path in dict.fromkeys(entry.path for entry in files.values()):
        if holds(out, path) or holds(out, path.parent):
            raise InputError(f"output '{out}' holds '{path}', which the model is read from: choose another folder")


def holds(folder: Path, other: Path) -> bool:
    """Whether something that exists is a folder, or in it, wherever links lead."""
    return other.exists() and other.resolve().is_relative_to(folder.resolve())


def _leads_nowhere(path: Path) -> bool:
    """Whether the links on the way to a path end in a circle."""
    try:
        path.stat()
    except OSError as problem:
        return problem.errno == errno.ELOOP
    return False


def modeling_source() -> bytes:
    """Return the modeling file that is shipped inside a checkpoint."""
    return Path(modeling_modegpt.__file__).read_bytes()


def write_weights(
    entries: Mapping[str, Entry], folder: Path, put: Callable[[dict[str, Entry], Path], None] = merge
) -> None:
    """Write tensors to one file, or, where that would be too large, to one for each that they are read from.

    Args:
        entries: by their names in the result.
        folder: of the checkpoint.
        put: writes the tensors of one file to one of several.
    """
    total = sum(entry.size for entry in entries.values())
    if total <= MAX_FILE_BYTES:
        merge(dict(entries), folder / SINGLE)
        return
    sources = list(dict.fromkeys(entry.path for entry in entries.values()))
    names = {path: f"model-{i + 1:05d}-of-{len(sources):05d}.safetensors" for i, path in enumerate(sources)}
    for path, file in names.items():
        put({name: entry for name, entry in entries.items() if entry.path == path}, folder / file)
    weight_map = {name: names[entry.path] for name, entry in sorted(entries.items())}
    write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that this package wrote.

    Raises:
        InputError: it has been cut or edited so that it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise InputError(f"'{path}' is broken ({problem}): remove it") from problem
    if not isinstance(found, dict):
        raise InputError(f"'{path}' is something else than this program wrote: remove it")
    return found


def json_text(data: Any) -> str:
    """Return JSON of some values; null for a number that is infinite or NaN, of which JSON has none."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(data), indent=2, allow_nan=False)


def read_number(value: float | None) -> float:
    """Return a loss or perplexity that `json_text` wrote: null stands for infinity."""
    return math.inf if value is None else value


def write_json(data: dict[str, Any], path: str | Path) -> None:
    """Write JSON as a file that is whole or not there, see `write_whole`."""
    write_whole(json_text(data) + "\n", path)
