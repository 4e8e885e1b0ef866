"""Baidu's ERNIE 4.5."""

from dataclasses import replace

from .spec import Architecture

ERNIE4_5 = Architecture(
    model_type="ernie4_5",
    name="Ernie4_5",
    interleaved=True,
    upcast_rotary=True,
    notes="ERNIE 4.5, dense; interleaved rotary pairs, biases everywhere where `use_bias` says so",
)

ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    name="Ernie4_5_Moe",
    experts="mlp.experts",
    shared_experts="moe_num_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    file_names=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
    float32=("mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"),
    notes="ERNIE 4.5 21B-A3B and 300B-A47B; interleaved rotary pairs; the MLPs of layers without experts and the "
    "shared experts stay whole",
)
