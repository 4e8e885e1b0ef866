"""The tables of zero-shot accuracy, from what `zero_shot.py` left."""

import math
from operator import itemgetter
from statistics import fmean
from typing import Any

from markdown_tables import MODEL, load, table
from modegpt.measuring.paired import compare

MEANS = (("mean", "acc_norm"), ("mean of `acc`", "acc"))
"""What tables call the means over tasks, and their keys."""

CHOSEN_BY = (
    "Not all of this was kept from choosing: OpenBookQA's questions from the 101st on, and the passages of these BoolQ "
    "questions,\nare among the text by which settings of `best` were chosen (`benchmarks/choices.py`, "
    "`benchmarks/held_out.py`)."
)


def zero_shot() -> str:
    """Return the section on zero-shot accuracy by sparsity: main tasks by rule, then the others with means over all."""
    parts = []
    main, by_error, others = (load(f"zero_shot{name}.json") for name in ("", "_error", "_others"))
    if main is not None:
        parts += [_accuracies("**Zero-shot accuracy.**", main), _by_sparsity(main)]
    if by_error is not None:
        parts.append(_means_by_rule(by_error))
    if main is not None and others is not None:
        before = {(row["solver"], row["sparsity"]): row["tasks"] for row in _first_seed(main)}
        parts.append(_accuracies("**The other tasks, and the means over all.**", others, before))
        header, lines = _differences(others)
        parts.append(CHOSEN_BY)
        parts.append("The differences on these tasks:\n\n" + table(header, lines + _flips(others)))
    return "\n\n".join(parts)


def accuracy() -> str:
    """Return the README's table: the mean `acc_norm` of `best` by sparsity and rule, and what it has over `paper`."""
    files = [data for name in ("", "_error") if (data := load(f"zero_shot{name}.json")) is not None]
    if not files:
        return ""
    about, header, lines = files[0]["protocol"], [""], []
    dense = next(row["mean"]["acc_norm"] for row in files[0]["rows"] if row["solver"] == "dense")
    for data in files:
        rule = f"`{data['protocol']['allocation']}`"
        best = [f"{row['mean']['acc_norm']:.1%}" for row in _first_seed(data) if row["solver"] == "best"]
        (_, *header[1:]), over = _differences(data)
        lines.append([f"`best`, {rule}", *best])
        lines += [[f"over `paper`, {rule}{name.removeprefix('mean')}", *cells] for name, *cells in over if _norm(name)]
    text = (
        f"Mean zero-shot accuracy of {MODEL} over {len(about['tasks'])} tasks, {dense:.1%} as it is, and what `best` "
        f"has over\n`paper` (`acc_norm`, first {about['limit']} samples of each; standard errors on the same samples):"
    )
    return f"{text}\n\n" + table(header, lines)


def best_over_paper() -> str:
    """Return the table of docs/zero-shot.md: what `best` has over `paper`, by tasks and rule."""
    header, lines = [""], []
    for name in ("", "_error", "_others"):
        if (data := load(f"zero_shot{name}.json")) is None:
            continue
        about = data["protocol"]
        tasks = f"{len(about['tasks'])} {'further ' if name == '_others' else ''}tasks, `{about['allocation']}`"
        (_, *header[1:]), over = _differences(data)
        lines += [[tasks + name.removeprefix("mean"), *cells] for name, *cells in over if _norm(name)]
    return table(header, lines)


def _norm(name: str) -> bool:
    """Whether a line of `_differences` is of `acc_norm`."""
    return "`acc`" not in name


