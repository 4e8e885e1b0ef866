"""What benchmarks share: the demo model and the texts, their options, and compressed models that are kept."""

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import modegpt
from modegpt.calibration import draw_windows, load_text, tokenize
from modegpt.commands.demo import model_file
from modegpt.config import PRESETS
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer
from result_file import RESULTS

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
    """Return a parser with what most benchmarks are told: the model, the folder of the texts and the result file."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default=None, help="hub name, folder or .gguf (default: SmolLM2-135M-Instruct)")
    arguments.add_argument("--data", type=Path, default=Path("data"), help="has wiki.valid.txt and wiki.test.raw")
    arguments.add_argument("--json", type=Path, default=RESULTS / result)
    return arguments


def add_cache(arguments: argparse.ArgumentParser) -> None:
    """Add the option `--cache`, which `compressed` reads."""
    arguments.add_argument("--cache", type=Path, help="keep compressed models there, for other benchmarks")


def add_sparsities(arguments: argparse.ArgumentParser, *default: float) -> None:
    """Add the option `--sparsity`, of several shares."""
    arguments.add_argument("--sparsity", type=share, nargs="*", default=list(default))


def add_grid(arguments: argparse.ArgumentParser) -> None:
    """Add the options `--sparsity`, `--solver`, `--seed` and `--cache`: of rows for each of the two sets of solvers."""
    add_sparsities(arguments, 0.1, 0.2, 0.3, 0.4, 0.5)
    add_cache(arguments)
    arguments.add_argument("--solver", nargs="*", default=["paper", "best"], choices=PRESETS)
    told = "of what `best` and `error` draw: the text that the model writes, and noise"
    arguments.add_argument("--seed", type=int, nargs="*", default=[0], help=told)


def add_settings(arguments: argparse.ArgumentParser) -> None:
    """Add the option `--settings`: which models are compared."""
    told = "CompressionConfig, as JSON"
    arguments.add_argument("--settings", type=settings, nargs="+", required=True, help=told)


def share(text: str) -> float:
    """Read a sparsity."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share between 0 and 1")
    return value


def settings(text: str) -> dict[str, Any]:
    """Read settings, before anything is measured with others."""
    try:
        read = json.loads(text)
        modegpt.CompressionConfig(**read)
    except (ValueError, TypeError) as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem}") from problem
    return read


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; what is wrong with its call is told in one line."""
    try:
        main()
    except modegpt.ModegptError as problem:
        raise SystemExit(f"error: {problem}") from problem


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
    files = (options.data / name for name in ("wiki.valid.txt", "wiki.test.raw"))
    valid, test = (load_text(str(file), "evaluation") for file in files)
    return tokenize(valid, tokenizer), tokenize(test, tokenizer)


def opened(options: argparse.Namespace, samples: int = SAMPLES) -> Opened:
    """Open the model, its tokenizer and the texts."""
    name = default_model(options.model)
    dense, tokenizer = open_model(name, torch.float32), open_tokenizer(name)
    valid, test = wikitext(options, tokenizer)
    windows = draw_windows(valid, samples, SEQ_LEN, "sequential", 0, "wiki.valid.txt")
    return Opened(dense, tokenizer, windows, valid, test)


def compressed(options: argparse.Namespace, dense: Any, windows: Tensor, config: modegpt.CompressionConfig) -> Any:
    """Compress, or open what a benchmark left in `--cache` of the same weights, tokens, settings and source."""
    if options.cache is None:
        return modegpt.compress(dense, windows, config)
    sums = [weight.sum(dtype=torch.float64).item() for weight in dense.parameters()]
    key = json.dumps([config.as_dict(), dense.config.to_json_string(), sums, windows.tolist(), _source()])
    folder = options.cache / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.exists():
        options.cache.mkdir(parents=True, exist_ok=True)
        # What a killed benchmark left is begun anew: seconds of a run that went on are those of no run.
        return modegpt.compress(dense, windows, config, out=folder, overwrite=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.modegpt_report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return model


def _source() -> str:
    """Return a digest of this package's source, by which figures of another one are not taken for its own."""
    digest = hashlib.sha256()
    for file in sorted(Path(modegpt.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
