"""Zero-shot tasks from local JSONL files: what a line must hold, and how lm-eval is told to score it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError

Record = dict[str, Any]


class Shape(NamedTuple):
    """One of the three kinds of record that a file may hold."""

    keys: tuple[str, ...]
    problem: Callable[[Record], str | None]
    """Says what is wrong with the values of a record that has the keys."""
    scoring: dict[str, Any]
    """What lm-eval's own task of this kind says in its configuration; all set the answer off by one space."""


class LocalTask(NamedTuple):
    """A file that was read and checked."""

    name: str
    path: Path
    shape: Shape
    records: list[Record]


def is_local(name: str) -> bool:
    """Whether an entry of `--tasks` means a file."""
    return name.endswith(".jsonl")


def read_task(source: str) -> LocalTask:
    """Read a task; its name is the file's, without `.jsonl`.

    Raises:
        InputError: the file is missing, empty, or a line of it is malformed; names the line.
    """
    path = Path(source)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"task file '{source}' {what}; give a .jsonl file, or the name of one of lm-eval's tasks")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"task file '{source}' is not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    shape, records = None, []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"line {number} of task file '{source}'"
            record = _object(line, where)
            shape = shape or _shape(record, where)
            records.append(_checked(record, shape, where))
    if 2 * sum(map(_is_set_off, records)) > len(records):  # a few are the text's own
        raise InputError(
            f"most answers of task file '{source}' begin with a space, which is put before each of them anyway and "
            "would be there twice: leave it out"
        )
    if shape is None:
        raise InputError(f"task file '{source}' is empty; give one JSON object a line, {_ALLOWED}")
    return LocalTask(path.name.removesuffix(".jsonl"), path, shape, records)


def _is_set_off(record: Record) -> bool:
    """Whether an answer of a record begins with a space."""
    answers = [*record.get("choices", ()), record.get("continuation", "")]
    return any(answer[:1].isspace() for answer in answers)


def _object(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # JSON can hold half of a surrogate pair; no tokenizer does
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON ({error}); give one object a line, {_ALLOWED}") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is not a JSON object; give one a line, {_ALLOWED}")
    return record


def _shape(record: Record, where: str) -> Shape:
    shape = next((shape for shape in SHAPES if record.keys() >= set(shape.keys)), None)
    if shape is None:
        raise InputError(f"{where} has the keys {', '.join(record) or 'none'}; give objects {_ALLOWED}")
    return shape


def _checked(record: Record, shape: Shape, where: str) -> Record:
    """Return what the shape needs of a record, with answers in a range and texts that can be scored."""
    missing = [key for key in shape.keys if key not in record]
    if missing:
        raise InputError(f"{where} lacks '{missing[0]}'; every line must have the keys {', '.join(shape.keys)}")
    problem = shape.problem(record)
    if problem is not None:
        raise InputError(f"{where}: {problem}")
    return {key: record[key] for key in shape.keys}


def _bad_text(record: Record, key: str) -> str | None:
    value = record[key]
    return None if isinstance(value, str) and value.strip() else f"'{key}' must be text that is not blank"


def _bad_answers(record: Record, key: str) -> str | None:
    texts, gold = record[key], record["gold"]
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(t, str) and t.strip() for t in texts):
        return f"'{key}' must be a list of at least two texts that are not blank"
    if type(gold) is not int or not 0 <= gold < len(texts):
        return f"'gold' is {json.dumps(gold)}; give the number of the right one of '{key}', from 0 to {len(texts) - 1}"
    return None


def _metrics(*names: str) -> list[Record]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


CHOICES = Shape(
    ("query", "choices", "gold"),
    lambda record: _bad_text(record, "query") or _bad_answers(record, "choices"),
    {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": _metrics("acc", "acc_norm"),
    },
)
"""As arc_easy: each choice as a continuation of the query."""

# lm-eval's convention for such tasks: the "text" is the number of the right context, the "target" what follows it.
CONTEXTS = Shape(
    ("contexts", "continuation", "gold"),
    lambda record: _bad_text(record, "continuation") or _bad_answers(record, "contexts"),
    {
        "output_type": "multiple_choice",
        "doc_to_text": "gold",
        "doc_to_choice": "contexts",
        "doc_to_target": "continuation",
        "metric_list": _metrics("acc"),
    },
)
"""As winogrande: one continuation after each context."""

GREEDY = Shape(
    ("context", "continuation"),
    lambda record: _bad_text(record, "context") or _bad_text(record, "continuation"),
    {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": _metrics("acc"),
    },
)
"""As lambada_openai: whether the continuation is what greedy decoding gives."""

SHAPES = (CHOICES, CONTEXTS, GREEDY)
_ALLOWED = "with the keys " + "; or ".join(", ".join(shape.keys) for shape in SHAPES)
