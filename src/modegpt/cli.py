"""The commands. Heavy imports stand inside the handlers, so that a wrong call is told at once."""

import os
import sys
import time
from pathlib import Path

import typer
from rich.table import Table

from .commands.bench import bench
from .commands.check import check
from .commands.compare import compare
from .commands.evaluate import evaluate
from .commands.export import export
from .commands.rejoin import rejoin
from .commands.report import report as report_page
from .commands.settings import configured
from .commands.shared import (
    DEVICE,
    JSON,
    MODEL,
    OneLineErrors,
    begin,
    check_json,
    check_plot,
    check_positive,
    console,
    dtype_name,
    emit,
    gathered,
)
from .commands.sweep import sweep
from .config import DTYPES, MODULES, NO_RANK, CompressionConfig, check_choice, check_seed
from .errors import InputError
from .versions import versions

PLOTS = (".png", ".svg", ".pdf")

app = typer.Typer(
    name="modegpt",
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if not asked:
        return
    found = versions()
    beside = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "python"))
    print(f"modegpt {found['modegpt']} ({beside})")
    raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_tell_version, is_eager=True, help="Show the versions and exit."
    ),
) -> None:
    """Makes a Hugging Face language model smaller and faster without training."""


@app.command()
@configured()
def compress(
    model: str = MODEL,
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for the checkpoint and report.json."),
    calibration: str = typer.Option("wikitext2", help="wikitext2, ptb, c4, alpaca, python-docs, or a text file."),
    *,
    config: CompressionConfig,
    resume: bool = typer.Option(False, "--resume", help="Go on with a run that was interrupted."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace DIR if it holds a model."),
    page: bool = typer.Option(False, "--report", help="Write DIR/report.html as well, see modegpt report."),
    json_file: str | None = JSON,
) -> None:
    """Compress MODEL and write an ordinary checkpoint with its report."""
    check_json(json_file, model, calibration, out=out)
    begin()
    from .commands.progress_bar import ProgressBar
    from .compress import compress_to_folder
    from .pages.html_report import require_extra, write_report
    from .running.distributed import leave_team, started_together

    if page:
        require_extra()
    with ProgressBar("reading model and text") as progress:
        report = compress_to_folder(
            model, calibration, out, config, overwrite=overwrite, resume=resume, progress=progress
        )
    leave_team()
    if started_together() and os.environ["RANK"] != "0":  # one process speaks for all
        return
    emit(report, json_file)
    if page:
        write_report(out)
    say = console(json_file).print
    counts, share = report["parameters"], report["sparsity"]
    say(f"{counts['dense']:,} parameters became {counts['compressed']:,}, in {report['seconds']['total']:.0f} s")
    say(f"removed: {share['blocks']:.2%} of the decoder blocks, {share['total']:.2%} of the model")
    for warning in gathered(report["warnings"]):
        say(f"warning: {warning}", markup=False)
    say(f"written to {out}", markup=False, soft_wrap=True)


@app.command()
@configured("plan")
def plan(
    model: str = MODEL,
    calibration: str = typer.Option("wikitext2", help="For rules with scores: a known data set, or a text file."),
    *,
    config: CompressionConfig,
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.png", help="Draw scores and sparsity by layer."),
    json_file: str | None = JSON,
) -> None:
    """Show what compress would do to every layer of MODEL, and compress nothing; --json writes a plan."""
    check_json(json_file, model, calibration, out=plot)
    if plot is not None:
        check_plot(plot, PLOTS)
    begin()
    from .commands.progress_bar import ProgressBar
    from .pages.plan_plot import plot_plan, require_plotting
    from .planning import make_plan
    from .ranks.units import score_parts

    if plot is not None:
        require_plotting()
    with ProgressBar("reading model and text") as progress:
        planned = make_plan(model, calibration, config, progress=progress)
    emit(planned, json_file)
    if plot is not None:
        plot_plan(planned, plot)
    table = Table("layer", "score", "removed", "mlp", "query-key", "value-output", "parameters")
    for index, layer in enumerate(planned["layers"]):
        parts = {} if layer["score"] is None else score_parts(config.allocation, layer["score"])
        ranks = [str(layer["ranks"][module] or NO_RANK) for module in MODULES]
        shown = ", ".join(f"{value:.4f}" for value in parts.values())
        table.add_row(str(index), shown, f"{layer['sparsity']:.2%}", *ranks, f"{layer['parameters']['compressed']:,}")
    say = console(json_file).print
    say(table)
    counts, share, cost = planned["parameters"], planned["sparsity"], planned["estimate"]
    cache = planned["kv_bytes_per_token"]
    say(f"{counts['dense']:,} parameters would become {counts['compressed']:,}")
    say(f"removed: {share['blocks']:.2%} of the decoder blocks, {share['total']:.2%} of the model")
    say(f"KV cache: {cache['dense']:,} bytes a token would become {cache['compressed']:,}")
    say(
        f"compress would need about {cost['device_bytes'] / 2**30:.1f} GiB for blocks and their moments, "
        f"{cost['host_bytes'] / 2**30:.1f} GiB for hidden states and {cost['seconds'] / 60:.1f} min ({cost['basis']})",
        markup=False,
    )
    if (scoring := planned["scoring_seconds"]) is not None:
        say(f"scoring took {scoring / 60:.1f} min; compress --plan spares it, with what --json wrote here")
    for warning in planned["warnings"]:
        say(f"warning: {warning}", markup=False)


@app.command()
def generate(
    model: str = MODEL,
    prompt: str = typer.Option(..., "--prompt", help="Text to continue; no chat template is applied."),
    max_new_tokens: int = typer.Option(64, help="Tokens to add at most."),
    temperature: float = typer.Option(0.0, help="0 takes the likeliest token each time."),
    seed: int = typer.Option(0, help="Of the sampling, when the temperature is above 0."),
    chat: bool = typer.Option(False, "--chat", help="Put the prompt into the model's chat template."),
    dtype: str = typer.Option("auto", help=f"To compute in: {', '.join(DTYPES)}."),
    device: str = DEVICE,
    json_file: str | None = JSON,
) -> None:
    """Continue a text with a dense or compressed MODEL."""
    check_choice("dtype", dtype, DTYPES)
    check_positive("max_new_tokens", max_new_tokens)
    if temperature and not 1e-3 <= temperature < float("inf"):
        raise InputError(f"temperature {temperature} is neither 0 nor a number from 0.001 up")
    check_seed(seed)
    check_json(json_file, model)
    begin()
    import torch

    from .loading.models import open_config, open_model, resolve_device
    from .loading.tokenizers import open_tokenizer
    from .measuring.prompts import LIKELIEST, encode
    from .report import protocol

    target, network_config = resolve_device(device), open_config(model)
    tokenizer = open_tokenizer(model)
    inputs = encode(tokenizer, prompt, network_config, max_new_tokens, chat).to(target)
    n_prompt = inputs["input_ids"].shape[1]
    network = open_model(model, dtype, target)
    torch.manual_seed(seed)
    how = {"do_sample": True, "temperature": temperature} if temperature else LIKELIEST
    start = time.perf_counter()
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, **how)[0, n_prompt:]  # pyright: ignore
    seconds = round(time.perf_counter() - start, 3)
    text = tokenizer.decode(output, skip_special_tokens=True)
    about = {"model": model, "dtype": dtype_name(network), "device": str(target), "chat": chat}
    about |= {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens, **protocol()}
    result = {"prompt": prompt, "text": text, "prompt_tokens": n_prompt, "tokens": len(output), "seconds": seconds}
    emit({"model": model, "results": [result], "protocol": about}, json_file)
    print(text, file=sys.stderr if json_file == "-" else sys.stdout)


