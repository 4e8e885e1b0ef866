"""The data sets known by name: four on the Hugging Face hub, and the language reference that ships with Python."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import InputError, MissingExtraError

SPLITS = ("calibration", "evaluation")
PYTHON_DOCS = "python-docs"
RECORD_SEPARATOR = "\n\n"

_HOLD_OUT_EVERY = 10
_TOPIC_STRIDE = 5
_SHARED_RUN_WORDS = 8


@dataclass(frozen=True)
class HubData:
    """Where a data set stands on the hub, and which of its splits serves which purpose."""

    path: str
    calibration: str
    """The hub's split (or slice of one) for calibration."""
    evaluation: str | None
    """That for evaluation; None where the hub has one split only, of which every tenth record is then held out."""
    name: str | None = None
    text_field: str = "text"
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `datasets.load_dataset`."""


HUB = {
    "wikitext2": HubData("Salesforce/wikitext", "train", "test", name="wikitext-2-raw-v1"),
    # The hub's main branch holds a loading script, which `datasets` no longer runs; its converted files do load.
    "ptb": HubData(
        "ptb-text-only/ptb_text_only",
        "train",
        "test",
        text_field="sentence",
        options={
            "revision": "refs/convert/parquet",
            "data_files": {s: f"penn_treebank/{s}/*.parquet" for s in ("train", "test")},
        },
    ),
    # One shard of each split, and of it the first 20,000 documents (about ten million tokens): a whole shard is
    # 800 MB of text, which would be tokenised for the sake of some hundred windows.
    "c4": HubData(
        "allenai/c4",
        "train[:20000]",
        "validation[:20000]",
        options={
            "data_files": {
                "train": "en/c4-train.00000-of-01024.json.gz",
                "validation": "en/c4-validation.00000-of-00008.json.gz",
            },
            # The data set's own record counts are those of all shards, and would be held against this one.
            "verification_mode": "no_checks",
        },
    ),
    "alpaca": HubData("tatsu-lab/alpaca", "train", None),
}

KNOWN = (*HUB, PYTHON_DOCS)


def check_known(source: str) -> None:
    """Raise `MissingExtraError` or `InputError` when the known data set `source` cannot be had on this machine."""
    if source == PYTHON_DOCS:
        _python_topics()
    elif importlib.util.find_spec("datasets") is None:
        raise MissingExtraError(f"the data set '{source}'", "datasets", "data")


def known_text(source: str, split: str) -> str:
    """Return one split of a known data set as one text."""
    check_known(source)
    if source == PYTHON_DOCS:
        return python_docs(_python_topics(), split)
    return hub_text(source, HUB[source], split)


def hub_text(label: str, data: HubData, split: str) -> str:
    """Download (or take from the cache) one split of a hub data set; its records are joined by blank lines.

    Raises:
        InputError: the hub cannot be reached and the cache does not hold the data.
    """
    import datasets

    part = data.evaluation if split == "evaluation" and data.evaluation else data.calibration
    try:
        records = datasets.load_dataset(data.path, data.name, split=part, **data.options)[data.text_field]
    # What a failing download raises differs by release of three libraries (and some of it derives from nothing
    # common), so whatever came is named in the message and kept as the cause.
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"the data set '{label}' ({data.path}) could not be loaded from the Hugging Face hub"
            f" ({type(error).__name__}: {reason}); without a network give a local .txt, .jsonl, .json or .parquet"
            f" file, or '{PYTHON_DOCS}'"
        ) from error
    return RECORD_SEPARATOR.join(records if data.evaluation else hold_out(records, split))


def hold_out(records: Iterable[str], split: str) -> list[str]:
    """Divide records: every tenth is for evaluation, and calibration has the others that no held-out one repeats."""
    records = list(records)
    held = records[_HOLD_OUT_EVERY - 1 :: _HOLD_OUT_EVERY]
    if split == "evaluation":
        return held
    repeated = set(held)
    return [record for record in records if record not in repeated]


def python_docs(topics: dict[str, str], split: str) -> str:
    """Return one split of the language reference.

    Every fifth topic by name is for evaluation. The topics quote each other (`compound` holds all of `if`), so a
    paragraph of the others goes to calibration only when it shares no run of eight words with an evaluation topic.
    """
    names = sorted(topics)
    evaluation = names[::_TOPIC_STRIDE]
    if split == "evaluation":
        return RECORD_SEPARATOR.join(topics[name].strip() for name in evaluation)
    held = set().union(*(_runs(paragraph) for name in evaluation for paragraph in topics[name].split("\n\n")))
    paragraphs = (p for name in names if name not in evaluation for p in topics[name].strip().split("\n\n"))
    return RECORD_SEPARATOR.join(p for p in paragraphs if held.isdisjoint(_runs(p)))


def _runs(paragraph: str) -> set[tuple[str, ...]]:
    """Return every run of eight words, or the whole of a shorter paragraph, whatever its line breaks."""
    words = paragraph.split()
    return {tuple(words[i : i + _SHARED_RUN_WORDS]) for i in range(max(1, len(words) - _SHARED_RUN_WORDS + 1))}


def _python_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise InputError(
            f"'{PYTHON_DOCS}' is not on this machine: this Python came without its module 'pydoc_data';"
            " give a local .txt, .jsonl, .json or .parquet file"
        ) from error
    return topics
