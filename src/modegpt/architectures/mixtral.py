"""Mixtral, and MiniMax M2, whose experts are stored in the same way."""

from dataclasses import replace

from .spec import Architecture

MIXTRAL = Architecture(
    model_type="mixtral",
    name="Mixtral",
    experts="mlp.experts",
    n_experts="num_local_experts",
    expert_files=(
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    file_names=((".mlp.gate.", ".block_sparse_moe.gate."),),
    notes="Mixtral 8x7B and 8x22B; attention and every expert are cut",
)

MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    name="MiniMaxM2",
    partial_rotary=True,
    query_norm="q_norm",
    key_norm="k_norm",
    norm_input="flat",
    buffers=("mlp.e_score_correction_bias",),
    file_names=((".mlp.", ".block_sparse_moe."),),
    notes="MiniMax M2 to M2.5; one norm over all query heads, one over all key heads: query-key stays whole",
)
