"""What stands on the HTML page, section by section: plots, tables and sentences from the run's figures.

Each function returns what its section shows (`lead`, `plots`, `tables`, `note`, `commands`), or None for nothing.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..config import NAMES, NO_RANK, TOKEN_IDS
from ..ranks.units import score_parts
from . import plots

DAMAGE = "What cutting each module alone does to the predictions: where it is little, more is removed."
IMPORTANCE = "Importance: high scores are spared."
STAGES = {
    "text": "reading the text",
    "load": "loading weights",
    "embed": "embedding the text",
    "scores": "importance scores",
    "coverage": "writing coverage windows",
    "moments": "moments of the dense blocks",
    "decompose": "decomposing",
    "forward": "running compressed blocks",
    "write": "writing",
}


class Plot(NamedTuple):
    """A plot, what a reader who cannot see it is told, and its caption."""

    svg: str
    alt: str
    caption: str


class Table(NamedTuple):
    """A table; cells are text, the first column names the row."""

    title: str
    head: list[str]
    rows: list[list[str]]


def tiles(run: dict[str, Any], found: dict[str, Any], figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, value and note of the figures that matter most."""
    counts, share = run["parameters"], run["sparsity"]
    cache = found["kv_bytes_per_token"]
    tiles = [
        ("parameters", _short(counts["compressed"]), f"of {_short(counts['dense'])}; {share['total']:.1%} removed"),
        ("removed from the blocks", f"{share['blocks']:.1%}", f"{_percent(share['requested'])} were asked for"),
        (
            "key-value cache",
            f"{cache['compressed']:,} B",
            f"a token, of {cache['dense']:,} B; {change(cache['dense'], cache['compressed'])}",
        ),
        ("weights on disk", f"{found['file_bytes'] / 1e6:,.1f} MB", found["dtype"]),
    ]
    for entry in figures["perplexity"]:
        models = entry["models"]
        if {"dense", "compressed"} <= models.keys():
            note = f"dense {models['dense']:.2f}; {change(models['dense'], models['compressed'])}"
            tiles.append((f"perplexity, {Path(entry['data']).name}", f"{models['compressed']:.2f}", note))
    first = next(iter((figures["speed"] or {}).get("points", [])), None)
    if first is not None and {"dense", "compressed"} == first["models"].keys() and "dense" in first["speedups"]:
        ratio = first["speedups"]["dense"]["decode"]["median"]
        point = f"{first['batch_size']} x {first['prompt_tokens']}"
        note = f"of the dense model's speed, {point} tokens of prompt"
        tiles.append(("decoding", f"{ratio:.2f} x", note))
    tiles.append(("time to compress", _duration(run["seconds"]["total"]), _where(run)))
    return tiles


