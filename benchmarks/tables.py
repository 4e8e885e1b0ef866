"""Writes the README's figures, between their markers, from the JSON that the benchmarks left in benchmarks/results."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from readme import load, risen, table
from stock_table import stock
from zero_shot_tables import zero_shot

ROOT = Path(__file__).parent.parent


def headline() -> str:
    """Return what a newcomer sees first: perplexity by sparsity, of the best solvers, the paper's, and fewer layers."""
    if (data := load("solvers.json")) is None:
        return ""
    shares, about = (0.1, 0.2, 0.3), data["protocol"]
    methods = {
        ("best", "error"): "modegpt, `--allocation error`",
        ("best", "uniform"): "modegpt",
        ("paper", "influence"): "the MoDeGPT paper, `--solver paper --allocation influence`",
        ("paper", "uniform"): "its solvers with uniform ranks, `--solver paper`",
        ("paper", "error"): "its solvers with ranks by `error`, `--solver paper --allocation error`",
        ("drop layers", None): "whole layers dropped by Block Influence",
    }
    whole = _of_all_modules(data)
    rows = [
        [name, *(f"{whole[(*method, share)]['perplexity']:.1f}" for share in shares)]
        for method, name in methods.items()
    ]
    rows += _best_rival(shares)
    dense = data["rows"][0]["perplexity"]
    return (
        f"WikiText-2 perplexity of SmolLM2-135M-Instruct, {dense:.1f} as it is, after a share of its blocks' "
        f"parameters was removed\n(calibrated on {about['calibration']}; {about['test']};\n"
        "comparable with one another, not with published figures):\n\n"
        + table(["", *(f"{share:.0%}" for share in shares)], rows)
    )


def _best_rival(shares: tuple[float, ...]) -> list[list[str]]:
    """Return the row of the other method that loses least on average, with how many there are."""
    if (data := load("rivals.json")) is None:
        return []
    found: dict[str, dict[float, float]] = {}
    for row in data["rows"][1:]:
        if row["method"].partition(":")[0] not in ("best", "paper"):
            found.setdefault(row["method"], {})[row["sparsity"]] = row["perplexity"]
    best = min(found, key=lambda method: sum(math.log(found[method][share]) for share in shares))
    name = f"`{best}`, the best of {len(found)} [other methods](docs/other-methods.md)"
    return [[name, *(f"{found[best][share]:.1f}" for share in shares)]]


def faithful() -> str:
    """Return the section on the paper's solvers, module by module."""
    if (data := load("faithful.json")) is None:
        return ""
    rows = [
        [row["modules"], f"{row['perplexity']:.2f}", f"{row['sparsity']['blocks']:.1%}" if "sparsity" in row else ""]
        for row in data["rows"]
    ]
    about = data["protocol"]
    return (
        "**The paper's solvers, module by module.** SmolLM2-135M-Instruct, uniform 25 % (every rank is a whole "
        f"number), {about['dtype']};\ncalibrated on {about['calibration']}; perplexity on {about['evaluation']}\n"
        "(`benchmarks/faithful.py`).\n\n" + table(["compressed", "perplexity", "of the blocks removed"], rows)
    )


def lean() -> str:
    """Return the section on what compressing costs."""
    if (data := load("lean.json")) is None:
        return ""
    spread = f"{min(data['ratios']):.2f} to {max(data['ratios']):.2f}"
    about = data["protocol"]
    return (
        f"**What compressing costs.** With `{about['solver']}` {data['ratio_median']:.1f} times one plain forward pass "
        f"over the same {about['tokens']} tokens,\nin one process ({spread} over {len(data['ratios'])} repeats, "
        "`benchmarks/lean.py`). The paper reports 4 h 09 m for Llama-2 7B on one A100."
    )


def rivals() -> str:
    """Return the section on other training-free methods."""
    if (data := load("rivals.json")) is None:
        return ""
    about, dense = data["protocol"], data["rows"][0]["perplexity"]
    shares, lines = sorted({row["sparsity"] for row in data["rows"][1:]}), {}
    for row in data["rows"][1:]:
        cell = risen(row["perplexity"], dense)
        lines.setdefault(row["method"], {})[row["sparsity"]] = cell
    rows = [[f"`{method}`", *(cells.get(share, "") for share in shares)] for method, cells in lines.items()]
    uniform = ", ".join(f"{row['achieved']:.1%}" for row in data["rows"] if row["method"] == "best")
    return (
        "**Other training-free methods**, written from their papers ([how](docs/other-methods.md)). "
        f"SmolLM2-135M-Instruct, {about['dtype']},\ncalibrated on {about['calibration']}; perplexity on "
        f"{about['test']}\n(dense {dense:.1f}), and the rise of its logarithm (`benchmarks/rivals.py`).\n"
        f"`best` with uniform ranks removes {uniform} of the blocks, the others no less than the columns say.\n\n"
        + table(["method", *(f"{share:.0%}" for share in shares)], rows)
    )


