"""Qwen 3.5, and Qwen 3 Next, which came before it."""

from dataclasses import replace

from .spec import Architecture

QWEN3_5_TEXT = Architecture(
    model_type="qwen3_5_text",
    name="Qwen3_5Text",
    causal_lm="Qwen3_5ForCausalLM",
    # The output of attention passes a gate coordinate by coordinate, and its queries and keys are normalised.
    whole_attention=True,
    mixers=("linear_attn",),
    upcast_mixers=True,
    notes="Qwen 3.5 0.8B to 27B, in `qwen3_5` files; the MLPs alone: linear attention in three layers of four and the "
    "gated attention of the others stay whole",
)

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    name="Qwen3_5MoeText",
    causal_lm="Qwen3_5MoeForCausalLM",
    experts="mlp.experts",
    shared_down="mlp.shared_expert.down_proj",
    width="moe_intermediate_size",
    notes="Qwen 3.5 with experts, 35B-A3B to 397B-A17B, in `qwen3_5_moe` files; the experts alone: attention of either "
    "kind and the shared expert stay whole",
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_next",
    name="Qwen3Next",
    causal_lm="",
    notes="Qwen 3 Next 80B-A3B; as `qwen3_5_moe_text`",
)
