"""The paper's solvers against the best, at the same sizes: perplexity by sparsity, and that of dropping whole layers.

Protocol: SmolLM2-135M, float32, calibrated on the first 32 windows of 512 tokens of WikiText-2's validation text, or of
another, reported on the first 48 windows of the test text. No setting was chosen on the test text. Blocks are scored
once for all sparsities; `scoring_seconds` is what that took. Every row is written when it is done; the same command
goes on where it was stopped.

    python benchmarks/solvers.py --data FOLDER
    python benchmarks/solvers.py --data FOLDER --allocation error
    python benchmarks/solvers.py --data FOLDER --sparsity 0.2 --parts mlp qk vo
    python benchmarks/solvers.py --data FOLDER --sparsity 0.2 --calibration FILE --json FILE
    python benchmarks/solvers.py --data FOLDER --allocation uniform influence --solver best --seed 1 2 3 4
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import modegpt
from common import SAMPLES, SEQ_LEN, add_grid, compressed, draws, model_name, opened, parser, run
from modegpt.baselines import shortgpt
from modegpt.calibration import draw_windows, load_text, tokenize
from modegpt.comparing.scored import Scored
from modegpt.config import ALLOCATIONS
from result_file import Results

EVAL_WINDOWS = 48


def options() -> argparse.Namespace:
    """Return the command line's choices."""
    arguments = parser(__doc__, "solvers.json")
    add_grid(arguments)
    arguments.add_argument("--allocation", nargs="*", default=["uniform"], choices=ALLOCATIONS)
    parts = ("all", *modegpt.config.MODULES)
    arguments.add_argument("--parts", nargs="*", default=["all"], choices=parts, help="all, or modules alone")
    arguments.add_argument("--calibration", default=None, help="another text (default: wiki.valid.txt of --data)")
    return arguments.parse_args()


def wanted(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each row compares: dense, dropped layers, then every solver at every sparsity."""
    yield {"method": "dense", "sparsity": 0.0}
    for sparsity in asked.sparsity:
        if sparsity <= 0.3:
            yield {"method": "drop layers", "sparsity": sparsity}
    for allocation in asked.allocation:
        for sparsity in asked.sparsity:
            for part, solver in product(asked.parts, asked.solver):
                about = {"method": solver, "sparsity": sparsity, "allocation": allocation, "modules": part}
                for seed in asked.seed if draws(solver, allocation) else [0]:
                    yield {**about, "seed": seed}


def main() -> None:
    """Measure every row that is not in the result file yet."""
    asked = options()
    protocol = {
        "dtype": "float32",
        "calibration": f"{Path(asked.calibration or 'wiki.valid.txt').name}, first {SAMPLES} x {SEQ_LEN} tokens",
        "test": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
    }
    about = {"model": model_name(asked), "protocol": protocol}
    results = Results(asked.json, about)
    dense, tokenizer, windows, _valid, test = opened(asked)
    if asked.calibration is not None:
        tokens = tokenize(load_text(asked.calibration, "calibration"), tokenizer)
        windows = draw_windows(tokens, SAMPLES, SEQ_LEN, "sequential", 0, asked.calibration)
    scored = Scored(dense, windows)
    for row in wanted(asked):
        if results.has(row):
            continue
        if row["method"] == "dense":
            model = dense
        elif row["method"] == "drop layers":
            model = shortgpt.start(dense, windows, lambda _stage, _done, _total: None)(row["sparsity"]).model
        else:
            modules = modegpt.config.MODULES if row["modules"] == "all" else (row["modules"],)
            # A part alone loses the share of itself that all of them would: its blocks lose less.
            config = modegpt.CompressionConfig(
                sparsity=row["sparsity"],
                allocation=row["allocation"],
                solver=row["method"],
                modules=modules,
                seed=row["seed"],
            )
            config, _warnings, seconds = scored.plan(config)
            row |= {"scoring_seconds": seconds} if seconds else {}
            model = compressed(asked, dense, windows, config)
            report = model.modegpt_report
            row |= {"achieved": report["sparsity"], "seconds": report["seconds"]}
        row["perplexity"] = modegpt.perplexity(model, test, SEQ_LEN, EVAL_WINDOWS).perplexity
        results.add(row)


if __name__ == "__main__":
    run(main)
