"""Mixtral."""

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
