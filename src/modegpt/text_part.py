"""The language model inside a multimodal checkpoint: its config, and the names that its weights have in the files."""

import copy
from typing import Any

MULTIMODAL = ("gemma3", "mistral3", "llava", "llava_next", "llava_onevision", "internvl", "smolvlm", "idefics3")
"""Model types of which the language model is opened. On text alone each gives just the logits of the causal language
model in its `text_config`. Cohere's do not (theirs leave out its scale of the logits), nor do those of other towers."""

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.text_model.")
KEY_MAPPING = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""The same for transformers' `from_pretrained`: patterns of names in the files, and what stands for them here."""


def text_part(config: Any) -> Any:
    """Return the config of a multimodal model's language model, of any other model the config itself.

    What the outer config settles for the whole model, it settles here: tied embeddings, quantization, the dtype.
    """
    if not has_text_part(config):
        return config
    text = copy.deepcopy(config.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings
    if text.dtype is None:
        text.dtype = config.dtype
    if quantization := getattr(config, "quantization_config", None):
        text.quantization_config = quantization
    text._name_or_path = config._name_or_path
    return text


def has_text_part(config: Any) -> bool:
    """Whether the model is multimodal, and its language model can be opened alone."""
    return config.model_type in MULTIMODAL


def names_in_files(name: str) -> list[str]:
    """Return the names that multimodal checkpoints may give to a tensor of their language model."""
    if not name.startswith("model."):
        return [f"language_model.{name}"]  # the head
    return [prefix + name.removeprefix("model.") for prefix in _PREFIXES]
