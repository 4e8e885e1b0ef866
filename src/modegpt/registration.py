"""Makes transformers' auto classes know the compressed models (importing a family's stock code takes about 20 ms)."""

from functools import cache

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from .architectures import ARCHITECTURES
from .modeling_modegpt import compressed_class

HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Heads that are trained on a compressed model; a family has those that transformers has for it."""


@cache
def register() -> None:
    """Register the compressed config and model classes of every supported family; calling it again changes nothing."""
    for architecture in ARCHITECTURES.values():
        config_class = compressed_class(f"{architecture.name}Config")
        assert issubclass(config_class, PreTrainedConfig)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, compressed_class(f"{architecture.name}Model"), exist_ok=True)
        causal = compressed_class(architecture.causal_class)
        AutoModelForCausalLM.register(config_class, causal, exist_ok=True)
        for head in HEADS:
            name = f"{architecture.name}{head}"
            # Some stock heads keep the model under another name, and so load none of a causal checkpoint's weights.
            if hasattr(transformers, name) and compressed_class(name).base_model_prefix == causal.base_model_prefix:
                getattr(transformers, f"AutoModel{head}").register(config_class, compressed_class(name), exist_ok=True)
