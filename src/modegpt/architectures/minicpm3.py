"""MiniCPM 3."""

import math
from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class MiniCpm3Architecture(Architecture):
    """MiniCPM 3, whose blocks multiply what they add by a factor of the depth."""

    def resolve(self, config: Any) -> Architecture:
        """Read that factor."""
        return replace(super().resolve(config), mlp_factor=config.scale_depth / math.sqrt(config.num_hidden_layers))


MINICPM3 = MiniCpm3Architecture(
    model_type="minicpm3",
    name="MiniCPM3",
    whole_attention=True,
    key="kv_a_proj_with_mqa",
    notes="MiniCPM 3 4B; the MLPs alone: latent attention stays whole; residual and embedding multipliers",
)
