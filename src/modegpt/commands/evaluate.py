"""`modegpt eval`: how good dense and compressed models are."""

import time

import typer
from rich.table import Table

from ..cli_support import DEVICE, JSON, MODEL, check_json, check_positive, console, dtype_name, emit, positions, quiet
from ..config import DTYPES, check_choice
from ..errors import InputError


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
        check_positive(name, value)
    if seq_len == 1:
        raise InputError("seq_len 1 predicts nothing: the first token of a window is context only; give 2 or more")
    check_json(json_file)
    quiet()
    from ..calibration import check_source, load_text, tokenize
    from ..evaluate import check_window, perplexity
    from ..models import open_config, open_model, open_tokenizer, resolve_device
    from ..progress import ProgressBar
    from ..report import protocol

    target = resolve_device(device)
    for source in data:
        check_source(source)
    config = open_config(model)
    seq_len = seq_len or min(2048, positions(config))
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
    about = {"model": model, "dtype": dtype_name(network), "device": str(target), "split": "evaluation"}
    about |= {"max_windows": max_windows, "stride": seq_len, **protocol()}
    emit({"model": model, "results": results, "protocol": about}, json_file)
    table = Table("data", "perplexity", "tokens", "windows")
    for entry in results:
        table.add_row(entry["data"], f"{entry['perplexity']:.4f}", f"{entry['tokens']:,}", str(entry["windows"]))
    console(json_file).print(table)
