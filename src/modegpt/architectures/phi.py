"""Phi 1, 1.5 and 2; Phi 3, 3.5 and 4; Phi 3.5 MoE."""

from dataclasses import replace

from .mixtral import MIXTRAL
from .spec import Architecture

PHI = Architecture(
    model_type="phi",
    name="Phi",
    output="dense",
    up=("mlp.fc1",),
    down="mlp.fc2",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    parallel=True,
    partial_rotary=True,
    notes="Phi 1, 1.5 and 2; parallel blocks, partial rotary, biases everywhere; "
    "with `qk_layernorm`, query-key stays whole",
)

PHI3 = Architecture(
    model_type="phi3",
    name="Phi3",
    query="qkv_proj",
    key="qkv_proj",
    value="qkv_proj",
    up=("mlp.gate_up_proj", "mlp.gate_up_proj"),
    partial_rotary=True,
    notes="Phi 3, 3.5 and 4; fused projections, sliced in place; longrope, sliding window",
)

PHIMOE = replace(
    MIXTRAL,
    model_type="phimoe",
    name="Phimoe",
    file_names=((".mlp.router.", ".block_sparse_moe.gate."),),
    notes="Phi 3.5 MoE, Phi mini and tiny MoE; longrope, LayerNorm, biases in attention; attention and experts are cut",
)
