"""The supported model families: one declarative file each, gathered here."""

from typing import Any

from ..errors import InputError
from .llama import LLAMA
from .mistral import MISTRAL
from .opt import OPT
from .qwen2 import QWEN2
from .spec import Architecture, Dimensions

ARCHITECTURES: dict[str, Architecture] = {a.model_type: a for a in (LLAMA, MISTRAL, QWEN2, OPT)}


def architecture_of(config: Any) -> Architecture:
    """Return the architecture of a dense model's config.

    Raises:
        InputError: the model is already compressed, or its family or something in its config is not
            supported; the message says what.
    """
    model_type = config.model_type
    if getattr(config, "modegpt", None):
        raise InputError(f"the model is already compressed (model_type '{model_type}'): give the dense model")
    if model_type not in ARCHITECTURES:
        raise InputError(
            f"model type '{model_type}' is not supported; supported are: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type].resolve(config)


__all__ = ["ARCHITECTURES", "Architecture", "Dimensions", "architecture_of"]
