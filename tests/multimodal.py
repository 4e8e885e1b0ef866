"""Tiny multimodal models of every type whose language model is taken out."""

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GLM_EXPERTS: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    },
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MORE: dict[str, dict[str, Any]] = {
    "Gemma4": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "layer_types": ["full_attention", "full_attention"],
    },
    "Qwen2VL": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    # As files on the hub say it.
    "Qwen2_5_VL": {"rope_parameters": {"type": "mrope", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "Qwen3VL": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "Glm4v": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "Glm46V": GLM_EXPERTS,
    "Glm4vMoe": GLM_EXPERTS,
    "Qwen3VLMoe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "Qwen3_5": LINEAR,
    "MiniCPMV4_6": LINEAR,
    "MiniCPMV4_7": LINEAR,
    "Lfm2Vl": {"layer_types": ["conv", "full_attention"]},
    "Lfm3Vl": {"layer_types": ["conv", "full_attention"], "pad_token_id": 0},
    "Llama4": {"intermediate_size_mlp": 48, "num_local_experts": 3, "interleave_moe_layer_step": 2},
    "Qwen3_5Moe": {
        **LINEAR,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 16,
    },
}
"""What the language models of some need beside."""
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    # As others call these.
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
TOWERS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 16, "hidden_size": 32},
    "Qwen2_5_VL": {"fullatt_block_indexes": [0]},
    "Qwen3VL": {"deepstack_visual_indexes": [0]},
    "Qwen3VLMoe": {"deepstack_visual_indexes": [0]},
    "Glm4v": {"out_hidden_size": 32},
    # Four patches are one token, of four times their width.
    "Llama4": {
        "intermediate_size": 64,
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 16),
    },
}
"""What the towers of some have otherwise."""
HEARING: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    # As others call these.
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
}
CASES = [
    ("Gemma3", "Gemma3TextConfig", None),
    ("Mistral3", "MistralConfig", "PixtralVisionConfig"),
    ("Mistral3", "Ministral3Config", "PixtralVisionConfig"),
    ("Llava", "LlamaConfig", "CLIPVisionConfig"),
    ("LlavaNext", "MistralConfig", "CLIPVisionConfig"),
    ("LlavaNextVideo", "LlamaConfig", "CLIPVisionConfig"),
    ("LlavaOnevision", "Qwen2Config", "SiglipVisionConfig"),
    ("VideoLlama3", "Qwen2Config", None),
    ("Ovis2", "Qwen2Config", None),
    ("InternVL", "Qwen2Config", None),
    ("InternVL", "Qwen3Config", None),
    ("SmolVLM", "LlamaConfig", None),
    ("Idefics2", "MistralConfig", None),
    ("Idefics3", "LlamaConfig", None),
    ("Gemma4", "Gemma4TextConfig", None),
    ("Gemma4Unified", "Gemma4UnifiedTextConfig", None),
    ("Qwen2VL", "Qwen2VLTextConfig", None),
    ("Qwen2_5_VL", "Qwen2_5_VLTextConfig", None),
    ("Qwen3VL", "Qwen3VLTextConfig", None),
    ("MiniCPMV4_6", "Qwen3_5TextConfig", None),
    ("MiniCPMV4_7", "Qwen3_5TextConfig", None),
    ("Lfm2Vl", "Lfm2Config", None),
    ("Lfm3Vl", "Lfm3Config", None),
    ("Exaone4_5_", "Exaone4Config", None),
    ("HyperCLOVAXVisionV2", "HyperCLOVAXConfig", None),
    ("VipLlava", "LlamaConfig", "CLIPVisionConfig"),
    ("VideoLlava", "LlamaConfig", "CLIPVisionConfig"),
    ("Voxtral", "LlamaConfig", None),
    ("Qwen2Audio", "Qwen2Config", None),
    ("Llama4", "Llama4TextConfig", None),
    ("Glm4v", "Glm4vTextConfig", None),
    ("Glm46V", "Glm4vTextConfig", "Glm4vVisionConfig"),
    ("Glm46V", "Glm4vMoeTextConfig", "Glm4vMoeVisionConfig"),
    ("Glm4vMoe", "Glm4vMoeTextConfig", None),
    ("Qwen3VLMoe", "Qwen3VLMoeTextConfig", None),
    ("Qwen3_5", "Qwen3_5TextConfig", None),
    ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", None),
]
"""The outer family, the config of its language model, and that of its tower where it takes a config of any kind."""
TOKENS = torch.randint(384, (8, 32), generator=torch.Generator().manual_seed(0))


def multimodal(
    outer: str, text: str, vision: str | None, seed: int = 0, sizes: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a random model; `sizes` are those of its language model that differ, `changes` are the outer config's."""
    tower: Any = VISION if vision is None else getattr(transformers, vision)(**VISION)
    if outer in TOWERS:
        tower = {**VISION, **TOWERS[outer]}
    towers = {"audio_config": HEARING} if outer in ("Voxtral", "Qwen2Audio") else {"vision_config": tower}
    config = getattr(transformers, outer + "Config")(
        text_config=getattr(transformers, text)(**{**SIZES, **MORE.get(outer, {}), **(sizes or {})}),
        **towers,
        **changes,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, outer + "ForConditionalGeneration")(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # which Gemma 4 multiplies the output of each block by
            buffer.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    if type(model).__name__.endswith("Llama4ForConditionalGeneration"):
        model = model.language_model  # in transformers 5.24 its own forward wants of that what it does not give
    return model(input_ids=TOKENS).logits
