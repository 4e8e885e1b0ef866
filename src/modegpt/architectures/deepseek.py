"""DeepSeek V3."""

from .spec import Architecture

DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    name="DeepseekV3",
    up=(),
    down="",
    experts="mlp.experts",
    n_experts="n_routed_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    # Its keys and values come from one narrow latent, which is what the cache holds: there is no head to narrow.
    whole_attention=True,
    buffers=("mlp.gate.e_score_correction_bias",),
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    notes="DeepSeek V3, R1 and Kimi K2 in 16 bits; the experts alone: latent attention, the MLPs of the first layers and "
    "the shared experts stay whole",
)
