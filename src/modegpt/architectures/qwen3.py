"""Qwen 3."""

from dataclasses import replace

from .spec import Architecture

QWEN3 = Architecture(
    model_type="qwen3",
    name="Qwen3",
    query_norm="q_norm",
    key_norm="k_norm",
    notes="Qwen 3, dense; norms on each query and key head: query-key stays whole",
)

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    name="Qwen3Moe",
    experts="mlp.experts",
    width="moe_intermediate_size",
    notes="Qwen 3 with experts, 30B-A3B and 235B-A22B; query-key stays whole",
)
