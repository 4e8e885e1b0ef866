"""`modegpt rejoin`: a compressed language model back in the multimodal model that it was taken out of."""

from pathlib import Path

import typer

from .shared import JSON, begin, check_json, console, emit


def rejoin(
    model: str = typer.Argument(..., metavar="MODEL", help="What compress, or export, wrote: folder or hub name."),
    whole: str = typer.Option(..., "--with", metavar="WHOLE", help="The multimodal model that was compressed."),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Folder for the multimodal checkpoint."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace DIR if it holds a model."),
    json_file: str | None = JSON,
) -> None:
    """Put a compressed language MODEL back in the multimodal model WHOLE, which then sees again."""
    check_json(json_file, model, whole, out=out)
    begin()
    from ..export.rejoin import rejoin
    from ..report import protocol

    result = rejoin(model, whole, out, overwrite=overwrite)
    emit({**result, "protocol": protocol()}, json_file)
    say, counts = console(json_file).print, result["parameters"]
    say(
        f"{result['class']} in {result['dtype']}: {counts['language_model']:,} parameters of the language model and "
        f"{counts['towers']:,} of what stands beside it, untouched"
    )
    for warning in result["warnings"]:
        say(f"warning: {warning}", markup=False, soft_wrap=True)
    say(f"written to {out}", markup=False, soft_wrap=True)
