"""JetBrains' Mellum 2."""

from dataclasses import replace

from .qwen3 import QWEN3_MOE

MELLUM = replace(
    QWEN3_MOE,
    model_type="mellum",
    name="Mellum",
    n_experts="num_local_experts",
    notes="Mellum 2 12B-A2.5B; a sliding window in some layers; query-key stays whole",
)
