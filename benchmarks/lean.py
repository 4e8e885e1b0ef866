"""What compressing costs, in plain forward passes over the same calibration tokens, in one process.

python benchmarks/lean.py
"""

import statistics
import time

import torch

import modegpt
from common import default_model, model_name, parser, run
from modegpt.calibration import draw_windows, load_text, tokenize
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer
from result_file import save

SAMPLES, SEQ_LEN, SPARSITY, REPEATS = 16, 512, 0.25, 3


@torch.inference_mode()
def forward_seconds(model: torch.nn.Module, windows: torch.Tensor) -> float:
    start = time.perf_counter()
    for batch in windows.split(4096 // SEQ_LEN):
        model(batch, use_cache=False)
    return time.perf_counter() - start


def main() -> None:
    options = parser(__doc__, "lean.json").parse_args()
    name = default_model(options.model)
    model = open_model(name, torch.float32)
    text = tokenize(load_text("python-docs", "calibration"), open_tokenizer(name))
    windows = draw_windows(text, SAMPLES, SEQ_LEN, "sequential", 0, "python-docs")
    config = modegpt.CompressionConfig(sparsity=SPARSITY, solver="paper")
    forward_seconds(model, windows[:2])
    ratios, stages = [], []
    for _ in range(REPEATS):
        forward = forward_seconds(model, windows)
        start = time.perf_counter()
        report = modegpt.compress(model, windows, config).modegpt_report
        ratios.append((time.perf_counter() - start) / forward)
        stages.append({"forward_pass": forward, **report["seconds"]})
        print(f"ratio {ratios[-1]:.2f}", stages[-1])
    save(
        options.json,
        {
            "model": model_name(options),
            "protocol": {
                "calibration": "python-docs",
                "tokens": f"{SAMPLES} x {SEQ_LEN}",
                "sparsity": SPARSITY,
                "solver": "paper",
                "dtype": "float32",
            },
            "ratio_median": statistics.median(ratios),
            "ratios": ratios,
            "seconds": stages,
        },
    )


if __name__ == "__main__":
    run(main)
