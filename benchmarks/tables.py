"""Writes the tables of README.md and docs/, between their markers, from the JSON that the benchmarks left."""

import math
from pathlib import Path
from statistics import fmean, median
from typing import Any

from markdown_tables import MODEL, first_draw, load, risen, section, shown, table
from speed_tables import compressing_on_gpu, lean, resuming, speed, streaming
from stock_table import stock
from zero_shot_tables import accuracy, best_over_paper, zero_shot

ROOT = Path(__file__).parent.parent


@section("solvers.json")
def headline(data: dict[str, Any]) -> str:
    """Return what a newcomer sees first: perplexity by sparsity, of the best solvers, the paper's, and fewer layers."""
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
    rows = []
    for method, name in methods.items():
        found = [whole.get((*method, share), {}) for share in shares]
        rows.append([name, *(shown(row.get("perplexity")) for row in found)])
    rows += _best_rival(shares)
    dense = data["rows"][0]["perplexity"]
    return (
        f"WikiText-2 perplexity of SmolLM2-135M-Instruct, {dense:.1f} as it is, after a share of its blocks' "
        f"parameters was removed\n(calibrated on {about['calibration']}; {about['test']};\n"
        f"comparable with one another, not with published figures{_removed_by_uniform(whole, shares)}):\n\n"
        + table(["", *(f"{share:.0%}" for share in shares)], rows)
    )


def _removed_by_uniform(whole: dict[tuple[str, str | None, float], dict[str, Any]], shares: tuple[float, ...]) -> str:
    """Return what uniform ranks, which are rounded up, remove of the blocks."""
    rows = [whole.get(("best", "uniform", share)) for share in shares]
    removed = ", ".join(f"{row['achieved']['blocks']:.1%}" for row in rows if row is not None)
    return f";\nuniform ranks, rounded up, remove {removed}" if removed else ""


def _best_rival(shares: tuple[float, ...]) -> list[list[str]]:
    """Return the row of the other method that loses least on average, with how many there are."""
    if (data := load("rivals.json")) is None:
        return []
    found: dict[str, dict[float, float]] = {}
    for row in data["rows"][1:]:
        if row["method"].partition(":")[0] not in ("best", "paper"):
            found.setdefault(row["method"], {})[row["sparsity"]] = row["perplexity"]
    found = {method: by_share for method, by_share in found.items() if by_share.keys() >= set(shares)}
    if not found:
        return []
    best = min(found, key=lambda method: sum(math.log(found[method][share]) for share in shares))
    name = f"`{best}`, the best of {len(found)} [other methods](docs/other-methods.md)"
    return [[name, *(f"{found[best][share]:.1f}" for share in shares)]]


@section("faithful.json")
def faithful(data: dict[str, Any]) -> str:
    """Return the section on the paper's solvers, module by module."""
    rows = [
        [row["modules"], f"{row['perplexity']:.2f}", f"{row['sparsity']['blocks']:.1%}" if "sparsity" in row else ""]
        for row in data["rows"]
    ]
    about = data["protocol"]
    return (
        f"**The paper's solvers, module by module.** {MODEL}, uniform 25 % (every rank is a whole "
        f"number), {about['dtype']};\ncalibrated on {about['calibration']}; perplexity on {about['evaluation']}\n"
        "(`benchmarks/faithful.py`).\n\n" + table(["compressed", "perplexity", "of the blocks removed"], rows)
    )


@section("rivals.json")
def rivals(data: dict[str, Any]) -> str:
    """Return the section on other training-free methods."""
    about, dense = data["protocol"], data["rows"][0]["perplexity"]
    shares, lines = sorted({row["sparsity"] for row in data["rows"][1:]}), {}
    for row in data["rows"][1:]:
        cell = risen(row["perplexity"], dense)
        lines.setdefault(row["method"], {})[row["sparsity"]] = cell
    rows = [[f"`{method}`", *(cells.get(share, "") for share in shares)] for method, cells in lines.items()]
    uniform = ", ".join(f"{row['achieved']:.1%}" for row in data["rows"] if row["method"] == "best")
    return (
        "**Other training-free methods**, written from their papers ([how](other-methods.md)). "
        f"{MODEL}, {about['dtype']},\ncalibrated on {about['calibration']}; perplexity on "
        f"{about['test']}\n(dense {dense:.1f}), and the rise of its logarithm (`benchmarks/rivals.py`).\n"
        f"`best` with uniform ranks removes {uniform} of the blocks, the others no less than the columns say.\n\n"
        + table(["method", *(f"{share:.0%}" for share in shares)], rows)
    )


