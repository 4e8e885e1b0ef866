"""`modegpt bench`: how fast a model is, alone or against another."""

import os
from dataclasses import asdict, replace
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from ..config import DTYPES, check_choice
from ..errors import InputError
from .shared import DEVICE, JSON, MODEL, begin, check_json, console, dtype_name, emit, names


def bench(
    model: str = MODEL,
    against: str | None = typer.Option(None, "--against", metavar="MODEL", help="Time this one in turn with it."),
    batch_sizes: str | None = typer.Option(None, help="Sequences at once, with commas; by default 1,8."),
    lengths: str | None = typer.Option(None, help="Tokens of the prompts, with commas; by default 128,512."),
    new_tokens: int | None = typer.Option(None, help="Tokens to decode after the first; by default 32."),
    repeats: int | None = typer.Option(None, help="Timed rounds; by default 5."),
    preset: str | None = typer.Option(None, help="paper: 256 sequences of 256 tokens, one token at a time."),
    compiled: bool = typer.Option(False, "--compile", help="Compile the decoding step, with a static cache."),
    dtype: str = typer.Option("auto", help=f"To compute in: {', '.join(DTYPES)}."),
    device: str = DEVICE,
    json_file: str | None = JSON,
) -> None:
    """Measure speed and memory of a dense or compressed MODEL, alone or in turn with another."""
    check_choice("dtype", dtype, DTYPES)
    given = {
        "batch_sizes": None if batch_sizes is None else _numbers("batch_sizes", batch_sizes),
        "lengths": None if lengths is None else _numbers("lengths", lengths),
        "new_tokens": new_tokens,
        "repeats": repeats,
    }
    given = {name: value for name, value in given.items() if value is not None}
    check_json(json_file, model, against)
    begin()
    # The profiler, which counts memory on a CPU, reports its start and end on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from ..benchmark import PRESETS, BenchSettings, benchmark, check_settings
    from ..loading.models import open_config, open_model, resolve_device
    from ..measuring.costs import file_bytes
    from ..report import mixed_dtypes, protocol
    from .progress_bar import ProgressBar

    if preset is not None:
        check_choice("preset", preset, tuple(PRESETS))
    settings = replace(BenchSettings() if preset is None else PRESETS[preset], **given, compile=compiled)
    target = resolve_device(device)
    sources = {"model": model} if against is None else {"model": model, "against": against}
    check_settings(settings, [open_config(name) for name in sources.values()])
    with ProgressBar("loading the model") as progress:
        networks = {key: open_model(name, dtype, target) for key, name in sources.items()}
        costs, rows = benchmark(networks, settings, progress)
    models = {
        key: {"name": name, **costs[key].sizes(), "file_bytes": file_bytes(name)} for key, name in sources.items()
    }
    dtypes = {key: dtype_name(network) for key, network in networks.items()}
    warnings = mixed_dtypes({models[key]["name"]: dtype for key, dtype in dtypes.items()})
    about = {"dtype": dtypes, "device": str(target)}
    about |= {"preset": preset, "prompts": "random tokens", **asdict(settings), **protocol()}
    emit({"models": models, "results": rows, "warnings": warnings, "protocol": about}, json_file)
    screen = console(json_file)
    for table in _tables(models, rows):
        screen.print(table)
    for warning in warnings:
        screen.print(f"warning: {warning}", markup=False)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in names(text))
    except ValueError:
        raise InputError(f"{name} '{text}' is no list of whole numbers; give them as in 1,8,32") from None


def _tables(models: dict[str, Any], rows: list[dict[str, Any]]) -> list[Table]:
    """Return what a person reads: the sizes, and the speeds with their ratios."""
    sizes = Table("", *(escape(about["name"]) for about in models.values()), *(["ratio"] if len(models) > 1 else []))
    labels = {
        "parameters": "parameters",
        "parameters_per_token": "parameters read per decoded token",
        "file_bytes": "file size, bytes",
        "kv_bytes_per_token": "KV cache, bytes per token",
    }
    for key, label in labels.items():
        values = [about[key] for about in models.values()]
        known = len(values) > 1 and all(values)
        cells = ["unknown" if value is None else f"{value:,}" for value in values]
        sizes.add_row(label, *cells, *([f"{values[0] / values[1]:.3f}"] if known else []))
    columns = ("prefill tokens/s", "decode tokens/s", "first token", "per token", "peak memory", "GMACs of both")
    speeds = Table("batch x prompt", "", *columns)
    for row in rows:
        point = f"{row['batch_size']} x {row['prompt_tokens']}"
        for key, figures in row["models"].items():
            cells = [f"{figures[f'{task}_tokens_per_second']:,.1f}" for task in ("prefill", "decode")]
            cells += [f"{figures[f'{what}_seconds'] * 1e3:,.1f} ms" for what in ("first_token", "token")]
            cells.append(f"{figures['peak_memory_bytes'] / 1e6:,.1f} MB")
            cells.append(" / ".join(f"{figures[f'{task}_macs'] / 1e9:,.3g}" for task in ("prefill", "decode")))
            speeds.add_row(point, escape(key), *cells)
        for ratios in row["speedups"].values():
            cells = [f"{r['median']:.2f} ({r['min']:.2f}-{r['max']:.2f})" for r in ratios.values()]
            speeds.add_row(point, "speedup", *cells)
        speeds.add_section()
    return [sizes, speeds]
