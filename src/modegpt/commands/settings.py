"""The options that stand for the settings of a run: one home, so that every command says them alike."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import typer

from ..config import DTYPES, CompressionConfig
from ..errors import InputError
from .shared import DEVICE, check_json, names, number_or_auto

DEFAULTS = CompressionConfig()
HELP = {
    "sparsity": "Share of the blocks' parameters to remove, in [0, 1).",
    "samples": "Calibration sequences.",
    "seq_len": "Tokens of each.",
    "sampling": "random windows, or sequential from the start.",
    "seed": "Of random windows, and of what best draws.",
    "allocation": "uniform, error, influence, influence-blocks, owl or width.",
    "temperature": "Of the influence rules, in units of the score, or auto.",
    "max_sparsity": "Upper bound on one layer, under error on one module; not for uniform and width.",
    "round_to": "Every dim a multiple of this (default: MLPs in 16 bits, of 8).",
    "owl_threshold": "OWL's M.",
    "owl_lambda": "OWL's lambda.",
    "plan": "Ranks by layer, from modegpt plan.",
    "modules": "Which of mlp, qk and vo, with commas.",
    "solver": "paper, or best: loses less at the same size.",
    "mlp_solver": "Instead of the solver's: leverage, energy or saliency.",
    "qk_solver": "Instead of the solver's: cr or logits.",
    "vo_solver": "Instead of the solver's: svd or context.",
    "coverage": "Windows the model writes, per sample; 0.1875 with best.",
    "feedback": "Refit MLPs to the dense model's hidden states, as best does.",
    "rarity": "Tokens that occur n times weigh n^-rarity; 0.25 with best.",
    "ridge": "Lambda of the leverage scores.",
    "dtype": f"Of the written weights: {', '.join(DTYPES)}.",
    "device": "",
    "batch_size": "Calibration sequences at once; by default about 4096 tokens, on a GPU 16384.",
    "max_host_memory": "Bytes of hidden states in memory; the rest goes to disk.",
}
"""By field of `CompressionConfig`, in the order in which `--help` shows them."""
PLANNED = ("sparsity", "allocation", "max_sparsity", "temperature", "owl_threshold", "owl_lambda")
"""What a plan of ranks says in their place."""


def configured(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command that takes a `config` into one that takes the settings as options.

    Args:
        without: fields that the command sets itself, or has no use for.
    """
    fields = [field for field in HELP if field not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            if given.get("plan") is not None:  # which the command itself is not told of
                check_json(given.get("json_file"), given["plan"])
            config = _config({field: given.pop(field) for field in fields})
            command(config=config, **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            own = [_option(field) for field in fields] if parameter.name == "config" else [parameter]
            parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        # typer reads a command's options from these four.
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _option(field: str) -> inspect.Parameter:
    default, hint = getattr(DEFAULTS, field), get_type_hints(CompressionConfig)[field]
    if field == "device":
        option: Any = DEVICE
    elif field == "plan":
        option, hint = typer.Option(None, metavar="FILE", help=HELP[field]), Path | None
    elif field in PLANNED:
        # Whether it was given is to be known: a plan takes none, not even the default.
        option = typer.Option(None, help=f"{HELP[field]} \\[default: {default}]")
        hint = (str if field == "temperature" else hint) | None
    elif field == "modules":
        option, hint = typer.Option(",".join(default), help=HELP[field]), str
    else:
        option = typer.Option(default, help=HELP[field])
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hint)


def _config(given: dict[str, Any]) -> CompressionConfig:
    """Turn the options' values into the settings."""
    given |= {"modules": names(given["modules"])}
    if (temperature := given.get("temperature")) is not None:
        given |= {"temperature": number_or_auto("temperature", temperature)}
    if (file := given.get("plan")) is not None:
        from ..ranks.plan_file import read_plan

        for field in PLANNED:
            if given.get(field) is not None:
                raise InputError(f"--plan gives the ranks of every layer: leave out --{field.replace('_', '-')}")
        given |= {"plan": read_plan(file), "allocation": "plan"}
    return CompressionConfig(**{field: value for field, value in given.items() if value is not None})
