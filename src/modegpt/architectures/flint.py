"""Recursive's Flint."""

from .spec import Architecture

FLINT = Architecture(
    model_type="flint",
    name="Flint",
    # Layers with a sliding window turn queries and keys, the others do not.
    rotary_switch=("sliding_window",),
    query_norm="q_norm",
    key_norm="k_norm",
    sinks="sinks",
    experts="mlp.experts",
    shared_down="mlp.shared_expert.down_proj",
    width="moe_intermediate_size",
    file_names=((".self_attn.sinks", ".self_attn.softmax_offset"),),
    float32=("mlp.gate.weight", "self_attn.sinks"),
    notes="Flint; norms on each query and key head: query-key stays whole, and so do the MLPs of the first layers and "
    "the shared experts",
)
