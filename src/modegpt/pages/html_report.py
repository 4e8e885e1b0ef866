"""The run's one-file HTML page: what was done to every layer, what it cost and what it gave. Needs no network."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import REPORT_NAME, read_number
from ..disk import write_whole
from ..errors import InputError, MissingExtraError
from ..inspection import describe
from ..report import OTHER_DTYPES, mixed_dtypes
from . import plots, quality, sections

PAGE_NAME = "report.html"


def require_extra() -> None:
    """Raise `MissingExtraError` unless the packages of the extra `report` are installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise MissingExtraError("the HTML report", "jinja2", "report") from None
    plots.require_matplotlib("the HTML report")


def write_report(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    evals: Sequence[dict[str, Any]] = (),
    bench: dict[str, Any] | None = None,
    samples: Sequence[dict[str, Any]] = (),
    dense: str | None = None,
) -> dict[str, Any]:
    """Write the page of a compressed checkpoint; a section appears only where there are figures for it.

    Args:
        folder: what `modegpt compress` wrote.
        out: the page's file; `report.html` in the folder by default.
        evals: results of `modegpt eval --json`, of the dense and the compressed model.
        bench: the result of `modegpt bench --json`.
        samples: `model`, `prompt` and `text` of generated continuations.
        dense: what the dense model is called in these figures, if not as in the run.

    Returns:
        `file`, `bytes`, `sections`, and the figures on the page under `perplexity`, `accuracy`, `samples`, `speed`.

    Raises:
        InputError: the folder holds no report of a run.
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    require_extra()
    run, found = read_run(folder)
    names = Names({run["model"]: "dense", str(folder): "compressed"} | ({dense: "dense"} if dense else {}))
    sizes = run["parameters"] | ({"dense": None} if dense else {})  # another dense model may be of another size
    timed = [] if bench is None else [(names(about["name"]), about) for about in bench["models"].values()]
    _check_sizes(sizes, [*_measured(evals, names), *timed])
    figures = {
        "perplexity": perplexities(evals, names),
        "accuracy": accuracies(evals, names),
        "speed": speeds(bench, names),
        "samples": [
            {**sample, "model": names(sample["model"])}
            for sample in sorted(samples, key=lambda sample: sample["prompt"])
        ],
    }
    content = [
        ("done", "What was done", sections.protocol(run, found, evals)),
        ("layers", "Sparsity and ranks by layer", sections.layers(run, found)),
        ("error", "Reconstruction error", sections.errors(run)),
        ("quality", "Perplexity and accuracy", quality.quality(figures)),
        ("speed", "Speed and memory", quality.speed(run, found, figures["speed"])),
        ("samples", "What the models write", {"samples": figures["samples"]} if samples else None),
        ("time", "Where the time went", sections.time(run)),
        ("repeat", "To repeat this", sections.repeat(run, evals, bench)),
    ]
    shown = [{"id": name, "title": title, **section} for name, title, section in content if section]
    page = _render(
        {
            "title": f"{sections.model_name(run)}, {run['sparsity']['blocks']:.1%} of its blocks removed",
            "model": sections.model_name(run),
            "run": run,
            "warnings": warned(run, evals, bench, names),
            "tiles": sections.tiles(run, found, figures),
            "sections": shown,
        }
    )
    target = Path(out) if out is not None else Path(folder) / PAGE_NAME
    write_whole(page, target)
    return {"file": str(target), "bytes": len(page.encode()), "sections": [s["id"] for s in shown], **figures}


def read_run(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint's `report.json`, and what `modegpt info` tells of it."""
    file = Path(folder) / REPORT_NAME
    found = describe(folder)
    if not file.is_file():
        raise InputError(f"folder '{folder}' has no {REPORT_NAME}; give a folder that modegpt compress wrote")
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        complete = len(run["layers"]) == len(found["layers"])
    except (ValueError, KeyError, TypeError):
        complete = False
        run = {}
    if not complete:
        raise InputError(f"'{file}' is not the report of this checkpoint; compress the model again")
    return run, found


class Names:
    """What a model is called on the page: `dense`, `compressed`, or the last part of its own name."""

    def __init__(self, known: dict[str, str]) -> None:
        """Note what the models of the run are called."""
        self._known = {self._key(model): name for model, name in known.items()}
        self._short: dict[str, str] = {}

    def __call__(self, model: str) -> str:
        """Return the name of a model as a command was given it."""
        key = self._key(model)
        if key in self._known:
            return self._known[key]
        short = Path(model).name or model
        # Another model of that name was there before: only the whole path tells them apart.
        return short if self._short.setdefault(short, key) == key else model

    @staticmethod
    def _key(model: str) -> str:
        return str(Path(model).resolve()) if Path(model).exists() else str(model)


