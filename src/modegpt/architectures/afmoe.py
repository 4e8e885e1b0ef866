"""Arcee's Trinity."""

from .spec import Architecture

AFMOE = Architecture(
    model_type="afmoe",
    name="Afmoe",
    # The output of attention passes a gate coordinate by coordinate, and its queries and keys are normalised.
    whole_attention=True,
    middle="pre_mlp_layernorm",
    # It reads the sum of what the experts and the MLP beside them put out.
    mlp_norm="post_mlp_layernorm",
    adds_mlp=False,
    experts="mlp.experts",
    shared_experts="num_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    float32=("norm.weight", "mlp.expert_bias"),
    notes="Trinity Nano to Large; the experts alone: gated attention, the MLPs of the first layers and the shared "
    "experts stay whole",
)
