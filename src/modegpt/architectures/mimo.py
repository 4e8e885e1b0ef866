"""Xiaomi's MiMo V2 Flash."""

from .spec import Architecture

MIMO_V2_FLASH = Architecture(
    model_type="mimo_v2_flash",
    name="MiMoV2Flash",
    # Values are narrower than keys, and layers with a sliding window have twice the key heads.
    whole_attention=True,
    experts="mlp.experts",
    n_experts="n_routed_experts",
    width="moe_intermediate_size",
    buffers=("mlp.gate.e_score_correction_bias",),
    file_names=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    notes="MiMo V2 Flash 309B-A15B; the experts alone: attention and the MLPs of the first layers stay whole",
)
