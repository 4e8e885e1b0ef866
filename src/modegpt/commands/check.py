"""`modegpt check`: what is supported of a model, and the proof on a small copy of its kind."""

import typer
from rich.table import Table
from rich.text import Text

from ..config import CompressionConfig
from ..errors import InputError
from .shared import JSON, MODEL, begin, check_json, console, emit


def check(
    model: str = MODEL,
    sparsity: float = typer.Option(CompressionConfig().sparsity, help="Share of the blocks' parameters to remove."),
    config_only: bool = typer.Option(False, "--config-only", help="Read the config, and run nothing."),
    weights: bool = typer.Option(
        False, "--weights", help="Check MODEL itself: takes four times its memory in float32."
    ),
    json_file: str | None = JSON,
) -> None:
    """Say what can be compressed of MODEL, and check it on a tiny random model with all of its switches."""
    if config_only and weights:
        raise InputError("--config-only runs nothing and --weights runs the model: give one of them")
    settings = CompressionConfig(sparsity=sparsity)
    check_json(json_file, model)
    begin()
    import torch

    from ..checks.checking import Check, make_tiny, run_checks
    from ..checks.support import facts, supported
    from ..formats.packed import packing, plain
    from ..formats.text_part import about_text_part, text_part
    from ..loading.models import open_model, outer_config
    from ..loading.places import check_no_adapter
    from ..report import protocol
    from .progress_bar import ProgressBar

    outer = outer_config(model)
    check_no_adapter(model)
    said = text_part(outer)
    packed, config = packing(said), plain(said)
    told = facts(config, supported(config), settings.sparsity)
    if notes := about_text_part(outer):
        told = {"taken": notes[0], **told}
    if packed is not None:
        told["weights"] = f"in {packed.bits} bits, by the config, and unpacked as they are read: the result has 16"
    checks = [Check(topic, "told", meaning) for topic, meaning in told.items()]
    ran_on = None
    if not config_only:
        ran_on = "the model itself" if weights else "a tiny random model with the same switches"
        with ProgressBar("making the model") as progress:
            dense = open_model(model, torch.float32) if weights else make_tiny(config)
            checks += run_checks(dense, settings.sparsity, progress)
    failed = [check.name for check in checks if check.result == "failed"]
    emit(
        {
            "model": model,
            "model_type": config.model_type,
            "sparsity": sparsity,
            "ran_on": ran_on,
            "checks": [vars(check) for check in checks],
            "failed": failed,
            "protocol": protocol(),
        },
        json_file,
    )
    table = Table("check", "result", "what it means")
    for line in checks:
        result = "" if line.result == "told" else line.result
        table.add_row(line.name, result, Text(line.meaning), end_section=line is checks[len(told) - 1])
    say = console(json_file).print
    say(table)
    if ran_on:
        say(f"run on {ran_on}: " + (f"{len(failed)} failed ({', '.join(failed)})" if failed else "all passed"))
    if failed:
        raise typer.Exit(1)
