"""Qwen 3 (dense)."""

from .spec import Architecture

QWEN3 = Architecture(
    model_type="qwen3",
    name="Qwen3",
    query_norm="q_norm",
    key_norm="k_norm",
    notes="Qwen 3, dense; norms on each query and key head: query-key stays whole",
)
