"""GLM 4 (9B, of 2024), GLM 4 0414, GLM 4.5 to 4.7, and Solar Open, which is made like the latter."""

from dataclasses import replace

from .deepseek import DEEPSEEK_V3
from .spec import Architecture

GLM = Architecture(
    model_type="glm",
    name="Glm",
    up=("mlp.gate_up_proj", "mlp.gate_up_proj"),
    partial_rotary=True,
    interleaved=True,
    notes="GLM 4 9B, GLM Edge; gate and up fused, interleaved rotary pairs on a part of each head",
)

GLM4 = replace(
    GLM,
    model_type="glm4",
    name="Glm4",
    mlp_norm="post_mlp_layernorm",
    notes="GLM 4 and Z1 0414; as `glm`, with norms before and after each module",
)

GLM4_MOE = Architecture(
    model_type="glm4_moe",
    name="Glm4Moe",
    experts="mlp.experts",
    n_experts="n_routed_experts",
    shared_experts="n_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    partial_rotary=True,
    query_norm="q_norm",
    key_norm="k_norm",
    buffers=("mlp.gate.e_score_correction_bias",),
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    notes="GLM 4.5 to 4.7, Air among them; the MLPs of the first layers and the shared experts stay whole, and so does "
    "query-key where `use_qk_norm` says so",
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    name="SolarOpen",
    partial_rotary=False,
    query_norm="",
    key_norm="",
    notes="Solar Open 100B; the shared experts stay whole",
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    name="Glm4MoeLite",
    notes="GLM 4.7 Flash; as `deepseek_v2`",
)
