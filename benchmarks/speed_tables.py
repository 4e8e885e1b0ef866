"""The sections on time and memory: of compressed models, and of compressing."""

from typing import Any

from markdown_tables import MODEL, load, section, table


@section("speed_cpu.json")
def speed(data: dict[str, Any]) -> str:
    """Return the section on how much faster compressed models are."""
    about, names = data["protocol"], {"smollm2": "SmolLM2-135M"}
    first = data["rows"][0]
    rows = []
    for row in data["rows"]:
        cells = [f"{names.get(row['shape'], row['shape'])}, {row['parameters'] / 1e6:.0f} M", f"{row['sparsity']:.0%}"]
        for task in ("decode", "prefill"):
            cells += [*_times_faster(row[task]), f"{row[task]['share']:.0%}"]
        rows.append(cells)
    header = ["model", "sparsity"]
    header += [column for task in ("decode", "prefill") for column in (f"{task}, times faster", "possible", "reached")]
    return (
        f"**Speed.** {about['dtype']}, {about['device'].upper()}, {about['threads']} threads, batch "
        f"{first['batch_size']}, prompts of {first['prompt_tokens']} tokens and {first['new_tokens']} decoded;\n"
        f"dense and compressed in turn in one process, medians of {about['repeats']} rounds (`benchmarks/speed.py`).\n"
        "What is possible follows from the work that is left: weights read per decoded token with the head, and\n"
        "multiply-accumulates of a prompt. Ranks are uniform; SmolLM2 is cut to them without calibration, `0.5b` is "
        "random.\n\n" + table(header, rows) + _speed_on_gpu()
    )


def _times_faster(told: dict[str, float]) -> list[str]:
    """Return the cells of a speedup with its spread, and of the one that is possible."""
    return [f"{told['median']:.2f} ({told['min']:.2f} to {told['max']:.2f})", f"{told['allowed']:.2f}"]


@section("speed_cuda.json")
def _speed_on_gpu(data: dict[str, Any]) -> str:
    about, rows = data["protocol"], []
    for row in data["rows"]:
        cells = [str(row["batch_size"])]
        for task in ("decode", "prefill"):
            cells += _times_faster(row[task])
        seconds = [f"{row['models'][name]['token_seconds'] * 1e3:.0f}" for name in ("dense", "compressed")]
        rows.append([*cells, " and ".join(seconds) + " ms"])
    first = data["rows"][0]
    header = [
        "batch",
        "decode, times faster",
        "possible",
        "prefill, times faster",
        "possible",
        "a token, dense and not",
    ]
    return (
        f"\n\nThe same in {about['dtype']} on one {data['machine']['gpu']}, without `--compile`: a random Llama of "
        f"{first['parameters'] / 1e9:.1f} B at {first['sparsity']:.0%},\nranks rounded up to {about['round_to']}, "
        f"{about['repeats']} rounds. Where there is enough to compute, it is as much faster as it can be. Decoding so\n"
        "few tokens, both models wait for Python to launch their kernels, and nothing is gained; since then a "
        "compressed model\nneeds Python for less.\n\n" + table(header, rows) + _compiled_on_gpu()
    )


@section("speed_cuda_compiled.json")
def _compiled_on_gpu(data: dict[str, Any]) -> str:
    (row,) = data["rows"]
    decode, told = row["decode"], [row["models"][name] for name in ("compressed", "dense")]
    rates = " tokens a second for ".join(f"{model['decode_tokens_per_second']:.0f}" for model in told)
    memory = " GB of memory for ".join(f"{model['peak_memory_bytes'] / 1e9:.1f}" for model in told)
    return (
        "\n\nWith `--compile`, which replays the kernels of a token as one graph, the same model decodes "
        f"{decode['median']:.2f} times as fast ({decode['min']:.2f}\nto {decode['max']:.2f}; {decode['allowed']:.2f} "
        f"is possible) in batches of {row['batch_size']}: {rates}, with {memory}. Prompts are not compiled."
    )


@section("lean.json")
def lean(data: dict[str, Any]) -> str:
    """Return the section on what compressing costs."""
    about, ratios = data["protocol"], data["ratios"]
    return (
        f"**What compressing costs.** {MODEL}, {about['dtype']}: with `{about['solver']}` {data['ratio_median']:.1f} "
        f"times one plain forward pass over the same\n{about['tokens']} tokens of {about['calibration']}, in one "
        f"process ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} repeats, `benchmarks/lean.py`).\n"
        "The paper reports 4 h 09 m for Llama-2 7B on one A100."
    )


@section("compress_speed_1b_cpu.json")
def streaming(data: dict[str, Any]) -> str:
    """Return the section on memory and time by depth."""
    about = data["protocol"]

    def per_layer(row: dict[str, Any]) -> float:
        return row["seconds"]["total"] / row["layers"]

    rows = [
        [
            str(row["layers"]),
            f"{row['checkpoint_bytes'] / 1e9:.2f} GB",
            f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
            f"{row['peak_memory_share']:.0%}",
            f"{per_layer(row) / per_layer(data['rows'][0]):.2f}",
        ]
        for row in data["rows"]
    ]
    header = ["layers", "checkpoint", "peak memory of the process", "share", "time per layer, relative"]
    return (
        f"**Memory does not grow with depth.** A Llama of d_model 2048 and d_int 5632, weights {about['weights']},\n"
        f"{about['tokens']} tokens, CPU (`benchmarks/compress_speed.py --shape 1b`).\n\n" + table(header, rows)
    )


def compressing_on_gpu() -> str:
    """Return the section on the time that large shapes take on a GPU."""
    found = [data for size in ("7b", "70b") if (data := load(f"compress_speed_{size}_cuda.json"))]
    if not found:
        return ""
    about, rows = found[0]["protocol"], []
    for data in found:
        for row in data["rows"]:
            n_layers, memory = data["protocol"]["shape"]["num_hidden_layers"], row.get("peak_gpu_memory_bytes")
            whole = row.get("extrapolated", {}).get("total_seconds", row["seconds"]["total"])
            rows.append(
                [
                    f"{data['protocol']['shape']['hidden_size']} x {n_layers}",
                    f"`{row['solver']}`",
                    f"{row['layers']} of {n_layers}",
                    f"{row['seconds']['total']:.0f} s",
                    _duration(whole) + (", extrapolated" if row["layers"] < n_layers else ""),
                    "" if memory is None else f"{memory / 1e9:.0f} GB",
                ]
            )
    header = ["d_model x layers", "solvers", "layers measured", "time", "for all layers", "GPU memory"]
    return (
        "**On a GPU.** Time to compress Llama shapes of 7 and 70 billion parameters on one "
        f"{found[0]['machine']['gpu']}:\nweights {about['weights']}, {about['tokens']} tokens, "
        f"{about['sparsity']:.0%} (`benchmarks/compress_speed.py --device cuda`).\n"
        "Trained models were not measured.\n\n" + table(header, rows)
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"


@section("kill_and_resume.json")
def resuming(data: dict[str, Any]) -> str:
    """Return the section on runs that were killed."""
    begun = sum(row["layers_on_disk"] > 0 for row in data["rows"])
    return (
        f"**A killed run loses nothing.** {data['equal']} of {data['protocol']['trials']} runs killed with SIGKILL at "
        f"random moments and resumed, {begun} of them with\nfinished blocks on disk, ended with the bytes of an "
        "undisturbed run (`benchmarks/kill_and_resume.py`)."
    )
