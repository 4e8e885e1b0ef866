"""The page's figures of quality, speed and memory: what the models are worth beside each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plots
from .sections import Plot, Table, change


def quality(figures: dict[str, Any]) -> dict[str, Any] | None:
    """Return perplexity and accuracy of the models; None without figures."""
    content: dict[str, Any] = {"plots": [], "tables": []}
    texts, tasks = figures["perplexity"], figures["accuracy"]
    if texts:
        models = _models(texts)
        labels = [f"{Path(entry['data']).name}, {entry['seq_len']}" for entry in texts]
        series = {model: [entry["models"].get(model) for entry in texts] for model in models}
        alt = "Bars of perplexity by text and model; the figures are in the table."
        drawn = plots.bars(labels, series, "perplexity (lower is better)")
        content["plots"].append(Plot(drawn, alt, "Perplexity, by text and window length."))
        rows = []
        for entry in texts:
            shown = [f"{entry['models'][model]:.4f}" if model in entry["models"] else "" for model in models]
            rows.append([entry["data"], str(entry["seq_len"]), f"{entry['tokens']:,}", *shown])
        content["tables"].append(Table("Perplexity", ["text", "window", "tokens", *models], rows))
    if tasks:
        models = _models(tasks)
        plain = [entry for entry in tasks if entry["metric"] == "acc"]
        values = {model: [_percent(entry, model, "value") for entry in plain] for model in models}
        spread = {model: [_percent(entry, model, "stderr") for entry in plain] for model in models}
        whiskers = {model: [(half or 0.0, half or 0.0) for half in halves] for model, halves in spread.items()}
        drawn = plots.bars([e["task"] for e in plain], values, "accuracy, %", form="{:.1f}", errors=whiskers)
        alt = "Bars of zero-shot accuracy by task and model; the figures are in the table."
        content["plots"].append(Plot(drawn, alt, "Zero-shot accuracy; the whiskers are one standard error."))
        rows = [
            [e["task"], e["metric"], str(e["samples"] or ""), *(_accuracy(e, model) for model in models)] for e in tasks
        ]
        content["tables"].append(Table("Accuracy, %", ["task", "metric", "samples", *models], rows))
    return content if texts or tasks else None


def _models(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return every model of some entries, in the order of their first mention."""
    return list(dict.fromkeys(model for entry in entries for model in entry["models"]))


def _percent(entry: dict[str, Any], model: str, key: str) -> float | None:
    value = entry["models"].get(model, {}).get(key)
    return None if value is None else 100 * value


def _accuracy(entry: dict[str, Any], model: str) -> str:
    value, half = (_percent(entry, model, key) for key in ("value", "stderr"))
    return "" if value is None else f"{value:.2f}" if half is None else f"{value:.2f} ± {half:.2f}"


def speed(run: dict[str, Any], found: dict[str, Any], bench: dict[str, Any] | None) -> dict[str, Any]:
    """Return memory, and speeds where they were measured."""
    cache, counts = found["kv_bytes_per_token"], run["parameters"]
    sizes = {"parameters": counts, "key-value cache, bytes a token": cache}
    content: dict[str, Any] = {"plots": [], "tables": []}
    if bench is not None:
        files = {name: about.get("file_bytes") for name, about in bench["models"].items()}
        if files.get("dense") and files.get("compressed"):
            sizes["weights on disk, bytes"] = files
        if any(point["speedups"] for point in bench["points"]):
            content["plots"].append(_speedups(bench))
        content["tables"].append(_speed_table(bench))
    rows = [
        [label, *(f"{pair[name]:,}" for name in ("dense", "compressed")), change(pair["dense"], pair["compressed"])]
        for label, pair in sizes.items()
    ]
    content["tables"].append(Table("Memory", ["", "dense", "compressed", "change"], rows))
    return content


def _speedups(bench: dict[str, Any]) -> Plot:
    first, other = list(bench["models"])[:2]
    ratios = [point["speedups"][other] for point in bench["points"]]
    values = {task: [ratio[task]["median"] for ratio in ratios] for task in ("prefill", "decode")}
    whiskers = {
        task: [(r[task]["median"] - r[task]["min"], r[task]["max"] - r[task]["median"]) for r in ratios]
        for task in values
    }
    labels = [_point(point) for point in bench["points"]]
    drawn = plots.bars(labels, values, f"speed of {first} / speed of {other}", errors=whiskers, level=(other, 1.0))
    told = "; ".join(
        f"{label}: prefill {prefill:.2f}, decode {decode:.2f}"
        for label, prefill, decode in zip(labels, *values.values(), strict=True)
    )
    note = "Both ran in turn, in one process: the median of the rounds' ratios, the whiskers their range."
    return Plot(drawn, f"Bars of the speed of {first} over that of {other}. {told}.", note)


def _speed_table(bench: dict[str, Any]) -> Table:
    head = ["sequences x prompt", "model", "prefill, tokens/s", "decode, tokens/s", "first token, ms", "a token, ms"]
    rows = [
        [
            _point(point),
            model,
            *(f"{figures[f'{task}_tokens_per_second']:,.1f}" for task in ("prefill", "decode")),
            *(f"{1e3 * figures[f'{what}_seconds']:,.1f}" for what in ("first_token", "token")),
            f"{figures['peak_memory_bytes'] / 1e6:,.0f}",
        ]
        for point in bench["points"]
        for model, figures in point["models"].items()
    ]
    return Table("Speed", [*head, "peak memory, MB"], rows)


def _point(point: dict[str, Any]) -> str:
    return f"{point['batch_size']} x {point['prompt_tokens']}"
