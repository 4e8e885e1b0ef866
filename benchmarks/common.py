"""What every benchmark shares: the demo model, and figures written as JSON beside the protocol that gave them."""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import modegpt
from modegpt.calibration import draw_windows, load_text, tokenize
from modegpt.checkpoint import write_json
from modegpt.commands.demo import model_file
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer
from modegpt.report import protocol

RESULTS = Path(__file__).parent / "results"
SAMPLES, SEQ_LEN = 32, 512
CALIBRATION = f"wiki.valid.txt, first {SAMPLES} x {SEQ_LEN} tokens"
"""What most benchmarks calibrate on, as their protocols say it."""


class Opened(NamedTuple):
    """What a benchmark starts from."""

    dense: PreTrainedModel
    """In float32."""
    tokenizer: Any
    windows: Tensor
    """`(samples, SEQ_LEN)`: the first of the validation text."""
    valid: Tensor
    """All tokens of the validation text."""
    test: Tensor
    """All tokens of the test text."""


def parser(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks: the model, the text folder and the result file."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--model", default=None, help="hub name, folder or .gguf (default: SmolLM2-135M-Instruct)")
    arguments.add_argument("--data", type=Path, default=None, help="folder with wiki.valid.txt and wiki.test.raw")
    arguments.add_argument(
        "--cache", type=Path, default=None, help="keep compressed models there, for other benchmarks"
    )
    arguments.add_argument("--json", type=Path, default=RESULTS / result)
    return arguments


def add_seeds(arguments: argparse.ArgumentParser) -> None:
    """Add the option `--seed`, of one number or several."""
    told = "of what `best` and `error` draw: the text that the model writes, and noise"
    arguments.add_argument("--seed", type=int, nargs="*", default=[0], help=told)


def draws(solver: str, allocation: str) -> bool:
    """Whether a seed changes anything: the paper's solvers write nothing."""
    return solver != "paper" or allocation == "error"


def default_model(name: str | None) -> str:
    """Return `name`, or the path of the demo model."""
    return name or str(model_file())


def model_name(options: argparse.Namespace) -> str:
    """Return what result files call the model."""
    return Path(default_model(options.model)).name


def wikitext(options: argparse.Namespace, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens of the validation and of the test text."""
    folder = options.data or Path("data")
    valid, test = (load_text(str(folder / file), "evaluation") for file in ("wiki.valid.txt", "wiki.test.raw"))
    return tokenize(valid, tokenizer), tokenize(test, tokenizer)


def opened(options: argparse.Namespace, samples: int = SAMPLES) -> Opened:
    """Open the model, its tokenizer and the texts."""
    name = default_model(options.model)
    dense, tokenizer = open_model(name, torch.float32), open_tokenizer(name)
    valid, test = wikitext(options, tokenizer)
    windows = draw_windows(valid, samples, SEQ_LEN, "sequential", 0, "wiki.valid.txt")
    return Opened(dense, tokenizer, windows, valid, test)


def compressed(options: argparse.Namespace, dense: Any, windows: Tensor, config: modegpt.CompressionConfig) -> Any:
    """Compress, or open what an earlier benchmark with the same settings and tokens left in `--cache`."""
    if options.cache is None:
        return modegpt.compress(dense, windows, config)
    key = json.dumps([config.as_dict(), dense.config._name_or_path, windows.tolist()])
    folder = options.cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.exists():
        options.cache.mkdir(parents=True, exist_ok=True)
        # What a killed benchmark left is begun anew: seconds of a run that went on are those of no run.
        return modegpt.compress(dense, windows, config, out=folder, overwrite=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.modegpt_report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return model


def finished(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that an earlier run of the same protocol left."""
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if {key: found[key] for key in about} != about:
        raise SystemExit(f"{path} was measured under another protocol; move it away, or give another --json")
    return found["rows"]


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures with command, versions and machine beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = protocol()
    # Where compressed models or finished rows are kept, or another program's source is, changes no figure.
    command = re.sub(r" --(?:cache|out)[ =]('[^']*'|\S+)", "", "python " + about["command"])
    about["command"] = re.sub(r"(--converter[ =])\S*/", r"\1llama.cpp/", command)
    write_json({**about, **figures}, path)
    print(f"wrote {path}")
