"""DeepSeek V2 to V3.2."""

from dataclasses import replace

from .spec import Architecture

DEEPSEEK_V2 = Architecture(
    model_type="deepseek_v2",
    name="DeepseekV2",
    experts="mlp.experts",
    n_experts="n_routed_experts",
    shared_experts="n_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    # Its keys and values come from one narrow latent, which is what the cache holds: there is no head to narrow.
    whole_attention=True,
    key="kv_a_proj_with_mqa",
    float32=("mlp.gate.weight",),
    notes="DeepSeek V2 and V2 Lite; the experts alone: latent attention, the MLPs of the first layers and the shared "
    "experts stay whole",
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    name="DeepseekV3",
    buffers=("mlp.gate.e_score_correction_bias",),
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    notes="DeepSeek V3 and R1; as `deepseek_v2`",
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    name="DeepseekV32",
    also_cached=("indexer.wk",),  # keys by which the keys to attend to are picked
    notes="DeepSeek V3.2; as `deepseek_v2`; the indexers stay whole, too",
)
