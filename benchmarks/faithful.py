"""Perplexity of the paper's solvers at uniform 25 %, each module alone and all together, on SmolLM2-135M.

At 25 % every rank of this model is a whole number, so an independent implementation must agree. Protocol: float32,
calibrated on the first 16 windows of 512 tokens of WikiText-2's validation text, evaluated on the first 12 windows of
512 tokens of its test text.

    python benchmarks/faithful.py --data FOLDER
"""

from typing import Any

import modegpt
from common import SEQ_LEN, model_name, opened, parser, run
from result_file import Results

VARIANTS = {"mlp": ("mlp",), "query-key": ("qk",), "value-output": ("vo",), "all": ("mlp", "qk", "vo")}
SPARSITY, SAMPLES, EVAL_WINDOWS = 0.25, 16, 12


def main() -> None:
    """Compress each module, then all, and measure what is not in the result file yet."""
    options = parser(__doc__, "faithful.json").parse_args()
    protocol = {
        "sparsity": SPARSITY,
        "solver": "paper",
        "allocation": "uniform",
        "dtype": "float32",
        "calibration": f"wiki.valid.txt, first {SAMPLES} x {SEQ_LEN} tokens",
        "evaluation": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
    }
    results = Results(options.json, {"model": model_name(options), "protocol": protocol})
    dense, _tokenizer, windows, _valid, test = opened(options, SAMPLES)
    for label, modules in {"dense": None, **VARIANTS}.items():
        if results.has({"modules": label}):
            continue
        model, about = dense, {}
        if modules is not None:
            config = modegpt.CompressionConfig(
                sparsity=SPARSITY, solver="paper", modules=modules, samples=SAMPLES, seq_len=SEQ_LEN
            )
            model = modegpt.compress(dense, windows, config)
            report = model.modegpt_report
            about = {key: report[key] for key in ("sparsity", "seconds")} | {"ranks": report["layers"][0]["ranks"]}
        perplexity = modegpt.perplexity(model, test, SEQ_LEN, EVAL_WINDOWS).perplexity
        row: dict[str, Any] = {"modules": label, "perplexity": perplexity, **about}
        results.add(row)


if __name__ == "__main__":
    run(main)
