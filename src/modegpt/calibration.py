"""Text to token windows: data sets known by name, local files, the built-in text."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .architectures import ARCHITECTURES
from .datasets_known import KNOWN, PYTHON_DOCS, RECORD_SEPARATOR, SPLITS, check_known, known_text
from .errors import InputError, MissingExtraError
from .modeling_modegpt import MODEL_TYPE_PREFIX

TEXT_KEYS = ("text", "content", "sentence")
ALPACA_KEYS = ("instruction", "input", "output")

_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}"
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n{output}"
)


def check_source(source: str) -> None:
    """Check that a data set or file can be used, before a model is loaded.

    A local file is read whole; of a hub data set only the package that loads it is looked for.

    Raises:
        InputError: the name is unknown, or the file is missing, empty or unreadable.
        MissingExtraError: a package that reading it needs is absent.
    """
    if source in KNOWN:
        check_known(source)
    else:
        _file_text(source)


def load_text(source: str, split: str) -> str:
    """Return the text of a source.

    Args:
        source: a known data set or a `.txt` (or `.raw`), `.jsonl`, `.json` or `.parquet` file.
        split: `calibration` or `evaluation`. Known data sets share no text between the two; a file is one text, the
            same for both.

    Raises:
        InputError: as `check_source`, or the hub cannot be reached.
    """
    if split not in SPLITS:
        raise InputError(f"split '{split}' is unknown; give one of {', '.join(SPLITS)}")
    return known_text(source, split) if source in KNOWN else _file_text(source)


def tokenize(text: str, tokenizer: Any) -> Tensor:
    """Return the `(n_tokens,)` ids of a text tokenised whole, without added special tokens."""
    # verbose=False: the whole text is meant to be longer than the model's window; a warning of it would mislead.
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def start_token(config: Any, tokenizer: Any) -> int | None:
    """Return the token with which every window must begin for a dense or compressed model; None for most families."""
    family = ARCHITECTURES.get(config.model_type.removeprefix(MODEL_TYPE_PREFIX))
    return tokenizer.bos_token_id if family is not None and family.start_token else None


def begin_windows(tokens: Tensor, seq_len: int, start: int | None) -> Tensor:
    """Return the text with `start` before every `seq_len - 1` tokens, so that windows of `seq_len` begin with it.

    Args:
        tokens: `(n_tokens,)` ids; what is left after the last whole window is dropped.
        seq_len: tokens of a window.
        start: the token, or None to return the text as it is.
    """
    if start is None:
        return tokens
    rows = tokens[: len(tokens) // (seq_len - 1) * (seq_len - 1)].view(-1, seq_len - 1)
    return torch.cat((rows.new_full((len(rows), 1), start), rows), dim=1).flatten()


def draw_windows(tokens: Tensor, samples: int, seq_len: int, sampling: str, seed: int, source: str) -> Tensor:
    """Cut windows that do not overlap out of a text.

    Args:
        tokens: `(n_tokens,)` ids.
        samples: windows to draw.
        seq_len: tokens of each.
        sampling: `sequential`, one after another from the start; or `random`, where the tokens left over are dealt at
            random to the gaps between windows. The global random state is neither read nor changed.
        seed: of `random`.
        source: what the text is called in messages.

    Returns:
        `(samples, seq_len)` ids, in the order of the text.

    Raises:
        InputError: the text is too short; the message says what would fit.
    """
    if samples < 1 or seq_len < 1:
        raise InputError(f"{samples} samples of {seq_len} tokens were asked for; both must be at least 1")
    if sampling not in ("random", "sequential"):
        raise InputError(f"sampling '{sampling}' is unknown; give random or sequential")
    slack = len(tokens) - samples * seq_len
    if slack < 0:
        raise InputError(_too_short(len(tokens), samples, seq_len, source))
    starts = torch.arange(samples) * seq_len
    if sampling == "random":
        generator = torch.Generator().manual_seed(seed)
        starts += torch.randint(slack + 1, (samples,), generator=generator).sort().values
    return tokens[starts[:, None] + torch.arange(seq_len)]


def _too_short(n_tokens: int, samples: int, seq_len: int, source: str) -> str:
    fits = []
    if n_tokens >= seq_len:
        fits.append(f"--samples {n_tokens // seq_len}")
    if n_tokens >= samples:
        fits.append(f"--seq-len {n_tokens // samples}")
    if not fits and n_tokens:
        fits.append(f"--samples 1 --seq-len {n_tokens}")
    return (
        f"'{source}' has {n_tokens} tokens, but {samples} windows of {seq_len} need {samples * seq_len};"
        f" give {' or '.join([*fits, 'a longer text'])}"
    )


def _file_text(source: str) -> str:
    """Read a local file, and check that there is text in it."""
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"data '{source}' is neither a known name ({', '.join(KNOWN)}) nor {_FILE_KINDS}")
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"data file '{source}' {what}; give {_FILE_KINDS}, or one of {', '.join(KNOWN)}")
    try:
        text = reader(path)
        text.encode()  # JSON can hold half of a surrogate pair, which no tokenizer takes
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"data file '{source}' is not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    except OSError as error:
        raise InputError(f"data file '{source}' cannot be read ({error.strerror or error}); check it") from error
    if "\0" in text:
        raise InputError(f"data file '{source}' is binary, not text; give {_FILE_KINDS}")
    if not text.strip():
        raise InputError(f"data file '{source}' is empty; give a file with text, or '{PYTHON_DOCS}'")
    return text


def _read_txt(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _read_jsonl(path: Path) -> str:
    texts = []
    # Not splitlines(): it also breaks at characters that JSON strings may hold as they are, U+2028 for one.
    for number, line in enumerate(_read_txt(path).split("\n"), start=1):
        if line.strip():
            where = f"line {number} of '{path}'"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where} is not JSON ({error}); give one record a line") from error
            texts.append(_record_text(record, where))
    return RECORD_SEPARATOR.join(texts)


def _read_json(path: Path) -> str:
    text = _read_txt(path)
    if not text.strip():
        return ""
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        more = "; for one record a line, name it .jsonl" if error.msg == "Extra data" else ""
        raise InputError(f"line {error.lineno} of '{path}' is not JSON ({error.msg}){more}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{path}' is not JSON that can be read ({error})") from error
    if not isinstance(records, list):
        raise InputError(f"'{path}' holds a JSON {_kind(records)}; give a list of records or of strings")
    texts = (_record_text(record, f"record {number} of '{path}'") for number, record in enumerate(records, start=1))
    return RECORD_SEPARATOR.join(texts)


def _read_parquet(path: Path) -> str:
    if not path.stat().st_size:
        return ""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError(f"reading '{path}'", "pyarrow", "data")
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        wanted = next(([key] for key in TEXT_KEYS if key in names), [key for key in ALPACA_KEYS if key in names])
        records = pyarrow.parquet.read_table(path, columns=wanted or names).to_pylist()
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"'{path}' is not a parquet file that can be read ({reason}); check it") from error
    texts = (_record_text(record, f"record {number} of '{path}'") for number, record in enumerate(records, start=1))
    return RECORD_SEPARATOR.join(texts)


def _record_text(record: Any, where: str) -> str:
    """Return the text of one record; Alpaca-style ones become the Alpaca prompt with its answer."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise InputError(f"{where} is a JSON {_kind(record)}; give objects or strings")
    key = next((key for key in TEXT_KEYS if key in record), None)
    if key is not None:
        return _text_field(record, key, where)
    if "instruction" in record and "output" in record:
        fields = {key: _text_field(record, key, where) for key in ("instruction", "output")}
        # A record without context has an empty input, or null, or none.
        if record.get("input"):
            return _ALPACA_WITH_INPUT.format(**fields, input=_text_field(record, "input", where))
        return _ALPACA_WITHOUT_INPUT.format(**fields)
    found = ", ".join(map(str, record)) or "none"
    raise InputError(f"{where} has the keys {found}; give one of {', '.join(TEXT_KEYS)}, or instruction and output")


def _text_field(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise InputError(f"{where} holds a JSON {_kind(value)} under '{key}'; give text")
    return value


def _kind(value: Any) -> str:
    """Return what JSON calls the type of a value."""
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)


_READERS: dict[str, Callable[[Path], str]] = {
    ".txt": _read_txt,
    ".raw": _read_txt,  # as WikiText's own files are called
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
_FILE_KINDS = "a .txt, .jsonl, .json or .parquet file"
