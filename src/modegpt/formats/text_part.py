"""The language model inside a multimodal checkpoint: its config, and the names that its weights have in the files."""

import copy
import itertools
import re
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ..errors import InputError
from ..modeling_modegpt import MODEL_TYPE_PREFIX, auto_map, compressed_class

MULTIMODAL = (
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "llama4",
    "mistral3",
    "voxtral",
    "qwen2_audio",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "minicpmv4_6",
    "minicpmv4_7",
    "lfm2_vl",
    "lfm3_vl",
    "exaone4_5",
    "hyperclovax_vision_v2",
    "internvl",
    "ovis2",
    "smolvlm",
    "idefics2",
    "idefics3",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "vipllava",
    "video_llava",
    "video_llama_3",
)
LANGUAGE_MODELS = (
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm4v_moe_text",
    "glm4v_text",
    "hyperclovax",
    "lfm2",
    "lfm3",
    "llama",
    "llama4_text",
    "ministral3",
    "mistral",
    "qwen2",
    "qwen2_5_vl_text",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
)
"""Model types that are opened, and of the language models in them: on text alone a model of the one type gives the very
logits of the other's causal language model. It would not with Cohere's or Granite's in it, whose scale of the logits
multimodal models leave out."""

KNOWN_AS = {
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Language models with no causal one of their own type, and the type that they are on text alone. There a token has one
position in all three axes of an image, so which pair of a head turns by which of them makes no difference."""
SAID: dict[str, dict[str, Any]] = {
    "glm4v_text": {"attention_bias": True},
    "glm4v_moe_text": {"use_qk_norm": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
"""What their classes do, and the config of that type must say."""
CONVERTED = ("qwen3_vl_moe",)
"""Multimodal types whose weights transformers turns round by that type as it loads them: not those of the language
model alone, which is of another."""
INTERLEAVED_TABLES = ("glm4v_text",)
"""Those whose rotary tables, unlike that type's, have each cosine and sine twice side by side."""
AXES = ("mrope_section", "mrope_interleaved", "type")
"""What their `rope_parameters` say of that; the last is an older name of the rotary type, `mrope`."""

_PREFIXES = [
    "".join(parts) for parts in itertools.product(("model.", ""), ("language_model.", "text_model."), ("model.", ""))
]
KEY_MAPPING = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Patterns of names in the files, and what stands for them in a language model: for transformers' `from_pretrained`."""
_UNCHANGED = r"^(?:lm_head|model\.(?:layers|embed_tokens|norm))\."
"""Names that stay: the head's, and in Qwen 2 VL and 2.5 VL, in whose files the tower alone has a prefix, all."""


def text_part(config: Any) -> Any:
    """Return the config of a multimodal model's language model, of any other model the config itself.

    What the outer config says of the whole model holds: dtype, quantization, tied embeddings, the tokens that begin and
    end a text.

    Raises:
        InputError: the language model is of a type that is not taken out of multimodal models.
    """
    if not has_text_part(config):
        return config
    if config.text_config.model_type not in LANGUAGE_MODELS:
        raise InputError(
            f"the {config.model_type} model holds a language model of type '{config.text_config.model_type}'; of "
            f"multimodal models those of {', '.join(LANGUAGE_MODELS)} can be taken"
        )
    text = _as_known(copy.deepcopy(config.text_config))
    if description := getattr(config, "modegpt", None):
        text = compressed_text(text, description)
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
    for name in ("dtype", "quantization_config", "bos_token_id", "eos_token_id"):
        if (said := getattr(config, name, None)) is not None:
            setattr(text, name, said)
    text._name_or_path = config._name_or_path
    return text


def _as_known(text: Any) -> Any:
    """Return the config of a language model as that of a causal one: the same, or what it is on text alone."""
    if text.model_type not in KNOWN_AS:
        return text
    fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rope = {name: value for name, value in (text.rope_parameters or {}).items() if name not in AXES}
    if text.model_type == "glm4v_text":
        rope.setdefault("partial_rotary_factor", 1.0)  # for which GLM 4's config says another default
    fields |= {"rope_parameters": rope, **SAID.get(text.model_type, {})}
    return CONFIG_MAPPING[KNOWN_AS[text.model_type]].from_dict(fields)


def compressed_text(dense: Any, description: dict[str, Any]) -> Any:
    """Return the config of the compressed language model inside a multimodal one.

    Args:
        dense: the config of the dense language model, as the outer config holds it.
        description: the key `modegpt` of the outer config.

    Raises:
        InputError: it is broken.
    """
    fields = {name: value for name, value in dense.to_dict().items() if name != "model_type"}
    try:
        config: Any = compressed_class(f"{description['architecture']['name']}Config")
    except (KeyError, TypeError, AttributeError) as problem:
        raise InputError("the key 'modegpt' in the config is broken: copy the checkpoint again") from problem
    config = config.from_dict(fields)
    config.modegpt = {name: value for name, value in description.items() if name != "multimodal"}
    config.auto_map = auto_map(config)
    config.architectures = [config.auto_map["AutoModelForCausalLM"].rpartition(".")[2]]
    return config


def has_text_part(config: Any) -> bool:
    """Whether the model is multimodal, of a type whose language model can be opened alone, dense or compressed."""
    return config.model_type.removeprefix(MODEL_TYPE_PREFIX) in MULTIMODAL


def multimodal_class(model_type: str) -> str:
    """Return the name of transformers' class, with a head, of a multimodal type."""
    names: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return names[model_type]


def about_text_part(config: Any) -> list[str]:
    """Return what a user must be told of a model, by its outer config: nothing where it is no multimodal one."""
    if not has_text_part(config):
        return []
    return [f"of the {config.model_type} model only the language model is taken, which reads text alone"]


def names_in_files(name: str) -> list[str]:
    """Return the names that multimodal checkpoints may give to a tensor of their language model."""
    if not name.startswith("model."):
        return [f"language_model.{name}"]  # the head
    return [prefix + name.removeprefix("model.") for prefix in _PREFIXES]


def is_text(name: str) -> bool:
    """Whether a tensor of a multimodal checkpoint is one of its language model, by its name in the files."""
    return any(re.match(pattern, name) for pattern in (*KEY_MAPPING, _UNCHANGED))