@app.command()
def info(
    folder: Path = typer.Argument(..., metavar="DIR", help="A compressed checkpoint."), json_file: str | None = JSON
) -> None:
    """Show what a compressed checkpoint holds, without loading its weights."""
    check_json(json_file, folder)
    from .inspection import describe
    from .report import protocol

    found = describe(folder)
    emit({**found, "protocol": protocol()}, json_file)
    columns = ("layer", "mlp", "query-key", "value-output", "parameters", "KV bytes per token", "sparsity")
    table = Table(*columns, title=f"{found['model_type']}, {found['dtype']}, format {found['format_version']}")
    for index, layer in enumerate(found["layers"]):
        ranks = [str(layer["ranks"][module] or NO_RANK) for module in MODULES]
        cells = (f"{layer['parameters']:,}", f"{layer['kv_bytes_per_token']:,}", f"{layer['sparsity']:.2%}")
        table.add_row(str(index), *ranks, *cells)
    table.add_section()
    full = {module: {layer["dense_ranks"][module] for layer in found["layers"]} - {None} for module in MODULES}
    dense = [" or ".join(map(str, sorted(full[module] or {found["dense"][module]}))) for module in MODULES]
    counts, cache, share = found["parameters"], found["kv_bytes_per_token"], found["sparsity"]
    table.add_row("all", "", "", "", f"{counts['compressed']:,}", f"{cache['compressed']:,}", f"{share['total']:.2%}")
    table.add_row("dense", *dense, f"{counts['dense']:,}", f"{cache['dense']:,}", "")
    say = console(json_file).print
    say(table)
    say(f"decoder blocks: {share['blocks']:.2%} removed; weights on disk: {found['file_bytes'] / 1e6:,.1f} MB")


@app.command()
def demo(
    out: Path | None = typer.Option(None, "--out", metavar="DIR", help="Keep the compressed checkpoint there."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace DIR if it holds a model."),
    json_file: str | None = JSON,
) -> None:
    """Compress, evaluate and compare a small real model, with no network: a few minutes on two cores."""
    check_json(json_file, out=out)
    begin()
    from .commands.demo import run, tables
    from .commands.progress_bar import ProgressBar

    with ProgressBar("reading the model") as progress:
        result = run(out, overwrite, progress)
    emit(result, json_file)
    screen = console(json_file)
    for part in tables(result):
        screen.print(part)
    if out is not None:
        screen.print(f"the compressed checkpoint is in {out}", markup=False, soft_wrap=True)


# Commands with a file of their own.
app.command("bench")(bench)
app.command("check")(check)
app.command("compare")(compare)
app.command("eval")(evaluate)
app.command("export")(export)
app.command("rejoin")(rejoin)
app.command("report")(report_page)
app.command("sweep")(sweep)


def main() -> None:
    """Run the command line."""
    app()
