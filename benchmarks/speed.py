"""How much faster a compressed model is, against the share of the work that is left, both models in turn in one run.

Ranks decide speed, weights do not: SmolLM2's own weights are cut to uniform ranks without any calibration, and the
other shape has random weights. The floor is that share: of the weights read to decode a token, the head included, and
of the multiply-accumulates of reading a prompt. `--device cuda --dtype bfloat16` needs nothing but a bare GPU machine.

    python benchmarks/speed.py
    python benchmarks/speed.py --device cuda --dtype bfloat16 --shapes 7b --batch-sizes 1,64,256 --round-to 8
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from common import default_model, run, share
from modegpt.architectures import architecture_of
from modegpt.benchmark import BenchSettings, benchmark
from modegpt.checkpoint import build, compressed_config
from modegpt.loading.models import open_model
from modegpt.modeling_modegpt import decoder_layers, shrink_block
from modegpt.running.surgery import split_rank
from result_file import RESULTS, save

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.5b": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Llama shapes with 32000 tokens, untied, as the models of 0.5 and 7 billion parameters are."""


def random_model(shape: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Return a Llama of random weights, made where it will run."""
    config = LlamaConfig(**SHAPES[shape], vocab_size=32000, max_position_embeddings=4096)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return model.eval()


def cut(dense: PreTrainedModel, sparsity: float, round_to: int) -> PreTrainedModel:
    """Return a compressed copy with the paper's uniform ranks, up to a multiple, whose weights are the leading ones."""
    architecture = architecture_of(dense.config)
    dims = architecture.dimensions(dense.config)

    def rank(full: int, step: int) -> int:
        step = math.lcm(step, round_to)
        return min(full, math.ceil((1 - sparsity) * full / step) * step)

    n_pairs, n_plain = split_rank(rank(dims.d_head, 2 if dims.rotary_dim else 1), dims)
    layer = {"rope_pairs": n_pairs, "qk_plain": n_plain, "value_dim": rank(dims.d_head, 1)}
    layer["mlp_width"] = rank(dims.d_int, 1)
    config = compressed_config(dense.config, architecture, [layer] * dims.n_layers)
    narrow = copy.deepcopy(dense)
    for block in decoder_layers(narrow, architecture.describe()):
        shrink_block(block, architecture.describe(), layer, dense.config)
    return build(config, narrow.state_dict()).to(dense.device)  # pyright: ignore[reportArgumentType]


def measure(name: str, dense: PreTrainedModel, sparsity: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each point of the grid: speedups, the speedup that the floor allows, and the share reached."""
    settings = BenchSettings(
        batch_sizes=options.batch_sizes,
        lengths=options.lengths,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        compile=options.compile,
    )
    models = {"compressed": cut(dense, sparsity, options.round_to), "dense": dense}
    costs, points = benchmark(models, settings)
    rows = []
    for point in points:
        macs = {key: figures["prefill_macs"] for key, figures in point["models"].items()}
        allowed = {
            "decode": costs["dense"].parameters_per_token / costs["compressed"].parameters_per_token,
            "prefill": macs["dense"] / macs["compressed"],
        }
        tasks = {
            task: {**speedup, "allowed": allowed[task], "share": speedup["median"] / allowed[task]}
            for task, speedup in point["speedups"]["dense"].items()
        }
        row = {"shape": name, "parameters": costs["dense"].parameters, "sparsity": sparsity}
        row |= {key: point[key] for key in ("batch_size", "prompt_tokens", "new_tokens")}
        rows.append({**row, **tasks, "models": point["models"]})
        told = ", ".join(
            f"{task} {t['median']:.3f} of {t['allowed']:.3f} ({t['share']:.0%})" for task, t in tasks.items()
        )
        print(f"{name} {sparsity:.0%}, {point['batch_size']} x {point['prompt_tokens']}: {told}", flush=True)
    return rows


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    return tuple(share(part) for part in text.split(","))


def shapes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ("smollm2", *SHAPES)]:
        raise argparse.ArgumentTypeError(f"no shape is called {unknown[0]}; there are smollm2, {', '.join(SHAPES)}")
    return names


def main() -> None:
    """Measure every shape, and write its rows when it is done."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--shapes", type=shapes, default=("smollm2", "0.5b"), help=f"smollm2, {', '.join(SHAPES)}; with commas"
    )
    arguments.add_argument("--sparsities", type=shares, default=(0.3, 0.05))
    arguments.add_argument("--batch-sizes", type=numbers, default=(1,))
    arguments.add_argument("--lengths", type=numbers, default=(256,))
    arguments.add_argument("--new-tokens", type=int, default=32)
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--round-to", type=int, default=1)
    arguments.add_argument("--compile", action="store_true")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    dtype, rows = getattr(torch, options.dtype), []
    settings = ("dtype", "device", "threads", "repeats", "round_to", "compile")
    about = {key: getattr(options, key) for key in settings}
    path = options.json or RESULTS / f"speed_{options.device.split(':')[0]}.json"
    for shape in options.shapes:
        if shape == "smollm2":
            dense = open_model(default_model(None), dtype, options.device)
        else:
            dense = random_model(shape, dtype, options.device)
        for sparsity in options.sparsities:
            rows += measure(shape, dense, sparsity, options)
            save(path, {"protocol": about, "rows": rows})


if __name__ == "__main__":
    run(main)
