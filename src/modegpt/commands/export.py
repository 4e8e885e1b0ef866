"""`modegpt export`: a compressed model for whatever knows the dense model's own class alone."""

from pathlib import Path

import typer

from ..config import DTYPES, check_choice
from .shared import JSON, begin, check_json, console, emit

PARTS = {
    "attention": "attention, whose key-value cache is the dense one",
    "mlp": "MLPs that are narrower than the widest",
    "shared_experts": "MLPs beside experts",
}


def export(
    model: str = typer.Argument(..., metavar="MODEL", help="A compressed checkpoint: folder or hub name."),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for the stock checkpoint."),
    dtype: str = typer.Option("auto", help=f"Of the written weights: {', '.join(DTYPES)}."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace DIR if it holds a model."),
    json_file: str | None = JSON,
) -> None:
    """Write a compressed MODEL as its dense family's stock class, for vLLM, SGLang, llama.cpp and the like."""
    check_choice("dtype", dtype, DTYPES)
    check_json(json_file, model, out=out)
    begin()
    from ..export.stock import export_stock
    from ..report import protocol

    result = export_stock(model, out, dtype=dtype, overwrite=overwrite)
    emit({**result, "protocol": protocol()}, json_file)
    say, counts, zeros = console(json_file).print, result["parameters"], result["zeros"]
    say(f"{result['class']}, MLP width {result['mlp_width']:,}, {counts['exported']:,} parameters")
    if padded := sum(zeros.values()):
        where = " and ".join(f"{zeros[part]:,} in {what}" for part, what in PARTS.items() if zeros[part])
        say(f"{padded:,} of them are zeros that the compressed model does without: {where}")
    if zeros["attention"] or (zeros["mlp"] and result["narrows"]):
        say("compress with --allocation width for a model that its stock class holds without these")
    say(f"written to {out}", markup=False, soft_wrap=True)
