"""Qwen 2 and 2.5."""

from dataclasses import replace

from .spec import Architecture

QWEN2 = Architecture(
    model_type="qwen2", name="Qwen2", notes="Qwen 2 and 2.5; query, key and value biases, sliding window by layer"
)

QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    name="Qwen2Moe",
    experts="mlp.experts",
    shared_down="mlp.shared_expert.down_proj",
    width="moe_intermediate_size",
    notes="Qwen 1.5 and 2 with experts; the shared expert stays whole",
)
