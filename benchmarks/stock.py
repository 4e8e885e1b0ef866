"""What stock classes can hold: one MLP width in all layers, written by `modegpt export`, and how llama.cpp runs it.

Protocol: `best`, the rule `width` in multiples of 32, float32, calibrated on the first 32 windows of 512 tokens of
WikiText-2's validation text; perplexity of the exported model, in transformers' own class, on the first 48 windows of
512 tokens of the test text. With `--converter` the dense and the exported models are converted to GGUF in 8 bits and
run by llama.cpp on the same machine: perplexity of the first windows, and prompts and decoding in turn, medians.

    pip install llama-cpp-python sentencepiece       # for --converter
    python benchmarks/stock.py --data FOLDER --converter llama.cpp/convert_hf_to_gguf.py
"""

import math
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import modegpt
from common import CALIBRATION, SEQ_LEN, add_cache, add_sparsities, compressed, model_name, opened, parser, run
from result_file import save

EVAL_WINDOWS, GGUF_WINDOWS = 48, 8
ROUND_TO = 32
"""What blocks of llama.cpp's 8-bit weights are long."""
ROUNDS, NEW_TOKENS = 21, 64


def main() -> None:
    """Compress to one width at every sparsity, export, and measure what came out."""
    arguments = parser(__doc__, "stock.json")
    add_cache(arguments)
    add_sparsities(arguments, 0.1, 0.2, 0.3)
    arguments.add_argument("--converter", type=Path, default=None, help="llama.cpp's convert_hf_to_gguf.py")
    options = arguments.parse_args()
    dense, tokenizer, windows, _valid, test = opened(options)
    with tempfile.TemporaryDirectory() as folder:
        rows, files = [], []
        for sparsity in (0.0, *options.sparsity):
            config = modegpt.CompressionConfig(sparsity=sparsity, allocation="width", round_to=ROUND_TO)
            model = dense if sparsity == 0 else compressed(options, dense, windows, config)
            path = Path(folder) / f"stock-{round(100 * sparsity)}"
            row = {"sparsity": sparsity, **exported(model, path, test)}
            tokenizer.save_pretrained(path)
            if options.converter is not None:
                files.append(convert(path, options.converter))
                row["gguf_bytes"] = files[-1].stat().st_size
            rows.append(row)
            print(row, flush=True)
        if files:
            for row, figures in zip(rows, in_llama_cpp(files, test[: GGUF_WINDOWS * SEQ_LEN]), strict=True):
                row["llama_cpp"] = figures
                print(row, flush=True)
    protocol = {
        "solver": "best",
        "allocation": f"width, multiples of {ROUND_TO}",
        "dtype": "float32",
        "calibration": CALIBRATION,
        "test": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
        "llama_cpp": {
            "version": version("llama-cpp-python"),
            "weights": "Q8_0",
            "perplexity": f"first {GGUF_WINDOWS} of these windows",
            "prompt": SEQ_LEN,
            "decoded": NEW_TOKENS,
            "rounds": ROUNDS,
        }
        if files
        else None,
    }
    save(options.json, {"model": model_name(options), "protocol": protocol, "rows": rows})


def exported(model: Any, path: Path, test: Tensor) -> dict[str, Any]:
    """Save a dense model, or what a compressed one becomes, and measure it as transformers' own class opens it."""
    report = getattr(model, "modegpt_report", None)
    stock: PreTrainedModel = model if report is None else modegpt.stock_model(model)
    stock.save_pretrained(path)
    opened = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    row = {
        "class": type(opened).__name__,
        "mlp_width": opened.config.intermediate_size,
        "parameters": opened.num_parameters(),
        "perplexity": modegpt.perplexity(opened, test, SEQ_LEN, EVAL_WINDOWS).perplexity,
    }
    if report is not None:
        with torch.no_grad():
            tokens = test[None, :SEQ_LEN]
            ours, theirs = model(tokens).logits, opened(tokens).logits
        row |= {
            "achieved": report["sparsity"],
            "zeros": opened.num_parameters() - model.num_parameters(),
            "logits_differ_by": (ours - theirs).abs().max().item() / ours.abs().max().item(),
        }
    return row


def convert(path: Path, converter: Path) -> Path:
    """Convert a folder to GGUF."""
    out = path.with_suffix(".gguf")
    command = [sys.executable, str(converter), str(path), "--outfile", str(out), "--outtype", "q8_0"]
    subprocess.run(command, check=True, capture_output=True)
    return out


def in_llama_cpp(files: list[Path], text: Tensor) -> list[dict[str, float]]:
    """Return perplexity and tokens per second of each file, prompts and decoding in turn."""
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    windows = text.view(-1, SEQ_LEN).tolist()

    def opened(file: Path, all_logits: bool) -> Any:
        return Llama(str(file), n_ctx=SEQ_LEN + NEW_TOKENS, n_batch=SEQ_LEN, n_threads=threads, verbose=False,
                     n_threads_batch=threads, logits_all=all_logits)  # fmt: skip

    perplexities = []
    for file in files:
        model = opened(file, all_logits=True)
        perplexities.append(math.exp(sum(nats(model, window) for window in windows) / len(windows)))
        model.close()
    models = [opened(file, all_logits=False) for file in files]  # a prompt's last token alone needs the head
    prompts: list[list[float]] = [[] for _ in models]
    decoded: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS + 1):
        for model, prompt, decode in zip(models, prompts, decoded, strict=True):
            model.reset()
            start = time.perf_counter()
            model.eval(windows[0])
            prompt.append(SEQ_LEN / (time.perf_counter() - start))
            start = time.perf_counter()
            for token in windows[1][:NEW_TOKENS]:
                model.eval([token])
            decode.append(NEW_TOKENS / (time.perf_counter() - start))
    # The first round warms up.
    return [
        {"perplexity": perplexity, "prompt_tokens_per_s": median(prompt[1:]), "decode_tokens_per_s": median(decode[1:])}
        for perplexity, prompt, decode in zip(perplexities, prompts, decoded, strict=True)
    ]


def nats(model: Any, window: list[int]) -> float:
    """Return the mean negative log-likelihood of a window's tokens but the first."""
    model.reset()
    model.eval(window)
    logits = torch.from_numpy(model.scores[: len(window) - 1].copy())
    return torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:])).item()


if __name__ == "__main__":
    run(main)