def _first_seed(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row of each set of solvers and sparsity, that of the first seed which was measured."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for row in sorted(data["rows"], key=itemgetter("sparsity", "solver", "seed")):
        found.setdefault((row["solver"], row["sparsity"]), row)
    return [*found.values()]


def _accuracies(title: str, data: dict[str, Any], before: dict[tuple[str, float], dict[str, Any]] | None = None) -> str:
    """Return a table of tasks and means; with the tasks measured `before`, by row, the means over those and these."""
    about, rows, errors = data["protocol"], [], []
    header = ["solvers", "sparsity", *(f"`{task}`" for task in about["tasks"]), "mean", "mean of `acc`"]
    which = "a mean"
    if before:
        n_tasks = len(about["tasks"]) + len(next(iter(before.values())))
        header += [f"all {n_tasks}", "all, `acc`"]
        which = f"a mean over all {n_tasks}"
    for row in _first_seed(data):
        tasks = every = [row["tasks"][name] for name in about["tasks"]]
        figures = [*map(_accuracy, tasks), row["mean"]["acc_norm"], row["mean"]["acc"]]
        if before:
            every = [*before[row["solver"], row["sparsity"]].values(), *tasks]
            figures += _means(every)
        share = f"{row['sparsity']:.0%}" if row["sparsity"] else ""
        rows.append([f"`{row['solver']}`", share, *(f"{figure:.1%}" for figure in figures)])
        errors.append(math.hypot(*(task["acc_stderr"] for task in every)) / len(every))
    tasks = data["rows"][0]["tasks"]
    plain = [name for name, task in tasks.items() if task["acc_norm"] is None]
    lengths = {name: len(task["right"]["acc"]) for name, task in tasks.items()}
    short = ", ".join(f"{name} has {n}" for name, n in lengths.items() if n < about["limit"])
    fewer = f" ({short})" if short else ""
    text = (
        f"{title} `acc_norm` (`acc` for {' and '.join(plain)}) of the first {about['limit']} samples of each task"
        f"{fewer}\nthrough lm-eval; {MODEL}, `{about['allocation']}`, {about['dtype']}, "
        f"calibrated on {about['calibration']}.\n"
        f"The standard error of {which} is about {max(errors):.1%} (`benchmarks/zero_shot.py`)."
    )
    return text + "\n\n" + table(header, rows)


def _by_sparsity(data: dict[str, Any]) -> str:
    """Return a table of the differences between the two sets of solvers on the same samples."""
    header, lines = _differences(data)
    text = (
        "The differences, with their standard errors on the same samples, and flips: samples on which only one of a "
        "model and\nthe dense one is right. An accuracy also counts what a damaged model gets right by chance. Over "
        "several seeds, their numbers\nin brackets (of `best` and of `paper`), answers are means over as many draws of "
        "what the model writes:"
    )
    return f"{text}\n\n" + table(header, lines + _flips(data))


def _means_by_rule(data: dict[str, Any]) -> str:
    """Return a table of the means of both sets of solvers, and their differences, under another allocation rule."""
    rows = {(row["solver"], row["sparsity"]): row["mean"] for row in _first_seed(data)}
    header, differences = _differences(data)
    sparsities = sorted({sparsity for solver, sparsity in rows if solver == "best"})
    lines = [
        [f"`{solver}`, {name}", *(f"{rows[solver, sparsity][key]:.1%}" for sparsity in sparsities)]
        for name, key in MEANS
        for solver in ("best", "paper")
    ]
    header[0] = f"`{data['protocol']['allocation']}`"
    lines += [[f"`best` over `paper`, {line[0]}", *line[1:]] for line in differences]
    lines += _flips(data)
    return f"The same tasks and samples with ranks by {header[0]}:\n\n" + table(header, lines)


def _differences(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of what `best` has over `paper`: with the first seed, and where more were drawn, all."""
    best, paper = (_by_seed(data, solver) for solver in ("best", "paper"))
    sparsities = sorted(best)
    first = [_over(best[at][:1], paper[at][:1]) for at in sparsities]
    lines = [[name, *(cells[key] for cells in first)] for name, key in MEANS]
    several = [len(best[at]) + len(paper[at]) > 2 for at in sparsities]
    if any(several):
        seeds = [_over(best[at], paper[at]) if more else {} for at, more in zip(sparsities, several, strict=True)]
        lines += [[f"{name}, over seeds", *(cells.get(key, "") for cells in seeds)] for name, key in MEANS]
    return ["`best` over `paper`", *(f"{sparsity:.0%}" for sparsity in sparsities)], lines


def _over(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the mean differences with their standard errors, each sample's figure being its mean over runs."""
    mean = compare(_by_sample(ours), _by_sample(theirs)).mean._asdict()
    counts = dict.fromkeys([len(ours), len(theirs)])
    runs = "" if list(counts) == [1] else f" ({' and '.join(map(str, counts))})"
    return {key: f"{mean[key]:+.1%} ± {mean[f'{key}_stderr']:.1%}{runs}" for _, key in MEANS}


def _flips(data: dict[str, Any]) -> list[list[str]]:
    """Return lines with the mean share of samples on which only one of a model and the dense one is right."""
    dense = _by_sample(_by_seed(data, "dense")[0.0])
    lines, best = [], _by_seed(data, "best")
    for solver in ("best", "paper"):
        found = _by_seed(data, solver)
        shares = [compare(_by_sample(found[at][:1]), dense).mean.acc_norm_flips for at in sorted(best)]
        lines.append([f"flips, `{solver}`", *(f"{share:.1%}" for share in shares)])
    return lines


def _by_seed(data: dict[str, Any], solver: str) -> dict[float, list[dict[str, Any]]]:
    """Return the tasks of a set of solvers by sparsity, those of the first seed first."""
    found: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(data["rows"], key=itemgetter("seed")):
        if row["solver"] == solver:
            found.setdefault(row["sparsity"], []).append(row["tasks"])
    return found


def _by_sample(runs: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return each task's figures of each sample, as means over runs."""
    return {
        name: {
            figure: [
                fmean(map(float, digits)) for digits in zip(*(run[name]["right"][figure] for run in runs), strict=True)
            ]
            for figure in task["right"]
        }
        for name, task in runs[0].items()
    }


def _accuracy(task: dict[str, Any]) -> float:
    return task["acc"] if task["acc_norm"] is None else task["acc_norm"]


def _means(tasks: list[dict[str, Any]]) -> list[float]:
    """Return the unweighted means over tasks, of `acc_norm` where there is one and of `acc`."""
    return [fmean(map(_accuracy, tasks)), fmean(task["acc"] for task in tasks)]
