"""This package's solvers and other training-free methods at the same sizes: `modegpt compare`, in the usual protocol.

Protocol: SmolLM2-135M, float32, calibrated on the first 32 windows of 512 tokens of WikiText-2's validation text,
reported on the first 48 windows of the test text. Nothing of the other methods was chosen on the test text. Rows are
kept in `--out` as they are done; the same command goes on where it was stopped. They take the place of those of the
same method and sparsity in the result file, where the others stay.

    python benchmarks/rivals.py --data FOLDER --out FOLDER --plot docs/images/methods.svg
"""

from pathlib import Path

import modegpt
from common import CALIBRATION, SAMPLES, SEQ_LEN, add_sparsities, default_model, model_name, parser, run
from modegpt.comparing.compare import METHODS, compare
from modegpt.comparing.measures import Measures
from modegpt.pages.compare_plot import draw
from result_file import Results

EVAL_WINDOWS = 48
OURS = ("best:error", "best", "paper:influence")


def main() -> None:
    """Compare, and write the rows."""
    arguments = parser(__doc__, "rivals.json")
    arguments.add_argument("--out", type=Path, required=True, help="folder for what is done")
    arguments.add_argument("--plot", type=Path, default=None, help="an .svg file: draw the curves, too")
    add_sparsities(arguments, 0.1, 0.2, 0.3)
    arguments.add_argument("--methods", nargs="*", default=[*OURS, *(m for m in METHODS if m not in ("best", "paper"))])
    asked = arguments.parse_args()
    result = compare(
        default_model(asked.model),
        asked.data / "wiki.valid.txt",
        asked.out,
        asked.methods,
        asked.sparsity,
        modegpt.CompressionConfig(samples=SAMPLES, seq_len=SEQ_LEN, sampling="sequential"),
        Measures(data=(str(asked.data / "wiki.test.raw"),), seq_len=SEQ_LEN, max_windows=EVAL_WINDOWS, rounds=0),
        progress=lambda stage, done, total: print(f"{stage} {done}/{total}", flush=True) if not done else None,
    )
    protocol = {
        "dtype": result["measures"]["dtype"],
        "calibration": CALIBRATION,
        "test": f"wiki.test.raw, first {EVAL_WINDOWS} windows of {SEQ_LEN} tokens",
    }
    if asked.plot is not None:
        draw(result, asked.plot)
    results = Results(asked.json, {"model": model_name(asked), "protocol": protocol})
    measured = [
        {
            "method": row["method"],
            "sparsity": row["sparsity"]["requested"],
            "achieved": row["sparsity"]["blocks"],
            "perplexity": row["perplexity"][0]["perplexity"],
        }
        for row in result["rows"]
    ]
    results.rows = [*{(row["method"], row["sparsity"]): row for row in results.rows + measured}.values()]
    results.write()


if __name__ == "__main__":
    run(main)
