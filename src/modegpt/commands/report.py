"""`modegpt report`: one HTML page about a compressed checkpoint."""

import json
from pathlib import Path
from typing import Any

import typer

from ..config import DTYPES, IN_MEMORY, check_choice
from ..errors import InputError
from .shared import DEVICE, JSON, begin, check_file, check_json, check_positive, check_used, console, emit


def report(
    folder: Path = typer.Argument(..., metavar="DIR", help="A folder that modegpt compress wrote."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE.html", help="The page; by default DIR/report.html."),
    eval_files: list[Path] = typer.Option([], "--eval", metavar="FILE", help="Of modegpt eval --json; repeatable."),
    bench_file: Path | None = typer.Option(None, "--bench", metavar="FILE", help="Of modegpt bench --json."),
    against: str | None = typer.Option(None, help="The dense model to measure beside it; else the one of the run."),
    data: list[str] = typer.Option([], "--data", help="Measure perplexity on this, of both models; repeatable."),
    prompt: list[str] = typer.Option([], "--prompt", help="Let both models continue this text; repeatable."),
    seq_len: int | None = typer.Option(None, help="Tokens of a window; by default 2048, or the model's positions."),
    max_windows: int | None = typer.Option(None, help="Use only the first windows of each text."),
    max_new_tokens: int | None = typer.Option(None, help="Tokens to add to a prompt at most; by default 64."),
    dtype: str = typer.Option("auto", help=f"To measure in: {', '.join(DTYPES)}."),
    device: str = DEVICE,
    json_file: str | None = JSON,
) -> None:
    """Write one self-contained HTML page about a compression: layers, errors, quality, speed, time, samples."""
    check_choice("dtype", dtype, DTYPES)
    for name, value in (("seq_len", seq_len), ("max_windows", max_windows), ("max_new_tokens", max_new_tokens)):
        check_positive(name, value)
    measuring = {"--against": against is not None, "--dtype": dtype != "auto", "--device": device != "auto"}
    if any(measuring.values()) and not data and not prompt:
        given = " and ".join(option for option, is_given in measuring.items() if is_given)
        raise InputError(f"{given}: nothing is measured by that alone; add --data, --prompt or both")
    if max_new_tokens is not None and not prompt:
        raise InputError("--max-new-tokens is for --prompt, and none was given")
    check_used(data, (), None, {"--seq-len": seq_len, "--max-windows": max_windows})
    target = _target(folder, out)
    check_json(json_file, folder, bench_file, *eval_files, *data, out=target)
    evals = [_read(path, "eval") for path in eval_files]
    bench = None if bench_file is None else _read(bench_file, "bench")
    begin()
    from ..pages.html_report import read_run, require_extra, write_report

    require_extra()
    run, _ = read_run(folder)
    samples: list[dict[str, Any]] = []
    if data or prompt:
        from ..comparing.in_turn import measure, seen_text
        from ..inspection import calibrated_on
        from ..report import mixed_dtypes
        from .progress_bar import ProgressBar

        if against is None and run["model"] == IN_MEMORY:
            raise InputError("the dense model of this run was in memory; name one with --against")
        if against is None and Path(run["model"]).is_absolute() and not Path(run["model"]).exists():
            raise InputError(f"the dense model of this run, '{run['model']}', is not there: name it with --against")
        models = [against or run["model"], str(folder)]
        with ProgressBar("loading the models") as progress:
            measured, samples = measure(
                models,
                data,
                prompt,
                seq_len=seq_len,
                max_windows=max_windows,
                max_new_tokens=max_new_tokens or 64,
                dtype=dtype,
                device=device,
                progress=progress,
            )
        dtypes = {part["model"]: part["protocol"]["dtype"] for part in measured}
        warnings = [*mixed_dtypes(dtypes), *seen_text(calibrated_on(str(folder)) or "", data)]
        for warning in warnings:
            console(json_file).print(f"warning: {warning}", markup=False, soft_wrap=True)
        evals += [{**part, "warnings": warnings} for part in measured]
    try:
        result = write_report(folder, target, evals=evals, bench=bench, samples=samples, dense=against)
    except (KeyError, TypeError, AttributeError, IndexError) as problem:
        if not eval_files and bench_file is None:
            raise
        given = ", ".join(str(path) for path in (*eval_files, *([bench_file] if bench_file else [])))
        raise InputError(f"{given}: a figure is missing ({problem}); write the file with modegpt again") from problem
    from ..report import protocol

    emit({**result, "protocol": protocol()}, json_file)
    console(json_file).print(f"written to {target}, {result['bytes'] / 1e3:.0f} kB", markup=False, soft_wrap=True)


def _target(folder: Path, out: Path | None) -> Path:
    """Return the page's file, once it is sure that it can be written."""
    from ..pages.html_report import PAGE_NAME

    target = out if out is not None else folder / PAGE_NAME
    if out is not None or folder.is_dir():  # a folder that is not there is told of as what it is
        check_file("--out", target)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out '{target}': give a file name that ends in .html")
    return target


def _read(path: Path, command: str) -> dict[str, Any]:
    """Read what another command's `--json` wrote."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"--{command} '{path}' cannot be read as JSON: {problem}") from problem
    models = result.get("models") if isinstance(result, dict) else None
    fits = isinstance(models, dict) if command == "bench" else isinstance(models, list)
    if not fits or not isinstance(result.get("results"), list):
        raise InputError(f"--{command} '{path}' is something else; give a file that modegpt {command} --json wrote")
    return result
