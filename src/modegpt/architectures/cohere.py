"""Cohere's Command R, R7B, A and A+, and Aya."""

from dataclasses import dataclass, replace
from typing import Any

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
    rotary_switch=("sliding_window",),
    interleaved=True,
    interleaved_tables=True,
    upcast_rotary=True,
    notes="Command R7B and A; a sliding window and interleaved rotary pairs in three layers of four, no positions in "
    "the others; parallel blocks",
)


@dataclass(frozen=True)
class Cohere2MoeArchitecture(Architecture):
    """Command with experts, which may take the mean of what experts and the MLP beside them put out."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether it does."""
        mean = config.num_shared_experts and config.shared_expert_combination_strategy == "average"
        return replace(super().resolve(config), mlp_factor=0.5 if mean else 1.0)


COHERE2_MOE = Cohere2MoeArchitecture(
    model_type="cohere2_moe",
    name="Cohere2Moe",
    parallel=True,
    experts="mlp.experts",
    shared_experts="num_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    # The MLPs of the first layers may come with it in layers without a window, too.
    rotary_switch=("sliding_window", "force_rope"),
    interleaved=True,
    interleaved_tables=True,
    upcast_rotary=True,
    notes="Command with experts; as `cohere2`; the MLPs of the first layers and the shared experts stay whole",
)
