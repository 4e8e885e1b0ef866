"""What every benchmark shares: the demo model, and figures written as JSON beside the protocol that gave them."""

import argparse
from pathlib import Path
from typing import Any

from torch import Tensor

from modegpt.calibration import load_text, tokenize
from modegpt.checkpoint import write_json
from modegpt.demo import model_file
from modegpt.report import protocol

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks: the model, the text folder and the result file."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--model", default=None, help="hub name, folder or .gguf (default: SmolLM2-135M-Instruct)")
    arguments.add_argument("--data", type=Path, default=None, help="folder with wiki.valid.txt and wiki.test.raw")
    arguments.add_argument("--json", type=Path, default=RESULTS / result)
    return arguments


def default_model(name: str | None) -> str:
    """Return `name`, or the path of the demo model."""
    return name or str(model_file())


def wikitext(options: argparse.Namespace, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens of the validation and of the test text."""
    folder = options.data or Path("data")
    valid, test = (load_text(str(folder / file), "evaluation") for file in ("wiki.valid.txt", "wiki.test.raw"))
    return tokenize(valid, tokenizer), tokenize(test, tokenizer)


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures with command, versions and machine beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = protocol()
    about["command"] = "python " + about["command"]
    write_json({**about, **figures}, path)
    print(f"wrote {path}")
