"""Makes transformers' auto classes know the compressed models.

A config class takes some 5 ms to import and to make, and a family's models 20 ms more: the configs are registered at
once, since they are looked up by name, and a family's models when its first config is made. The auto classes of models
look them up by the class of a config, which they have an instance of by then.
"""

from functools import cache
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from .architectures import ARCHITECTURES, Architecture
from .modeling_modegpt import compressed_class

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Heads that are trained on a compressed model; a family has those that transformers has for it."""


@cache
def register() -> None:
    """Register the compressed classes of every supported family; calling it again changes nothing."""
    for architecture in ARCHITECTURES.values():
        config_class = compressed_class(f"{architecture.name}Config")
        assert issubclass(config_class, PreTrainedConfig)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.__new__ = _registering(config_class, architecture)


def _registering(config_class: type[PreTrainedConfig], architecture: Architecture) -> Any:
    """Return a `__new__`, by which copies and pickles are made, too, that registers a config's models before it."""

    @cache
    def register_models() -> None:
        AutoModel.register(config_class, compressed_class(f"{architecture.name}Model"), exist_ok=True)
        causal = compressed_class(architecture.causal_class)
        AutoModelForCausalLM.register(config_class, causal, exist_ok=True)
        for head in HEADS:
            name = f"{architecture.name}{head}"
            # Some stock heads keep the model under another name, and so load none of a causal checkpoint's weights.
            if hasattr(transformers, name) and compressed_class(name).base_model_prefix == causal.base_model_prefix:
                getattr(transformers, f"AutoModel{head}").register(config_class, compressed_class(name), exist_ok=True)

    def new(cls: type[PreTrainedConfig], *_args: Any, **_kwargs: Any) -> PreTrainedConfig:
        register_models()
        return super(config_class, cls).__new__(cls)

    return staticmethod(new)
