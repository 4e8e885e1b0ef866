"""LG's EXAONE 4."""

from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class Exaone4Architecture(Architecture):
    """EXAONE 4, whose layers without a window have no rotary embedding, if some have a window."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether some have one."""
        resolved = super().resolve(config)
        return resolved if config.sliding_window is None else replace(resolved, rotary_switch="is_sliding")


EXAONE4 = Exaone4Architecture(
    model_type="exaone4",
    name="Exaone4",
    # The block has norms after its modules only, so the MLP reads the residual stream itself.
    middle="mlp",
    mlp_norm="post_feedforward_layernorm",
    query_norm="q_norm",
    key_norm="k_norm",
    notes="EXAONE 4; norms after each module; norms on each query and key head: query-key stays whole; "
    "in the 32B, a rotary embedding in the layers with a sliding window alone",
)