def warned(
    run: dict[str, Any], evals: Sequence[dict[str, Any]], bench: dict[str, Any] | None, names: Names
) -> list[tuple[str, list[str]]]:
    """Return under a title each what the run and the measurements on the page warn of.

    None of them knows the dtype of another: that is asked here, of those that do not tell it.
    """
    results = (*evals, *([bench] if bench else []))
    measured = [warning for result in results for warning in result.get("warnings") or ()]
    dtypes = {model: part["dtype"] for model, part in _measured(evals, names) if "dtype" in part}
    if not any(warning.startswith(OTHER_DTYPES) for warning in measured):
        measured += mixed_dtypes(dtypes)
    told = [("What the run warns of", run["warnings"]), ("What the measurements warn of", [*dict.fromkeys(measured)])]
    return [(title, warnings) for title, warnings in told if warnings]


def perplexities(evals: Sequence[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return one entry for each text and window length: `data`, `seq_len`, `tokens`, and `models` by name."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for model, measured in _measured(evals, names):
        for entry in measured.get("results") or []:
            place = found.setdefault((entry["data"], entry["seq_len"], entry["tokens"]), {})
            place[model] = read_number(entry["perplexity"])
    return [
        {"data": data, "seq_len": seq_len, "tokens": tokens, "models": dict(sorted(models.items(), key=_dense_first))}
        for (data, seq_len, tokens), models in found.items()
    ]


def accuracies(evals: Sequence[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return one entry for each task and metric: `task`, `metric`, `samples`, and `models` by name.

    Each model has `value` and `stderr`. The last entry is the unweighted mean of all tasks' `acc`, where the models
    were given the same ones, each with one number of samples.
    """
    found: dict[tuple[str, str, int], dict[str, dict[str, float | None]]] = {}
    for model, measured in _measured(evals, names):
        for entry in measured.get("tasks") or []:
            for metric in ("acc", "acc_norm"):
                if entry.get(metric) is not None:
                    place = found.setdefault((entry["task"], metric, entry["samples"]), {})
                    place[model] = {"value": entry[metric], "stderr": entry.get(f"{metric}_stderr")}
    entries = [
        {"task": task, "metric": metric, "samples": samples, "models": dict(sorted(models.items(), key=_dense_first))}
        for (task, metric, samples), models in found.items()
    ]
    shared = [entry["models"] for entry in entries if entry["metric"] == "acc"]
    once = len({(entry["task"], entry["metric"]) for entry in entries}) == len(entries)
    if shared and once and all(entry["models"].keys() == shared[0].keys() for entry in entries):
        means = {model: _mean([models[model] for models in shared]) for model in shared[0]}
        entries.append({"task": "mean", "metric": "acc", "samples": None, "models": means})
    return entries


def _mean(figures: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean of some values, and its standard error, where all have one: they are of other samples."""
    errors = [figure["stderr"] for figure in figures]
    spread = None if None in errors else math.hypot(*errors) / len(errors)
    return {"value": sum(figure["value"] for figure in figures) / len(figures), "stderr": spread}


def speeds(bench: dict[str, Any] | None, names: Names) -> dict[str, Any] | None:
    """Return a `bench` result with the page's names for its models."""
    if bench is None:
        return None
    called = {key: names(about["name"]) for key, about in bench["models"].items()}
    if len(set(called.values())) < len(called):  # a model against itself
        called = {key: f"{name}, {key}" for key, name in called.items()}
    points = [
        {
            **{key: row[key] for key in ("batch_size", "prompt_tokens", "new_tokens")},
            "models": {called[key]: figures for key, figures in row["models"].items()},
            "speedups": {called[key]: ratios for key, ratios in row.get("speedups", {}).items()},
        }
        for row in bench["results"]
    ]
    return {"models": {called[key]: about for key, about in bench["models"].items()}, "points": points}


def _check_sizes(own: dict[str, int | None], measured: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Refuse figures of another model than that of the run, as one that was in the folder before."""
    for name, figures in measured:
        sizes = figures.get("parameters"), own.get(name)
        if None not in sizes and sizes[0] != sizes[1]:
            raise InputError(
                f"the figures of the {name} model are of one with {sizes[0]:,} parameters, and that of this run has "
                f"{sizes[1]:,}: measure it again"
            )


def _dense_first(item: tuple[str, Any]) -> tuple[bool, bool]:
    return item[0] != "dense", item[0] != "compressed"


def _measured(evals: Sequence[dict[str, Any]], names: Names) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the figures of each model of each `eval` result, which may hold one or several."""
    return [(names(part["model"]), part) for result in evals for part in result.get("models") or [result]]


def _render(context: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("modegpt", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["inline"] = plots.inline
    return environment.get_template("report.html.j2").render(context)
