"""Makes transformers' auto classes know the compressed models (importing a family's stock code takes about 20 ms)."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from .architectures import ARCHITECTURES
from .modeling_modegpt import compressed_class


def register() -> None:
    """Register the compressed config and model classes of every supported family; calling it again changes nothing."""
    for architecture in ARCHITECTURES.values():
        config_class = compressed_class(f"{architecture.name}Config")
        assert issubclass(config_class, PreTrainedConfig)
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, compressed_class(f"{architecture.name}Model"), exist_ok=True)
        AutoModelForCausalLM.register(config_class, compressed_class(architecture.causal_class), exist_ok=True)