@section("allocation.json")
def allocation(data: dict[str, Any]) -> str:
    """Return the section on the allocation rules."""
    sparsities = sorted({row["sparsity"] for row in data["rows"]} - {0.0})
    rules = list(dict.fromkeys(row["rule"] for row in data["rows"] if row["rule"] != "dense"))
    cell = {(row["rule"], row["sparsity"]): row for row in data["rows"]}
    about, dense = data["protocol"], data["rows"][0]
    header = ["rule"] + [f"{sparsity:.0%} {text}" for sparsity in sparsities for text in ("selection", "test")]
    rows = []
    for rule in rules:
        values = [cell.get((rule, s), {}).get(text) for s in sparsities for text in ("selection", "test")]
        rows.append([f"`{rule}`", *map(shown, values)])
    uniform = ", ".join(f"{row['achieved']['blocks']:.1%}" for row in data["rows"] if row["rule"] == "uniform")
    return (
        f"**Allocation rules at one budget**, but for `uniform`, which rounds every rank up and removes {uniform}.\n"
        f"{MODEL}, `{about['solver']}`, {about['dtype']}, calibrated on {about['calibration']};\n"
        f"`selection` is {about['selection']} (dense {dense['selection']:.1f}), on which\n"
        f"the default was chosen; `test` is {about['test']} (dense {dense['test']:.1f}; "
        "`benchmarks/allocation.py`).\n\n" + table(header, rows)
    )


@section("solvers.json")
def solvers(data: dict[str, Any]) -> str:
    """Return the section on the best solvers against the paper's, and what each costs."""
    return f"**The best solvers against the paper's.** {_solver_table(data)}\n\n{_draws(data)}\n{_solver_costs(data)}"


@section("solvers_instruct.json")
def other_text(data: dict[str, Any]) -> str:
    """Return the section on the same, calibrated on another text."""
    return f"**The same, calibrated on another text.** {_solver_table(data)}"


def _of_all_modules(data: dict[str, Any]) -> dict[tuple[str, str | None, float], dict[str, Any]]:
    """Return rows in which all modules were compressed, or layers dropped, by method, rule and sparsity."""
    whole = [row for row in first_draw(data) if row.get("modules", "all") == "all"]
    return {(row["method"], row.get("allocation"), row["sparsity"]): row for row in whole}


