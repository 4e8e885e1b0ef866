"""Cohere's Command R and Aya."""

from .spec import Architecture

COHERE = Architecture(
    model_type="cohere",
    name="Cohere",
    query_norm="q_norm",
    key_norm="k_norm",
    parallel=True,
    interleaved=True,
    upcast_rotary=True,
    notes="Command R, Aya; interleaved rotary pairs, parallel blocks; with `use_qk_norm`, query-key stays whole",
)