def protocol(run: dict[str, Any], found: dict[str, Any], evals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what was compressed and how, and how it was measured."""
    text, config = run["calibration"], run["config"]
    pairs = [(each["ranks"], whole["dense_ranks"]) for each, whole in zip(run["layers"], found["layers"], strict=True)]
    cut = [module for module in config["modules"] if any(ranks[module] != full[module] for ranks, full in pairs)]
    modules = [NAMES[module] for module in cut or config["modules"]]
    lead = (
        f"{model_name(run)} (family {run['architecture']}, {len(run['layers'])} decoder blocks) was compressed "
        f"without training: pairs of weight matrices ({', '.join(modules)}) were decomposed together, block by "
        f"block, on what {text['samples']} x {text['seq_len']} tokens of {text['data']} send through them. "
        f"{run['sparsity']['blocks']:.2%} of the parameters of the decoder blocks were removed, "
        f"{run['sparsity']['total']:.2%} of all parameters; {_percent(run['sparsity']['requested'])} of the blocks "
        "were asked for."
    )
    multiple = f", every dim a multiple of {config['round_to']}" if (config["round_to"] or 1) > 1 else ""
    rows = [
        ["model", run["model"]],
        ["calibration", f"{text['data']}: {text['samples']} x {text['seq_len']} tokens{_windows(text, config)}"],
        ["allocation", config["allocation"] + multiple],
        ["solver", config["solver"]],
        ["weights written in", found["dtype"]],
    ]
    told = dict.fromkeys(_evaluation(result["protocol"]) for result in evals if result.get("protocol"))
    rows += [["evaluation", text] for text in told]
    return {"lead": lead, "tables": [Table("Protocol", ["", "value"], rows)]}


def layers(run: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return sparsity, ranks and scores by layer."""
    layers, full = run["layers"], [layer["dense_ranks"] for layer in found["layers"]]
    numbers = range(len(layers))
    removed = [100 * layer["sparsity"] for layer in found["layers"]]
    mean = 100 * run["sparsity"]["blocks"]
    kept = {
        label: (numbers, [rank and 100 * rank / whole[module] for rank, whole in zip(ranks, full, strict=True)])
        for module, label in NAMES.items()
        if any(ranks := [layer["ranks"][module] for layer in layers])
    }
    drawn = [
        Plot(
            plots.columns(removed, "layer", "% removed", (f"all blocks: {mean:.1f} %", mean)),
            f"Columns of the share of parameters removed from each of {len(layers)} layers, "
            f"between {min(removed):.1f} and {max(removed):.1f} %.",
            "Share of each layer's parameters that was removed.",
        ),
        Plot(
            plots.lines(kept, "layer", "% of the dense rank kept", whole=True, limits=(0, 105)),
            "Lines of the share of the dense rank that each module keeps, by layer; the figures are in the table.",
            "What each module keeps of its dense rank.",
        ),
    ]
    scores = run["allocation"]["scores"]
    if scores is not None:
        rule = run["allocation"]["rule"]
        shown = [score_parts(rule, score) for score in scores]
        parts = {name: (numbers, [score[name] for score in shown]) for name in shown[0]}
        label, caption = ("damage, nats", DAMAGE) if rule == "error" else ("score", IMPORTANCE)
        alt = "Lines of the score that the allocation rule gave each layer."
        drawn.append(Plot(plots.lines(parts, "layer", label, whole=True), alt, caption))
    rows = [
        [
            str(index),
            f"{own['sparsity']:.2%}",
            *(
                f"{rank:,} of {full[index][module]:,}" if (rank := layer["ranks"][module]) else NO_RANK
                for module in NAMES
            ),
            *(f"{layer['error'][module]:.4f}" if layer["ranks"][module] else NO_RANK for module in NAMES),
            f"{own['parameters']:,}",
        ]
        for index, (layer, own) in enumerate(zip(layers, found["layers"], strict=True))
    ]
    head = ["layer", "removed", *NAMES.values(), *(f"error, {label}" for label in NAMES.values()), "parameters"]
    note = "Ranks are neurons for the MLP, coordinates of a head for query-key and value-output."
    return {"plots": drawn, "tables": [Table("Every layer", head, rows)], "note": note}


def errors(run: dict[str, Any]) -> dict[str, Any] | None:
    """Return reconstruction error by layer and module; None if all were left whole."""
    numbers = range(len(run["layers"]))
    series = {}
    for module, label in NAMES.items():
        values = [layer["error"][module] or None for layer in run["layers"]]
        if any(values):
            series[label] = (numbers, values)
    if not series:
        return None
    present = [value for _, values in series.values() for value in values if value]
    log = max(present) > 20 * min(present)
    worst = {
        label: max(numbers, key=lambda index, values=values: values[index] or 0.0)
        for label, (_, values) in series.items()
    }
    told = "; ".join(
        f"{label}: largest {series[label][1][index]:.4f} in layer {index}" for label, index in worst.items()
    )
    plot = Plot(
        plots.lines(series, "layer", "relative error", log=log, whole=True),
        f"Lines of the relative reconstruction error by layer. {told}.",
        f"Relative error of each module's output on the calibration text. {told}.",
    )
    whole = any(not layer["error"][module] for layer in run["layers"] for module in NAMES)
    return {"plots": [plot], "note": "Modules left whole have no point." if whole else None}


def time(run: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each stage, and the peak of memory."""
    seconds = run["seconds"]
    stages: dict[str, float] = {
        STAGES.get(str(name), str(name)): value for name, value in seconds.items() if name != "total"
    }
    rest = seconds["total"] - sum(stages.values())
    if rest > 0.005 * seconds["total"]:
        stages["everything else"] = round(rest, 3)
    ordered = dict(sorted(stages.items(), key=lambda item: -item[1]))
    told = ", ".join(f"{name} {value:.1f} s" for name, value in ordered.items())
    plot = Plot(
        plots.bars(list(ordered), {"seconds": list(ordered.values())}, "seconds", form="{:.1f}"),
        f"Bars of the seconds of each stage: {told}.",
        f"{seconds['total']:.1f} s in all.",
    )
    peaks = [["of the process", f"{run['peak_memory_bytes'] / 2**20:,.0f} MiB"]]
    if run.get("peak_gpu_memory_bytes"):
        peaks.append(["of tensors on the GPU", f"{run['peak_gpu_memory_bytes'] / 2**20:,.0f} MiB"])
    return {"plots": [plot], "tables": [Table("Peak memory of the run", ["", "memory"], peaks)]}


def repeat(run: dict[str, Any], evals: Sequence[dict[str, Any]], bench: dict[str, Any] | None) -> dict[str, Any]:
    """Return the commands, every setting, the machine and the versions."""
    others = [result.get("protocol", {}).get("command") for result in (*evals, *([bench] if bench else []))]
    commands = list(dict.fromkeys(command for command in (run["command"], *others) if command))
    machine = [[name, str(value)] for name, value in run["machine"].items()]
    versions = [[name, value] for name, value in run["versions"].items()]
    shown = {name: value for name, value in run["config"].items() if name != "plan" and value is not None}
    if run["config"].get("plan"):
        shown["plan"] = f"ranks of {len(run['config']['plan'])} layers"
    settings = [[name.replace("_", " "), _setting(value)] for name, value in shown.items()]
    if run["allocation"]["temperature"] is not None:
        settings.append(["temperature that was used", f"{run['allocation']['temperature']:.6g}"])
    tables = [
        Table("Settings of the run", ["setting", "value"], settings),
        Table("Machine", ["", "value"], machine),
        Table("Versions", ["package", "version"], versions),
    ]
    return {"commands": commands, "tables": tables}


def _windows(text: dict[str, Any], config: dict[str, Any]) -> str:
    if text["data"] == TOKEN_IDS:
        return ""
    return (
        f", random windows, seed {config['seed']}" if config["sampling"] == "random" else ", from the start of the text"
    )


def _evaluation(about: dict[str, Any]) -> str:
    """Tell how `eval` measured."""
    limit = about.get("max_windows")
    windows = "all windows" if limit is None else f"the first {limit} windows"
    told = [f"{windows} of {about['stride']} tokens, the {about['split']} part of each text"] if about["stride"] else []
    told += [] if about.get("limit") is None else [f"the first {about['limit']} samples of each task"]
    return f"{'; '.join(told) or 'all samples of each task'}; in {about['dtype']} on {about['device']}"


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def model_name(run: dict[str, Any]) -> str:
    """Return the last part of the dense model's name."""
    path = Path(run["model"])
    return path.stem if path.suffix.lower() == ".gguf" else path.name or run["model"]


def _short(count: int) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.4g} {letter}"
    return str(count)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def change(before: float, after: float) -> str:
    """Return how much larger, in per cent; nothing of what was nothing, or is infinite."""
    known = before and math.isfinite(before) and math.isfinite(after)
    return f"{100 * (after / before - 1):+.1f} %" if known else ""


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def _where(run: dict[str, Any]) -> str:
    gpu = None if run["config"]["device"] == "cpu" else run["machine"].get("gpu")
    return str(gpu or f"{run['machine']['threads']} CPU thread(s)")
