"""Perplexity of the four allocation rules at the same budget: which one spends parameters best, and where.

Protocol: the paper's solvers, float32, calibrated on the first 32 windows of 512 tokens of WikiText-2's validation
text. The rule to make the default is chosen on the rest of that text (`selection`); `test` is the first 12 windows of
the test text, on which nothing is chosen.

    python benchmarks/allocation.py --data FOLDER
"""

import torch

import modegpt
from common import CALIBRATION, SAMPLES, SEQ_LEN, add_cache, add_sparsities, compressed, model_name, opened, parser, run
from modegpt.config import PRESETS
from result_file import Results

RULES = ("uniform", "influence", "influence-blocks", "owl")
EVAL_WINDOWS = 12


def main() -> None:
    """Compress with every rule at every sparsity, and measure each on both texts."""
    arguments = parser(__doc__, "allocation.json")
    add_cache(arguments)
    add_sparsities(arguments, 0.2, 0.3, 0.4)
    arguments.add_argument("--solver", default="paper", choices=PRESETS)
    options = arguments.parse_args()
    protocol = {
        "solver": options.solver,
        "dtype": "float32",
        "calibration": CALIBRATION,
        "selection": f"the rest of wiki.valid.txt, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
        "test": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
    }
    results = Results(options.json, {"model": model_name(options), "protocol": protocol})
    dense, _tokenizer, windows, valid, test = opened(options)
    texts = {"selection": valid[SAMPLES * SEQ_LEN :], "test": test}

    def perplexities(model: torch.nn.Module) -> dict[str, float]:
        return {key: modegpt.perplexity(model, text, SEQ_LEN, EVAL_WINDOWS).perplexity for key, text in texts.items()}

    if not results.rows:
        results.add({"rule": "dense", "sparsity": 0.0, **perplexities(dense)})
    for sparsity in options.sparsity:
        for rule in RULES:
            known = {"rule": rule, "sparsity": sparsity}
            if results.has(known):
                continue
            config = modegpt.CompressionConfig(sparsity=sparsity, allocation=rule, solver=options.solver)
            model = compressed(options, dense, windows, config)
            report = model.modegpt_report
            shares = [layer["sparsity"] for layer in report["layers"]]
            row = {
                **known,
                **perplexities(model),
                "achieved": report["sparsity"],
                "temperature": report["allocation"]["temperature"],
                "layer_sparsity": {"min": min(shares), "max": max(shares)},
                "kv_bytes_share": sum(x["ranks"]["qk"] + x["ranks"]["vo"] for x in report["layers"])
                / (len(report["layers"]) * 2 * dense.config.head_dim),
                "seconds": report["seconds"]["total"],
            }
            results.add(row)


if __name__ == "__main__":
    run(main)
