"""Makes transformers' auto classes know the compressed models.

A config class takes some 5 ms to import and to make, and a family's models 20 ms more: the configs are registered at
once, since they are looked up by name, and a family's models when its first config is made. The auto classes of models
look them up by the class of a config, which they have an instance of by then.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from .architectures import ARCHITECTURES, Architecture
from .formats.text_part import MULTIMODAL, multimodal_class
from .modeling_modegpt import compressed_class

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Heads that are trained on a compressed model; a family has those that transformers has for it."""


@cache
def register() -> None:
    """Register the compressed classes of every supported family; calling it again changes nothing."""
    for architecture in ARCHITECTURES.values():
        _register_config(f"{architecture.name}Config", partial(_register_models, architecture))
    for model_type in MULTIMODAL:
        _register_config(CONFIG_MAPPING[model_type].__name__, partial(_register_multimodal, model_type))


def _register_config(stock: str, register_models: Callable[[type], None]) -> None:
    """Register the compressed config of a stock one, which registers its models when the first is made."""
    config_class = compressed_class(stock)
    assert issubclass(config_class, PreTrainedConfig)
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.__new__ = _registering(config_class, cache(register_models))


def _register_models(architecture: Architecture, config_class: type) -> None:
    AutoModel.register(config_class, compressed_class(f"{architecture.name}Model"), exist_ok=True)
    causal = compressed_class(architecture.causal_class)
    AutoModelForCausalLM.register(config_class, causal, exist_ok=True)
    for head in HEADS:
        name = f"{architecture.name}{head}"
        # Some stock heads keep the model under another name, and so load none of a causal checkpoint's weights.
        if hasattr(transformers, name) and compressed_class(name).base_model_prefix == causal.base_model_prefix:
            getattr(transformers, f"AutoModel{head}").register(config_class, compressed_class(name), exist_ok=True)


def _register_multimodal(model_type: str, config_class: type) -> None:
    AutoModel.register(config_class, compressed_class(MODEL_MAPPING_NAMES[model_type]), exist_ok=True)
    generates = compressed_class(multimodal_class(model_type))
    AutoModelForMultimodalLM.register(config_class, generates, exist_ok=True)
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:  # not one that hears alone
        AutoModelForImageTextToText.register(config_class, generates, exist_ok=True)


def _registering(config_class: type[PreTrainedConfig], register_models: Callable[[type], None]) -> Any:
    """Return a `__new__`, by which copies and pickles are made, too, that registers a config's models before it."""

    def new(cls: type[PreTrainedConfig], *_args: Any, **_kwargs: Any) -> PreTrainedConfig:
        register_models(config_class)
        return super(config_class, cls).__new__(cls)

    return staticmethod(new)
