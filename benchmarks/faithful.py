"""Perplexity of the paper's solvers at uniform 25 %, each module alone and all together, on SmolLM2-135M.

At 25 % every rank of this model is a whole number, so an independent implementation must agree. Protocol: float32,
calibrated on the first 16 windows of 512 tokens of WikiText-2's validation text, evaluated on the first 12 windows of
512 tokens of its test text.

    python benchmarks/faithful.py --data FOLDER
"""

import torch

import modegpt
from common import SEQ_LEN, model_name, opened, parser, save

VARIANTS = {"mlp": ("mlp",), "query-key": ("qk",), "value-output": ("vo",), "all": ("mlp", "qk", "vo")}
SPARSITY, SAMPLES, EVAL_WINDOWS = 0.25, 16, 12


def main() -> None:
    options = parser(__doc__, "faithful.json").parse_args()
    dense, _tokenizer, windows, _valid, test = opened(options, SAMPLES)

    def perplexity(model: torch.nn.Module) -> float:
        return modegpt.perplexity(model, test, SEQ_LEN, EVAL_WINDOWS).perplexity

    rows = [{"modules": "dense", "perplexity": perplexity(dense)}]
    print(rows[-1])
    for label, modules in VARIANTS.items():
        config = modegpt.CompressionConfig(
            sparsity=SPARSITY, solver="paper", modules=modules, samples=SAMPLES, seq_len=SEQ_LEN
        )
        model = modegpt.compress(dense, windows, config)
        report = model.modegpt_report
        rows.append(
            {
                "modules": label,
                "perplexity": perplexity(model),
                "sparsity": report["sparsity"],
                "ranks": report["layers"][0]["ranks"],
                "seconds": report["seconds"],
            }
        )
        print(rows[-1])
    save(
        options.json,
        {
            "model": model_name(options),
            "protocol": {
                "sparsity": SPARSITY,
                "solver": "paper",
                "allocation": "uniform",
                "dtype": "float32",
                "calibration": f"wiki.valid.txt, first {SAMPLES} x {SEQ_LEN} tokens",
                "evaluation": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
            },
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
