"""Rednote's dots.llm1."""

from .spec import Architecture

DOTS1 = Architecture(
    model_type="dots1",
    name="Dots1",
    up=(),
    down="",
    experts="mlp.experts",
    n_experts="n_routed_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    query_norm="q_norm",
    key_norm="k_norm",
    buffers=("mlp.gate.e_score_correction_bias",),
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    notes="dots.llm1; query-key, the MLPs of the first layers and the shared experts stay whole",
)
