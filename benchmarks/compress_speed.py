"""Time and peak memory of compressing random weights of a named real shape; needs no download and no network.

Each row is a fresh process, so that its peak resident memory is its own. `--layers` measures a few layers of a deep
model; `--extrapolate` then scales the time per layer to the full depth, and the row says that it is extrapolated.

    python benchmarks/compress_speed.py --shape 1b --layers 24 48 --samples 8 --seq-len 256
    python benchmarks/compress_speed.py --shape 7b --dtype bfloat16 --device cuda --samples 128 --seq-len 2048
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from common import run, share
from modegpt.config import PRESETS
from result_file import RESULTS, save

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def write_random_checkpoint(folder: Path, config: LlamaConfig, dtype: torch.dtype, device: str = "cpu") -> int:
    """Write a Llama checkpoint of random weights, one shard at a time, and return its bytes."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * 0.02).to(dtype).cpu()

    d, d_int = config.hidden_size, config.intermediate_size
    d_head = d // config.num_attention_heads
    kv = config.num_key_value_heads * d_head
    shapes = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (d_int, d),
        "mlp.up_proj": (d_int, d),
        "mlp.down_proj": (d, d_int),
    }
    n_files, weight_map, total = config.num_hidden_layers + 1, {}, 0

    def write(index: int, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        name = f"model-{index + 1:05d}-of-{n_files:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())

    for layer in range(config.num_hidden_layers):
        tensors = {f"model.layers.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(d, dtype=dtype)
        write(layer, tensors)
    embeddings = {name: normal(config.vocab_size, d) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write(config.num_hidden_layers, {**embeddings, "model.norm.weight": torch.ones(d, dtype=dtype)})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.dtype = dtype
    config.save_pretrained(folder)
    return total


def child(options: argparse.Namespace) -> None:
    """Compress the checkpoint in this process and print the report."""
    from modegpt import CompressionConfig
    from modegpt.compress import compress_to_folder

    windows = torch.randint(32000, (options.samples, options.seq_len), generator=torch.Generator().manual_seed(0))
    config = CompressionConfig(
        sparsity=options.sparsity, solver=options.solver[0], device=options.device, batch_size=options.batch_size
    )
    start = time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        # So that a run that is stopped has told how far it came.
        print(f"{stage} {done} of {total}, {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    report = compress_to_folder(options.child, windows, options.child / "out", config, progress=progress)
    wanted = ("seconds", "peak_memory_bytes", "peak_gpu_memory_bytes", "sparsity")
    print(json.dumps({name: report[name] for name in wanted}))


def measure(options: argparse.Namespace, n_layers: int) -> Iterator[dict[str, Any]]:
    """Write a checkpoint of `n_layers` layers, compress it in a fresh process with each solver, and yield the rows."""
    shape = {**SHAPES[options.shape], "num_hidden_layers": n_layers}
    shape.setdefault("num_key_value_heads", shape["num_attention_heads"])
    config = LlamaConfig(**shape, vocab_size=32000, max_position_embeddings=4096)
    folder = Path(tempfile.mkdtemp(prefix="modegpt-speed-", dir=options.scratch))
    try:
        size = write_random_checkpoint(folder, config, getattr(torch, options.dtype), options.device)
        for solver in options.solver:
            command = [sys.executable, __file__, "--child", str(folder), "--solver", solver]
            for name in ("samples", "seq_len", "sparsity", "device", "batch_size"):
                value = getattr(options, name)
                if value is not None:
                    command += [f"--{name.replace('_', '-')}", str(value)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            shutil.rmtree(folder / "out")
            yield _row(options, solver, n_layers, size, json.loads(output.splitlines()[-1]))
    finally:
        shutil.rmtree(folder)


def _row(options: argparse.Namespace, solver: str, n_layers: int, size: int, report: dict[str, Any]) -> dict[str, Any]:
    row = {"solver": solver, "layers": n_layers, "checkpoint_bytes": size, **report}
    row["peak_memory_share"] = report["peak_memory_bytes"] / size
    row["seconds_per_layer"] = sum(report["seconds"][s] for s in ("moments", "decompose", "forward")) / n_layers
    full = SHAPES[options.shape]["num_hidden_layers"]
    if options.extrapolate and n_layers < full:
        per_layer = report["seconds"]["total"] / n_layers
        how = "total time per layer x layers"
        row["extrapolated"] = {"layers": full, "total_seconds": per_layer * full, "how": how}
    return row


def main() -> None:
    """Measure every depth asked for and write the rows with command, machine and versions."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shape", choices=SHAPES, default="tiny")
    arguments.add_argument("--layers", type=int, nargs="*", help="depths to measure (default: the shape's own)")
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--seq-len", type=int, default=256)
    arguments.add_argument("--sparsity", type=share, default=0.3)
    arguments.add_argument("--solver", nargs="*", default=["paper"], choices=PRESETS)
    arguments.add_argument("--batch-size", type=int)
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--extrapolate", action="store_true")
    arguments.add_argument("--scratch", type=Path, help="where the random checkpoints go")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        child(options)
        return
    rows: list[dict[str, Any]] = []
    protocol = {
        "shape": {**SHAPES[options.shape], "vocab_size": 32000},
        "weights": f"random, {options.dtype}",
        "tokens": f"{options.samples} x {options.seq_len}",
        "sparsity": options.sparsity,
        "device": options.device,
    }
    path = options.json or RESULTS / f"compress_speed_{options.shape}_{options.device}.json"
    for n_layers in options.layers or [SHAPES[options.shape]["num_hidden_layers"]]:
        for row in measure(options, n_layers):
            rows.append(row)
            print(
                f"{options.shape}, {n_layers} layers, {row['solver']}: {row['seconds']['total']:.1f} s, peak memory "
                f"{row['peak_memory_bytes'] / 2**30:.2f} GiB ({row['peak_memory_share']:.0%} of the checkpoint)",
                row["seconds"],
                flush=True,
            )
            save(path, {"protocol": protocol, "rows": rows})  # now: the next row may be stopped


if __name__ == "__main__":
    run(main)