def allocation() -> str:
    """Return the section on the allocation rules."""
    if (data := load("allocation.json")) is None:
        return ""
    sparsities = sorted({row["sparsity"] for row in data["rows"]} - {0.0})
    rules = list(dict.fromkeys(row["rule"] for row in data["rows"] if row["rule"] != "dense"))
    cell = {(row["rule"], row["sparsity"]): row for row in data["rows"]}
    about, dense = data["protocol"], data["rows"][0]
    header = ["rule"] + [f"{sparsity:.0%} {text}" for sparsity in sparsities for text in ("selection", "test")]
    rows = []
    for rule in rules:
        values = [cell[rule, s][text] for s in sparsities for text in ("selection", "test")]
        rows.append([f"`{rule}`", *(f"{value:.1f}" for value in values)])
    return (
        f"**Allocation rules at one budget.** {about['solver']} solvers, calibrated on {about['calibration']};\n"
        f"`selection` is {about['selection']} (dense {dense['selection']:.1f}), on which\n"
        f"the default was chosen; `test` is {about['test']} (dense {dense['test']:.1f}; "
        "`benchmarks/allocation.py`).\n\n" + table(header, rows)
    )


def solvers() -> str:
    """Return the section on the best solvers against the paper's, and what each costs."""
    if (data := load("solvers.json")) is None:
        return ""
    return f"**The best solvers against the paper's.** {_solver_table(data)}\n\n{_solver_costs(data)}"


def other_text() -> str:
    """Return the section on the same, calibrated on another text."""
    if (data := load("solvers_instruct.json")) is None:
        return ""
    return f"**The same, calibrated on another text.** {_solver_table(data)}"


def _of_all_modules(data: dict[str, Any]) -> dict[tuple[str, str | None, float], dict[str, Any]]:
    """Return rows in which all modules were compressed, or layers dropped, by method, rule and sparsity."""
    whole = [row for row in data["rows"] if row.get("modules", "all") == "all"]
    return {(row["method"], row.get("allocation"), row["sparsity"]): row for row in whole}


def _solver_costs(data: dict[str, Any]) -> str:
    whole = _of_all_modules(data)
    shares = [share for method, rule, share in whole if (method, rule) == ("best", "uniform")]
    best, paper = (
        [whole[solver, "uniform", share]["seconds"]["total"] for share in shares] for solver in ("best", "paper")
    )
    ratios = [ours / theirs for ours, theirs in zip(best, paper, strict=True)]
    compressing = median(best)
    scoring = whole["best", "error", shares[0]]["scoring_seconds"]
    machine = data["machine"]
    return (
        f"Under `uniform` compressing took {median(ratios):.1f} times as long with `best` as with `paper` "
        f"({min(ratios):.2f} to {max(ratios):.2f}), {compressing:.0f} s\n"
        f"({machine['processor']}, threads: {machine['threads']}). The scores of `error` take {scoring:.0f} s with "
        f"`best`, once for all sparsities: {scoring / compressing:.1f} times that."
    )


def _solver_table(data: dict[str, Any]) -> str:
    about, dense = data["protocol"], data["rows"][0]["perplexity"]
    sparsities = sorted({row["sparsity"] for row in data["rows"][1:]})
    lines: dict[tuple[str, str], dict[float, str]] = {}
    for row in data["rows"][1:]:
        what = "whole layers dropped by Block Influence" if "modules" not in row else f"`{row['method']}`"
        if row.get("modules", "all") != "all":
            what += f", `{row['modules']}` alone"
        rule = f"`{row['allocation']}`" if "allocation" in row else ""
        cell = risen(row["perplexity"], dense)
        lines.setdefault((what, rule), {})[row["sparsity"]] = cell
    rows = [[*names, *(cells.get(sparsity, "") for sparsity in sparsities)] for names, cells in sorted(lines.items())]
    header = ["compressed by", "allocation", *(f"{sparsity:.0%}" for sparsity in sparsities)]
    return (
        f"{about['dtype']}, calibrated on {about['calibration']};\n"
        f"perplexity on {about['test']} (dense {dense:.1f}), and the rise of its logarithm\n"
        "(`benchmarks/solvers.py`).\n\n" + table(header, rows)
    )


