"""GPT-NeoX."""

from .spec import Architecture

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    name="GPTNeoX",
    attention="attention",
    query="query_key_value",
    key="query_key_value",
    value="query_key_value",
    by_group=True,
    output="dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    parallel="use_parallel_residual",
    partial_rotary=True,
    file_names=(("lm_head.", "embed_out."),),
    notes="Pythia, GPT-NeoX-20B; projections fused by head, partial rotary, parallel blocks",
)
