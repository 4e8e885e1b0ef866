"""Qwen 3.5."""

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