def _draws(data: dict[str, Any]) -> str:
    """Return what other seeds gave, where there are any, in one sentence each."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in data["rows"]:
        if "seed" in row:
            key = (row["method"], row["allocation"], row["modules"], row["sparsity"])
            found.setdefault(key, []).append(row["perplexity"])
    return "\n".join(
        f"Over {len(drawn)} seeds (of what the model writes and of the Fisher information's noise) `{method}` with "
        f"`{rule}`{'' if modules == 'all' else f' of {modules} alone'} at {sparsity:.0%} has a mean of\n"
        f"{math.exp(fmean(map(math.log, drawn))):.2f} ({min(drawn):.2f} to {max(drawn):.2f})."
        for (method, rule, modules, sparsity), drawn in found.items()
        if len(drawn) > 1
    )


def _solver_costs(data: dict[str, Any]) -> str:
    whole = _of_all_modules(data)
    shares = [share for method, rule, share in whole if (method, rule) == ("best", "uniform")]
    best, paper = (
        [whole[solver, "uniform", share]["seconds"]["total"] for share in shares] for solver in ("best", "paper")
    )
    ratios = [ours / theirs for ours, theirs in zip(best, paper, strict=True)]
    by_error = [row for (method, rule, _), row in whole.items() if (method, rule) == ("best", "error")]
    scoring = median(row["scoring_seconds"] / row["seconds"]["total"] for row in by_error)
    return (
        f"Under `uniform` compressing took {median(ratios):.1f} times as long with `best` as with `paper` "
        f"({min(ratios):.2f} to {max(ratios):.2f}).\nThe scores of `error` take {scoring:.1f} times what compressing "
        "with `best` takes, once for all sparsities."
    )


def _solver_table(data: dict[str, Any]) -> str:
    about, dense = data["protocol"], data["rows"][0]["perplexity"]
    sparsities = sorted({row["sparsity"] for row in data["rows"][1:]})
    lines: dict[tuple[str, str], dict[float, str]] = {}
    for row in first_draw(data)[1:]:
        what = "whole layers dropped by Block Influence" if "modules" not in row else f"`{row['method']}`"
        if row.get("modules", "all") != "all":
            what += f", `{row['modules']}` alone"
        rule = f"`{row['allocation']}`" if "allocation" in row else ""
        cell = risen(row["perplexity"], dense)
        lines.setdefault((what, rule), {})[row["sparsity"]] = cell
    rows = [[*names, *(cells.get(sparsity, "") for sparsity in sparsities)] for names, cells in sorted(lines.items())]
    header = ["compressed by", "allocation", *(f"{sparsity:.0%}" for sparsity in sparsities)]
    return (
        f"{MODEL}, {about['dtype']}, calibrated on {about['calibration']};\n"
        f"perplexity on {about['test']} (dense {dense:.1f}), and the rise of its logarithm\n"
        "(`benchmarks/solvers.py`).\n\n" + table(header, rows)
    )


@section("gemma3.json")
def gemma3(data: dict[str, Any]) -> str:
    """Return the section on Gemma 3 270M."""
    about, dense, *measured = data["protocol"], *data["rows"]
    methods = list(dict.fromkeys((row["solver"], row["allocation"]) for row in measured))
    cell = {((row["solver"], row["allocation"]), row["sparsity"]): row for row in measured}
    rows = []
    for sparsity in sorted({row["sparsity"] for row in measured}):
        found = [cell.get((method, sparsity), {}) for method in methods]
        removed = next(row["achieved"]["blocks"] for row in found if row)
        cells = (shown(row.get("perplexity")) for row in found)
        rows.append([f"{sparsity:.0%}", f"{removed:.1%}", *cells])
    header = ["sparsity", "of the blocks removed", *(f"`{solver}`, `{rule}`" for solver, rule in methods)]
    timed = [share for method, share in cell if method == methods[-1]]
    paper, best = (sum(cell[(solver, "uniform"), share]["seconds"] for share in timed) for solver in ("paper", "best"))
    by_error = "; `error` was asked for what `uniform` removed" if ("best", "error") in methods else ""
    return (
        "**Gemma 3 270M**, its 4-bit weights unpacked; queries and keys are normalised and stay whole, and under "
        f"`uniform` nothing\nmakes up for them{by_error}.\n"
        f"{about['dtype']}, calibrated on {about['calibration']};\n"
        f"perplexity on {about['evaluation']}\n"
        f"(dense {dense['perplexity']:.1f}; `benchmarks/gemma3.py`).\n\n"
        + table(header, rows)
        + f"\n\nUnder `uniform` compressing took {best / paper:.1f} times as long with `best` as with `paper`."
    )


@section("families.json")
def families(data: dict[str, Any]) -> str:
    """Return the section on small models of other families."""
    about, lines, dense = data["protocol"], {}, {}
    for row in data["rows"]:
        dense[row["family"]] = row["dense"]
        lines.setdefault(row["family"], {})[row["sparsity"]] = f"{row['paper']:.3f}, {row['best']:.3f}"
    shares = sorted({row["sparsity"] for row in data["rows"]})
    rows = [
        [f"`{family}`", f"{dense[family]:.1f}", *(cells[share] for share in shares)] for family, cells in lines.items()
    ]
    text = (
        "**Other families**, of which no small trained weights are at hand: models trained for it on passages, "
        f"instructions and Wikipedia\n({about['shape']}; {about['training']}).\n"
        f"`{about['allocation']}`, {about['dtype']}, calibrated on {about['calibration']}, measured on "
        f"{about['evaluation']}:\nrise of log perplexity with `paper` and with `best` (`benchmarks/families.py`).\n\n"
    )
    return text + table(["family", "dense perplexity", *(f"{share:.0%}" for share in shares)], rows)


@section("mixture.json")
def mixture(data: dict[str, Any]) -> str:
    """Return the section on a mixture of experts made of SmolLM2."""
    about, dense, *measured = data["protocol"], *data["rows"]
    found = {(row["solver"], row["sparsity"]): row for row in measured}
    rows = []
    for sparsity in sorted({row["sparsity"] for row in measured}):
        pair = [found[solver, sparsity] for solver in ("paper", "best")]
        seconds = [median(each["total"] for each in row["seconds"]) for row in pair]
        cells = [risen(row["perplexity"], dense["perplexity"]) for row in pair]
        rows.append([f"{sparsity:.0%}", *cells, f"{seconds[1] / seconds[0]:.1f}"])
    text = (
        "**A mixture of experts**, made of SmolLM2-135M-Instruct as no small trained one is at hand: its neurons\n"
        f"dealt to {about['mixture']}, and distilled from it ({about['distillation']}).\n"
        f"`{about['allocation']}`, {about['dtype']}, calibrated on {about['calibration']};\n"
        f"perplexity on {about['test']} (dense {dense['perplexity']:.1f}), and\n"
        "the rise of its logarithm (`benchmarks/mixture.py`). On a second one, made in the same way,\n"
        "`best` had two thirds of the rise of `paper`, and its refit was mended for it ([log.md](log.md)).\n\n"
    )
    header = ["sparsity", "`paper`", "`best`", "time of `best` over `paper`"]
    return text + table(header, rows)


FIGURES = {
    "Perplexity": (faithful, solvers, other_text, allocation),
    "Beside other methods": (rivals,),
    "Other models": (gemma3, families, mixture),
    "In other engines": (stock,),
    "Zero-shot accuracy": (zero_shot,),
    "Speed and memory of compressed models": (speed,),
    "What compressing costs": (lean, streaming, compressing_on_gpu, resuming),
}
"""The chapters of docs/figures.md."""


def figures() -> str:
    """Return all tables, by chapter; what has not been run is left out."""
    chapters = {title: [text for section in sections if (text := section())] for title, sections in FIGURES.items()}
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(texts) for title, texts in chapters.items() if texts)


SECTIONS = {
    "README.md": {"headline": headline, "accuracy": accuracy},
    "docs/figures.md": {"figures": figures},
    "docs/zero-shot.md": {"best-over-paper": best_over_paper},
}
"""What stands in which file between `<!-- name -->` and `<!-- /name -->`."""


def main() -> None:
    """Rewrite the sections."""
    for file, sections in SECTIONS.items():
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        for name, write in sections.items():
            start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
            before, after = text.split(start)[0], text.split(end)[1]
            text = f"{before}{start}\n{write()}\n{end}{after}"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
