"""Naver's HyperCLOVA X."""

from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class HyperClovaXArchitecture(Architecture):
    """HyperCLOVA X, whose config may put a norm after each module."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether it does."""
        resolved = super().resolve(config)
        return replace(resolved, mlp_norm="post_norm2") if config.use_post_norm else resolved


HYPERCLOVAX = HyperClovaXArchitecture(
    model_type="hyperclovax",
    name="HyperCLOVAX",
    mlp_factor="residual_multiplier",
    notes="HyperCLOVA X SEED Think 14B; norms before and after each module; multipliers as in `granite`",
)
