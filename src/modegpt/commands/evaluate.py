"""`modegpt eval`: how good dense and compressed models are, one alone or several side by side."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import typer
from rich.markup import escape
from rich.table import Table

from ..config import DTYPES, check_choice
from ..errors import InputError
from ..pages.plots import labels
from ..progress import Progress
from .shared import (
    DEVICE,
    JSON,
    begin,
    check_json,
    check_positive,
    check_used,
    console,
    dtype_name,
    emit,
    names,
)

DEFAULT_DATA = "wikitext2"


class Bounds(NamedTuple):
    """How much is measured, and how much at once."""

    seq_len: int | None
    max_windows: int | None
    batch_size: int | None
    limit: int | None


def evaluate(
    models: list[str] = typer.Argument(..., metavar="MODEL...", help="Hub names, local folders or .gguf files."),
    data: list[str] = typer.Option(
        [], "--data", help=f"Text for perplexity, may be repeated: known data set or file ({DEFAULT_DATA})."
    ),
    tasks: list[str] = typer.Option(
        [], "--tasks", help="lm-eval's task names, .jsonl files, or paper; with commas, or repeated."
    ),
    limit: int | None = typer.Option(None, help="Use only the first samples of each task."),
    seq_len: int | None = typer.Option(None, help="Tokens of a window; by default 2048, or the models' positions."),
    max_windows: int | None = typer.Option(None, help="Use only the first windows of each text."),
    batch_size: int | None = typer.Option(None, help="Windows, or requests of a task, run at once."),
    dtype: str = typer.Option("auto", help=f"To compute in: {', '.join(DTYPES)}."),
    device: str = DEVICE,
    json_file: str | None = JSON,
) -> None:
    """Measure perplexity (--data) and zero-shot accuracy (--tasks), of one MODEL or of several side by side."""
    check_choice("dtype", dtype, DTYPES)
    bounds = Bounds(seq_len, max_windows, batch_size, limit)
    data = list(dict.fromkeys(data)) or ([] if tasks else [DEFAULT_DATA])
    _check(models, data, tasks, bounds)
    check_json(json_file, *models, *data, *tasks)
    begin()
    from ..calibration import check_source, start_token
    from ..comparing.in_turn import common_window, open_texts, seen_text
    from ..formats.text_part import about_text_part, text_part
    from ..inspection import calibrated_on
    from ..loading.models import open_model, outer_config, resolve_device
    from ..loading.tokenizers import open_tokenizer
    from ..measuring.zero_shot import harness_version, open_tasks
    from ..report import protocol
    from .progress_bar import ProgressBar

    target = resolve_device(device)
    for source in data:
        check_source(source)
    seen = list(dict.fromkeys(text for model in models for text in seen_text(calibrated_on(model) or "", data)))
    with ProgressBar("reading tasks and texts") as progress:
        opened = open_tasks([name for part in tasks for name in names(part)]) if tasks else []
        outer = {model: outer_config(model) for model in models}  # first: a tokenizer is found by its config
        tokenizers = {model: open_tokenizer(model) for model in models}
        configs = {model: text_part(config) for model, config in outer.items()}
        # One number for all models, so that their figures compare.
        window = common_window(list(configs.values()), seq_len) if data else 0
        bounds = bounds._replace(seq_len=window or None)
        texts = {model: open_texts(data, configs[model], tokenizers[model], window) for model in models}
        measured: list[dict[str, Any]] = []
        first = None
        for model, label in zip(models, labels(models), strict=True):
            network = open_model(model, dtype, target)
            step = _titled(progress, label) if len(models) > 1 else progress
            found, accuracies = _measure(network, tokenizers[model], texts[model], opened, bounds, step)
            about = {"label": label, "dtype": dtype_name(network), "parameters": network.num_parameters()}
            over = None if first is None else _over(accuracies, first)
            first = first or accuracies
            measured.append({"model": model, **about, **found, "over_first": over})
            del network  # before the next is loaded, or memory would have to hold two
    taken = [note for config in outer.values() for note in about_text_part(config)]
    warnings = [*_warnings(measured, texts), *seen, *dict.fromkeys(taken)]
    about = {"model": models[0], "models": models, "dtype": measured[0]["dtype"], "device": str(target)}
    about |= {"split": "evaluation", **bounds._asdict(), "stride": bounds.seq_len}
    about["start_token"] = start_token(configs[models[0]], tokenizers[models[0]])
    about |= {"num_fewshot": 0, "lm_eval": harness_version()} if opened else {}
    shown = {key: measured[0][key] for key in ("model", "results", "tasks", "mean")}
    emit({**shown, "models": measured, "warnings": warnings, "protocol": {**about, **protocol()}}, json_file)
    screen = console(json_file)
    ranked = [source for source in data if _alike(texts, source)]
    for table in [_comparison(measured, ranked)] if len(models) > 1 else _details(measured[0]):
        screen.print(table)
    for warning in warnings:
        screen.print(f"warning: {warning}", markup=False)


def _check(models: Sequence[str], data: Sequence[str], tasks: Sequence[str], bounds: Bounds) -> None:
    """Refuse what can be seen to be wrong without opening anything."""
    for name, value in bounds._asdict().items():
        check_positive(name, value)
    if bounds.seq_len == 1:
        raise InputError("seq_len 1 predicts nothing: the first token of a window is context only; give 2 or more")
    check_used(data, tasks, bounds.limit, {"--seq-len": bounds.seq_len, "--max-windows": bounds.max_windows})
    twice = next((model for index, model in enumerate(models) if model in models[:index]), None)
    if twice is not None:
        raise InputError(f"model '{twice}' is there twice; give each once")


def _measure(
    network: Any, tokenizer: Any, texts: dict[str, Any], tasks: Sequence[Any], bounds: Bounds, progress: Any
) -> tuple[dict[str, Any], Any]:
    """Return what the JSON says of one model, and the result of its tasks, None without any."""
    from ..comparing.in_turn import measure_texts
    from ..measuring.zero_shot import evaluate_tasks

    results = []
    if texts:
        assert bounds.seq_len is not None
        results = measure_texts(network, texts, bounds.seq_len, bounds.max_windows, bounds.batch_size, progress)
    if not tasks:
        return {"results": results, "tasks": [], "mean": None}, None
    accuracies = evaluate_tasks(network, tokenizer, tasks, bounds.limit, bounds.batch_size, progress)
    return {"results": results, "tasks": accuracies.rows(), "mean": accuracies.mean._asdict()}, accuracies


def _over(accuracies: Any, first: Any) -> dict[str, Any]:
    """Return what the JSON says of a model's accuracies beside the first one's."""
    found = accuracies.over(first)
    return {"tasks": {task: part._asdict() for task, part in found.tasks.items()}, "mean": found.mean._asdict()}


def _titled(progress: Progress, label: str) -> Progress:
    return lambda stage, done, total: progress(f"{label}: {stage}", done, total)


def _alike(texts: dict[str, dict[str, Any]], source: str) -> bool:
    """Whether all models predict the same tokens, without which perplexities do not compare."""
    first, *others = [own[source] for own in texts.values()]
    return all(first.equal(other) for other in others)


def _warnings(measured: Sequence[dict[str, Any]], texts: dict[str, dict[str, Any]]) -> list[str]:
    from ..report import mixed_dtypes

    found = [
        f"the tokenizers differ on '{source}': the perplexities are over different tokens, and none is marked as best"
        for source in next(iter(texts.values()))
        if not _alike(texts, source)
    ]
    found += mixed_dtypes({entry["label"]: entry["dtype"] for entry in measured})
    return found + [
        f"{entry['label']}: {task['truncated']} requests of {task['task']} were cut to the model's positions"
        for entry in measured
        for task in entry["tasks"]
        if task["truncated"]
    ]


def _details(entry: dict[str, Any]) -> list[Table]:
    """Return the tables of one model."""
    tables = []
    if entry["results"]:
        tables.append(Table("data", "perplexity", "tokens", "windows"))
        for row in entry["results"]:
            tables[-1].add_row(
                escape(row["data"]), f"{row['perplexity']:.4f}", f"{row['tokens']:,}", str(row["windows"])
            )
    if entry["tasks"]:
        tables.append(Table("task", "acc", "acc_norm", "samples"))
        for row in entry["tasks"]:
            cells = [_accuracy(row[name], row[f"{name}_stderr"]) for name in ("acc", "acc_norm")]
            tables[-1].add_row(escape(row["task"]), *cells, f"{row['samples']:,}")
        tables[-1].add_section()
        mean = entry["mean"]
        tables[-1].add_row("mean", _accuracy(mean["acc"], mean["acc_stderr"]), _accuracy(mean["acc_norm"], None), "")
    return tables


def _accuracy(value: float | None, error: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.2%}" if error is None else f"{value:{sign}.2%} ± {error:.2%}"


def _comparison(measured: Sequence[dict[str, Any]], ranked: Sequence[str]) -> Table:
    """Return one table of all models, a column each, with the best value of a row marked."""
    first = escape(measured[0]["label"])
    caption = "* best of the row" + (f"; change and flips are against {first}" if measured[0]["tasks"] else "")
    table = Table("", *(escape(entry["label"]) for entry in measured), caption=caption)
    table.add_row("parameters", *(f"{entry['parameters']:,}" for entry in measured))
    sources = [row["data"] for row in measured[0]["results"]]
    for index, label in enumerate(labels(sources)):
        values = [entry["results"][index]["perplexity"] for entry in measured]
        best = min(values) if sources[index] in ranked else None
        table.add_row(escape(f"{label}, perplexity"), *_marked(values, best, "{:.4f}"))
    for index, row in enumerate(measured[0]["tasks"]):
        for name in ("acc", "acc_norm"):
            if row[name] is not None:
                values = [entry["tasks"][index][name] for entry in measured]
                table.add_row(escape(f"{row['task']}, {name}"), *_marked(values, max(values), "{:.2%}"))
    if len(measured[0]["tasks"]) > 1:
        table.add_section()
        for name in ("acc", "acc_norm"):
            values = [entry["mean"][name] for entry in measured]
            table.add_row(f"mean {name}", *_marked(values, max(values), "{:.2%}"))
    for name in ("acc", "acc_norm"):
        if any(row[name] is not None for row in measured[0]["tasks"]):
            means = [entry["over_first"]["mean"] for entry in measured[1:]]
            cells = (_accuracy(mean[name], mean[f"{name}_stderr"], "+") for mean in means)
            table.add_row(f"{name}, change", "", *cells)
            table.add_row(f"{name}, flips", "", *(f"{mean[f'{name}_flips']:.2%}" for mean in means))
    return table


def _marked(values: Sequence[float], best: float | None, form: str) -> list[str]:
    """Write values, those that read like the best one with a star; none if all read alike."""
    shown = [form.format(value) for value in values]
    star = None if best is None or len(set(shown)) == 1 else form.format(best)
    return [f"[bold]{text} *[/bold]" if text == star else text for text in shown]
