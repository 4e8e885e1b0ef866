"""StableLM."""

from .spec import Architecture

STABLELM = Architecture(
    model_type="stablelm",
    name="StableLm",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    norm_input="heads first",
    parallel="use_parallel_residual",
    partial_rotary=True,
    notes="StableLM 3B, 2 and 12B; partial rotary, parallel or sequential blocks; "
    "with `qk_layernorm`, query-key stays whole",
)
