"""The commands. Heavy imports stand inside the handlers, so that a wrong call is told at once."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from .config import DTYPES, CompressionConfig, check_choice
from .errors import InputError, ModegptError

INTERRUPTED = 130
"""What shells return for a program that Ctrl-C ended."""


class OneLineErrors(TyperGroup):
    """A command group that answers every failure a user can cause with one line on standard error."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command and leave with its exit code: 0 done, 1 failed, 2 wrong call."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except ModegptError as problem:
            _fail(str(problem), problem.exit_code)
        except (OSError, MemoryError) as problem:
            _fail(f"{type(problem).__name__}: {problem}", 1)
        except Exception as problem:
            # The parser's own complaints: their base class has moved between typer's versions, the method has not.
            if not hasattr(problem, "format_message"):
                raise
            _fail(f"{problem.format_message() or 'no command was given'}; see --help", 2)  # pyright: ignore
        if code == INTERRUPTED:
            _fail("interrupted; no result was written, and compress --resume goes on where it stopped", INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


app = typer.Typer(
    name="modegpt",
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Makes a Hugging Face language model smaller and faster without training.",
)

MODEL = typer.Argument(..., metavar="MODEL", help="Hub name, local folder or .gguf file.")
DEVICE = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N.")
JSON = typer.Option(None, "--json", metavar="FILE", help="Write the result as JSON; - for standard output.")
DEFAULTS = CompressionConfig()
ALLOCATION_HELP = "uniform, influence, influence-blocks or owl."


@app.command()
def compress(
    model: str = MODEL,
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for the checkpoint and report.json."),
    sparsity: float = typer.Option(DEFAULTS.sparsity, help="Share of the blocks' parameters to remove, in [0, 1)."),
    calibration: str = typer.Option("wikitext2", help="wikitext2, ptb, c4, alpaca, python-docs, or a text file."),
    samples: int = typer.Option(DEFAULTS.samples, help="Calibration sequences."),
    seq_len: int = typer.Option(DEFAULTS.seq_len, help="Tokens of each."),
    sampling: str = typer.Option(DEFAULTS.sampling, help="random windows, or sequential from the start."),
    seed: int = typer.Option(DEFAULTS.seed, help="Of the random windows."),
    allocation: str = typer.Option(DEFAULTS.allocation, help=ALLOCATION_HELP),
    temperature: str = typer.Option("auto", help="Of the influence rules, in units of the score, or auto."),
    max_sparsity: float = typer.Option(DEFAULTS.max_sparsity, help="Upper bound on one layer, if not uniform."),
    round_to: int = typer.Option(DEFAULTS.round_to, help="Keep every dim a multiple of this: 8, 16 or 64 suit GPUs."),
    owl_threshold: float = typer.Option(DEFAULTS.owl_threshold, help="OWL's M."),
    owl_lambda: float = typer.Option(DEFAULTS.owl_lambda, help="OWL's lambda."),
    plan_file: Path | None = typer.Option(None, "--plan", metavar="FILE", help="Ranks by layer, from modegpt plan."),
    modules: str = typer.Option(",".join(DEFAULTS.modules), help="Which of mlp, qk and vo, with commas."),
    solver: str = typer.Option(DEFAULTS.solver, help="paper."),
    ridge: float = typer.Option(DEFAULTS.ridge, help="Lambda of the MLP's leverage scores."),
    dtype: str = typer.Option(DEFAULTS.dtype, help=f"Of the written weights: {', '.join(DTYPES)}."),
    device: str = DEVICE,
    batch_size: int | None = typer.Option(None, help="Sequences at once; by default about 4096 tokens."),
    max_host_memory: int | None = typer.Option(None, help="Bytes of hidden states in memory; the rest goes to disk."),
    resume: bool = typer.Option(False, "--resume", help="Go on with a run that was interrupted."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace DIR if it exists."),
    json_file: str | None = JSON,
) -> None:
    """Compress MODEL and write an ordinary checkpoint with its report."""
    from .plan_file import read_plan

    config = CompressionConfig(
        sparsity=sparsity,
        samples=samples,
        seq_len=seq_len,
        sampling=sampling,
        seed=seed,
        allocation="plan" if plan_file is not None else allocation,
        temperature=_number_or_auto("temperature", temperature),
        max_sparsity=max_sparsity,
        round_to=round_to,
        owl_threshold=owl_threshold,
        owl_lambda=owl_lambda,
        plan=None if plan_file is None else read_plan(plan_file),
        modules=_names(modules),
        solver=solver,
        ridge=ridge,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        max_host_memory=max_host_memory,
    )
    _check_json(json_file)
    _quiet()
    from .compress import compress_to_folder
    from .distributed import leave_team
    from .progress import ProgressBar

    with ProgressBar("reading model and text") as progress:
        report = compress_to_folder(
            model, calibration, out, config, overwrite=overwrite, resume=resume, progress=progress
        )
    leave_team()
    if os.environ.get("RANK", "0") != "0":  # under torchrun, one process speaks for all
        return
    _emit(report, json_file)
    say = _console(json_file).print
    counts, share = report["parameters"], report["sparsity"]
    say(f"{counts['dense']:,} parameters became {counts['compressed']:,}, in {report['seconds']['total']:.0f} s")
    say(f"removed: {share['blocks']:.2%} of the decoder blocks, {share['total']:.2%} of the model")
    for warning in report["warnings"]:
        say(f"warning: {warning}", markup=False)
    say(f"written to {out}", markup=False, soft_wrap=True)


@app.command()
def plan(
    model: str = MODEL,
    sparsity: float = typer.Option(DEFAULTS.sparsity, help="Share of the blocks' parameters to remove, in [0, 1)."),
    calibration: str = typer.Option("wikitext2", help="For rules with scores: a known data set, or a text file."),
    samples: int = typer.Option(DEFAULTS.samples, help="Calibration sequences."),
    seq_len: int = typer.Option(DEFAULTS.seq_len, help="Tokens of each."),
    sampling: str = typer.Option(DEFAULTS.sampling, help="random windows, or sequential from the start."),
    seed: int = typer.Option(DEFAULTS.seed, help="Of the random windows."),
    allocation: str = typer.Option(DEFAULTS.allocation, help=ALLOCATION_HELP),
    temperature: str = typer.Option("auto", help="Of the influence rules, in units of the score, or auto."),
    max_sparsity: float = typer.Option(DEFAULTS.max_sparsity, help="Upper bound on one layer, if not uniform."),
    round_to: int = typer.Option(DEFAULTS.round_to, help="Keep every dim a multiple of this: 8, 16 or 64 suit GPUs."),
    owl_threshold: float = typer.Option(DEFAULTS.owl_threshold, help="OWL's M."),
    owl_lambda: float = typer.Option(DEFAULTS.owl_lambda, help="OWL's lambda."),
    modules: str = typer.Option(",".join(DEFAULTS.modules), help="Which of mlp, qk and vo, with commas."),
    device: str = DEVICE,
    plot: Path | None = typer.Option(None, "--plot", metavar="FILE.png", help="Draw scores and sparsity by layer."),
    json_file: str | None = JSON,
) -> None:
    """Show what compress would do to every layer of MODEL, and compress nothing; --json writes a plan."""
    config = CompressionConfig(
        sparsity=sparsity,
        samples=samples,
        seq_len=seq_len,
        sampling=sampling,
        seed=seed,
        allocation=allocation,
        temperature=_number_or_auto("temperature", temperature),
        max_sparsity=max_sparsity,
        round_to=round_to,
        owl_threshold=owl_threshold,
        owl_lambda=owl_lambda,
        modules=_names(modules),
        device=device,
    )
    _check_json(json_file)
    _quiet()
    from .planning import make_plan, plot_plan
    from .progress import ProgressBar

    with ProgressBar("reading model and text") as progress:
        planned = make_plan(model, calibration, config, progress=progress)
    if plot is not None:
        plot_plan(planned, plot)
    _emit(planned, json_file)
    table = Table("layer", "score", "removed", "mlp", "query-key", "value-output", "parameters")
    for index, layer in enumerate(planned["layers"]):
        score = layer["score"]
        cells = [] if score is None else score if isinstance(score, list) else [score]
        ranks = [str(layer["ranks"][module]) for module in ("mlp", "qk", "vo")]
        shown = ", ".join(f"{value:.4f}" for value in cells)
        table.add_row(str(index), shown, f"{layer['sparsity']:.2%}", *ranks, f"{layer['parameters']['compressed']:,}")
    say = _console(json_file).print
    say(table)
    counts, share, cost = planned["parameters"], planned["sparsity"], planned["estimate"]
    cache = planned["kv_bytes_per_token"]
    say(f"{counts['dense']:,} parameters would become {counts['compressed']:,}")
    say(f"removed: {share['blocks']:.2%} of the decoder blocks, {share['total']:.2%} of the model")
    say(f"KV cache: {cache['dense']:,} bytes a token would become {cache['compressed']:,}")
    say(
        f"compress would need about {cost['device_bytes'] / 2**30:.1f} GiB for a block, "
        f"{cost['host_bytes'] / 2**30:.1f} GiB for hidden states and {cost['seconds'] / 60:.1f} min ({cost['basis']})",
        markup=False,
    )
    for warning in planned["warnings"]:
        say(f"warning: {warning}", markup=False)


@app.command("eval")
def evaluate(
    model: str = MODEL,
    data: list[str] = typer.Option(["wikitext2"], "--data", help="Known data set or text file; may be repeated."),
    seq_len: int | None = typer.Option(None, help="Tokens of a window; by default 2048, or the model's positions."),
    max_windows: int | None = typer.Option(None, help="Use only the first windows of the text."),
    batch_size: int | None = typer.Option(None, help="Windows run at once."),
    dtype: str = typer.Option("auto", help=f"To compute in: {', '.join(DTYPES)}."),
    device: str = DEVICE,
    json_file: str | None = JSON,
) -> None:
    """Measure the perplexity of a dense or compressed MODEL, on windows that do not overlap."""
    check_choice("dtype", dtype, DTYPES)
    for name, value in (("seq_len", seq_len), ("max_windows", max_windows), ("batch_size", batch_size)):
        _check_positive(name, value)
    if seq_len == 1:
        raise InputError("seq_len 1 predicts nothing: the first token of a window is context only; give 2 or more")
    _check_json(json_file)
    _quiet()
    from .calibration import check_source, load_text, tokenize
    from .evaluate import check_window, perplexity
    from .models import open_config, open_model, open_tokenizer, resolve_device
    from .progress import ProgressBar
    from .report import protocol

    target = resolve_device(device)
    for source in data:
        check_source(source)
    config = open_config(model)
    seq_len = seq_len or min(2048, _positions(config))
    check_window(config, seq_len)
    tokenizer = open_tokenizer(model)
    texts = {source: tokenize(load_text(source, "evaluation"), tokenizer) for source in data}
    for source, tokens in texts.items():
        if len(tokens) < seq_len:
            raise InputError(
                f"data '{source}' has {len(tokens)} tokens, fewer than one window of {seq_len}; give a longer text, "
                "or a smaller --seq-len"
            )
    results = []
    with ProgressBar("loading the model") as progress:
        network = open_model(model, dtype, target)
        for source, tokens in texts.items():
            start = time.perf_counter()
            outcome = perplexity(network, tokens, seq_len, max_windows, batch_size, progress)
            seconds = round(time.perf_counter() - start, 3)
            results.append({"data": source, **outcome._asdict(), "seconds": seconds})
    about = {"model": model, "dtype": _dtype_name(network), "device": str(target), "split": "evaluation"}
    about |= {"max_windows": max_windows, "stride": seq_len, **protocol()}
    _emit({"model": model, "results": results, "protocol": about}, json_file)
    table = Table("data", "perplexity", "tokens", "windows")
    for entry in results:
        table.add_row(entry["data"], f"{entry['perplexity']:.4f}", f"{entry['tokens']:,}", str(entry["windows"]))
    _console(json_file).print(table)


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
    _check_positive("max_new_tokens", max_new_tokens)
    if not 0 <= temperature < float("inf"):
        raise InputError(f"temperature {temperature} is not a number from 0 up")
    if not prompt:
        raise InputError("the prompt is empty; give some text to continue")
    _check_json(json_file)
    _quiet()
    import torch

    from .models import open_config, open_model, open_tokenizer, resolve_device
    from .report import protocol

    target, positions = resolve_device(device), _positions(open_config(model))
    tokenizer = open_tokenizer(model)
    inputs = _encode(tokenizer, prompt, chat).to(target)
    n_prompt = inputs["input_ids"].shape[1]
    if n_prompt + max_new_tokens > positions:
        raise InputError(
            f"{n_prompt} tokens of prompt and {max_new_tokens} new ones exceed the model's {positions} positions; "
            "give a smaller --max-new-tokens or a shorter prompt"
        )
    network = open_model(model, dtype, target)
    torch.manual_seed(seed)
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    start = time.perf_counter()
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, **how)[0, n_prompt:]  # pyright: ignore
    seconds = round(time.perf_counter() - start, 3)
    text = tokenizer.decode(output, skip_special_tokens=True)
    about = {"model": model, "dtype": _dtype_name(network), "device": str(target), "chat": chat}
    about |= {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens, **protocol()}
    result = {"prompt": prompt, "text": text, "prompt_tokens": n_prompt, "tokens": len(output), "seconds": seconds}
    _emit({"model": model, "results": [result], "protocol": about}, json_file)
    print(text, file=sys.stderr if json_file == "-" else sys.stdout)


@app.command()
def info(
    folder: Path = typer.Argument(..., metavar="DIR", help="A compressed checkpoint."), json_file: str | None = JSON
) -> None:
    """Show what a compressed checkpoint holds, without loading its weights."""
    _check_json(json_file)
    from .inspection import describe

    found = describe(folder)
    _emit(found, json_file)
    columns = ("layer", "mlp", "query-key", "value-output", "parameters", "KV bytes per token", "sparsity")
    table = Table(*columns, title=f"{found['model_type']}, {found['dtype']}, format {found['format_version']}")
    for index, layer in enumerate(found["layers"]):
        ranks = [str(layer["ranks"][module]) for module in ("mlp", "qk", "vo")]
        cells = (f"{layer['parameters']:,}", f"{layer['kv_bytes_per_token']:,}", f"{layer['sparsity']:.2%}")
        table.add_row(str(index), *ranks, *cells)
    table.add_section()
    dense = [str(found["dense"][module]) for module in ("mlp", "qk", "vo")]
    counts, cache, share = found["parameters"], found["kv_bytes_per_token"], found["sparsity"]
    table.add_row("all", "", "", "", f"{counts['compressed']:,}", f"{cache['compressed']:,}", f"{share['total']:.2%}")
    table.add_row("dense", *dense, f"{counts['dense']:,}", f"{cache['dense']:,}", "")
    say = _console(json_file).print
    say(table)
    say(f"decoder blocks: {share['blocks']:.2%} removed; weights on disk: {found['file_bytes'] / 1e6:,.1f} MB")


@app.command()
def demo(
    out: Path | None = typer.Option(None, "--out", metavar="DIR", help="Keep the compressed checkpoint there."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace DIR if it exists."),
    json_file: str | None = JSON,
) -> None:
    """Compress, evaluate and compare a small real model, with no network: a few minutes on two cores."""
    _check_json(json_file)
    _quiet()
    from .demo import run, tables
    from .progress import ProgressBar

    with ProgressBar("reading the model") as progress:
        result = run(out, overwrite, progress)
    _emit(result, json_file)
    console = _console(json_file)
    for part in tables(result):
        console.print(part)
    if out is not None:
        console.print(f"the compressed checkpoint is in {out}", markup=False, soft_wrap=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _number_or_auto(name: str, text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{name} '{text}' is neither a number nor 'auto'") from None


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{name} {value} is not a positive whole number")


def _check_json(file: str | None) -> None:
    """Refuse, before the work, a `--json` target that could not be written after it."""
    if file is None or file == "-":
        return
    path = Path(file)
    if path.is_dir():
        raise InputError(f"--json '{file}' is a folder; give a file name, or - for standard output")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--json '{file}': the folder '{path.parent}' does not exist; create it first")


def _emit(data: dict[str, Any], file: str | None) -> None:
    if file == "-":
        print(json.dumps(data, indent=2))
    elif file is not None:
        from .checkpoint import write_json

        write_json(data, file)


def _console(json_file: str | None) -> Console:
    """Where a person reads: standard output, unless JSON goes there."""
    return Console(stderr=json_file == "-", highlight=False)


def _quiet() -> None:
    """Keep transformers' notes and bars off standard error, where this program's one line and its bar stand."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _positions(config: Any) -> int:
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def _dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _encode(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not tokenizer.chat_template:
        raise InputError("--chat was given, but the model's tokenizer has no chat template; leave --chat out")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def main() -> None:
    """Run the command line."""
    app()