def streaming() -> str:
    """Return the section on memory and time by depth."""
    if (data := load("compress_speed_1b_cpu.json")) is None:
        return ""
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
                    f"{whole / 60:.0f} min" + (", extrapolated" if row["layers"] < n_layers else ""),
                    "" if memory is None else f"{memory / 1e9:.0f} GB",
                ]
            )
    header = ["d_model x layers", "solvers", "layers measured", "time", "for all layers", "GPU memory"]
    return (
        "**On a GPU.** Time to compress Llama shapes of 7 and 70 billion parameters on one "
        f"{found[0]['machine']['gpu']}:\nweights {about['weights']}, {about['tokens']} tokens, "
        f"{about['sparsity']:.0%} (`benchmarks/compress_speed.py --device cuda`).\n"
        "Whole runs of `best`, and of trained models, were not measured.\n\n" + table(header, rows)
    )


def resuming() -> str:
    """Return the section on runs that were killed."""
    if (data := load("kill_and_resume.json")) is None:
        return ""
    return (
        f"**A killed run loses nothing.** {data['equal']} of {data['protocol']['trials']} runs killed with SIGKILL at "
        "random moments and resumed ended with the bytes\nof an undisturbed run (`benchmarks/kill_and_resume.py`)."
    )


def speed() -> str:
    """Return the section on how much faster compressed models are."""
    if (data := load("speed_cpu.json")) is None:
        return ""
    about, names = data["protocol"], {"smollm2": "SmolLM2-135M"}
    first = data["rows"][0]
    rows = []
    for row in data["rows"]:
        cells = [f"{names.get(row['shape'], row['shape'])}, {row['parameters'] / 1e6:.0f} M", f"{row['sparsity']:.0%}"]
        for task in ("decode", "prefill"):
            told = row[task]
            cells += [f"{told['median']:.2f} ({told['min']:.2f} to {told['max']:.2f})", f"{told['allowed']:.2f}"]
            cells.append(f"{told['share']:.0%}")
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


def _speed_on_gpu() -> str:
    if (data := load("speed_cuda.json")) is None:
        return ""
    about, rows = data["protocol"], []
    for row in data["rows"]:
        cells = [str(row["batch_size"])]
        for task in ("decode", "prefill"):
            told = row[task]
            cells += [f"{told['median']:.2f} ({told['min']:.2f} to {told['max']:.2f})", f"{told['allowed']:.2f}"]
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
        "compressed model\nlaunches fewer. `--compile`, which replays them as one graph, was not measured there.\n\n"
        + table(header, rows)
    )


def gemma3() -> str:
    """Return the section on Gemma 3 270M."""
    if (data := load("gemma3.json")) is None:
        return ""
    about, dense, *measured = data["protocol"], *data["rows"]
    methods = list(dict.fromkeys((row["solver"], row["allocation"]) for row in measured))
    cell = {((row["solver"], row["allocation"]), row["sparsity"]): row for row in measured}
    rows = []
    for sparsity in sorted({row["sparsity"] for row in measured}):
        found = [cell[method, sparsity] for method in methods]
        removed = found[0]["achieved"]["blocks"]
        rows.append([f"{sparsity:.0%}", f"{removed:.1%}", *(f"{row['perplexity']:.1f}" for row in found)])
    header = ["sparsity", "of the blocks removed", *(f"`{solver}`, `{rule}`" for solver, rule in methods)]
    seconds = {
        method: sum(row["seconds"] for row in measured if (row["solver"], row["allocation"]) == method)
        for method in methods
    }
    ratio = seconds["best", "uniform"] / seconds["paper", "uniform"]
    return (
        "**Gemma 3 270M**, its 4-bit weights unpacked; queries and keys are normalised and stay whole, and under "
        "`uniform` nothing\nmakes up for them; `error` was asked for what `uniform` removed. "
        f"{about['dtype']}, calibrated on {about['calibration']};\n"
        f"perplexity on {about['evaluation']}\n"
        f"(dense {dense['perplexity']:.1f}; `benchmarks/gemma3.py`).\n\n"
        + table(header, rows)
        + f"\n\nUnder `uniform` compressing took {ratio:.1f} times as long with `best` as with `paper`."
    )


def figures() -> str:
    """Return everything between the README's markers."""
    sections = (
        faithful(),
        solvers(),
        other_text(),
        rivals(),
        allocation(),
        gemma3(),
        stock(),
        zero_shot(),
        speed(),
        lean(),
        streaming(),
        compressing_on_gpu(),
        resuming(),
    )
    return "\n\n".join(section for section in sections if section)


SECTIONS = {"headline": headline, "figures": figures}
"""What stands between `<!-- name -->` and `<!-- /name -->`."""


def main() -> None:
    """Rewrite the README's sections."""
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    for name, section in SECTIONS.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, after = readme.split(start)[0], readme.split(end)[1]
        readme = f"{before}{start}\n{section()}\n{end}{after}"
    path.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
