"""Tencent's dense HunYuan, and Hy3."""

from dataclasses import replace

from .qwen3 import QWEN3_MOE
from .spec import Architecture

HUNYUAN_V1_DENSE = Architecture(
    model_type="hunyuan_v1_dense",
    name="HunYuanDenseV1",
    query_norm="query_layernorm",
    key_norm="key_layernorm",
    rotary_first=True,
    notes="HunYuan 0.5B to 7B, dense; norms on each query and key head, after the rotary embedding: query-key stays "
    "whole",
)

HY_V3 = replace(
    QWEN3_MOE,
    model_type="hy_v3",
    name="HYV3",
    shared_experts="num_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    buffers=("mlp.e_score_correction_bias",),
    file_names=(
        (".mlp.gate.", ".mlp.router.gate."),
        (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    ),
    float32=("mlp.gate.weight", "mlp.e_score_correction_bias"),
    notes="Hy3; query-key, the MLPs of the first layers and the shared experts stay whole",
)
