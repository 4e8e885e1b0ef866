"""Falcon-H1."""

from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class FalconH1Architecture(Architecture):
    """Falcon-H1, whose MLPs multiply their output by the second of two numbers in the config."""

    def resolve(self, config: Any) -> Architecture:
        """Read that number."""
        return replace(super().resolve(config), mlp_factor=float(config.mlp_multipliers[1]))


FALCON_H1 = FalconH1Architecture(
    model_type="falcon_h1",
    name="FalconH1",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    middle="pre_ff_layernorm",
    tuple_output=True,
    whole_attention=True,
    mixers=("mamba",),
    upcast_mixers=True,
    notes="Falcon-H1 0.5B to 34B; the MLPs alone: attention and Mamba, side by side in every layer, stay whole",
)
