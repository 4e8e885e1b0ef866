"""Cohere's Command R, R7B and A, and Aya."""

from .spec import Architecture

COHERE = Architecture(
    model_type="cohere",
    name="Cohere",
    query_norm="q_norm",
    key_norm="k_norm",
    parallel=True,
    interleaved=True,
    interleaved_tables=True,
    upcast_rotary=True,
    notes="Command R, Aya; interleaved rotary pairs, parallel blocks; with `use_qk_norm`, query-key stays whole",
)

COHERE2 = Architecture(
    model_type="cohere2",
    name="Cohere2",
    parallel=True,
    # Layers with a sliding window have it, the others have no positions.
    rotary_switch="sliding_window",
    interleaved=True,
    interleaved_tables=True,
    upcast_rotary=True,
    notes="Command R7B and A; a sliding window and interleaved rotary pairs in three layers of four, no positions in "
    "the others; parallel blocks",
)
