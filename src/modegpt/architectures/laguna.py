"""Poolside's Laguna."""

from .spec import Architecture

LAGUNA = Architecture(
    model_type="laguna",
    name="Laguna",
    # The output of attention passes a gate, layers differ in heads, and queries and keys are normalised.
    whole_attention=True,
    upcast_mixers=True,
    experts="mlp.experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    file_names=(
        (".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"),
        (".mlp.shared_experts.", ".mlp.shared_expert."),
    ),
    mlp_factor="moe_routed_scaling_factor",
    notes="Laguna XS and M; the experts alone: gated attention, the MLPs of the first layers and the shared experts "
    "stay whole",
)
