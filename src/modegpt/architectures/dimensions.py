"""The sizes of a decoder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a family's description is told in these sizes, too
    from .spec import Architecture


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a decoder, in the names used throughout the package."""

    n_layers: int
    d_model: int
    d_int: int
    d_head: int
    n_heads: int
    n_kv_heads: int
    rotary_dim: int
    """Leading coordinates of a head under the rotary embedding; 0 where there is none."""
    n_experts: int = 0
    """Experts of a layer, of width `d_int` each; 0 where an MLP is one."""

    @property
    def full_ranks(self) -> dict[str, int]:
        """The rank of each module of the dense block."""
        return {"mlp": self.d_int, "qk": self.d_head, "vo": self.d_head}

    @classmethod
    def of(cls, architecture: "Architecture", config: Any) -> "Dimensions":
        """Read the sizes from a dense model's config."""
        n_heads, kv_heads = config.num_attention_heads, architecture.kv_heads
        d_head, n_kv_heads, rotary_dim = config.hidden_size // n_heads, n_heads, 0
        if not architecture.whole_attention:  # else heads may differ from layer to layer, and nothing asks
            d_head = getattr(config, "head_dim", None) or d_head
            n_kv_heads = getattr(config, kv_heads, None) if isinstance(kv_heads, str) else kv_heads
            rotary_dim = d_head if architecture.rotary else 0
        rope = config.rope_parameters if architecture.partial_rotary else {}
        # Proportional tables span the whole head, with angles of 0 behind the part that turns.
        if rope.get("rope_type") != "proportional" and "partial_rotary_factor" in rope:
            turned = int(d_head * rope["partial_rotary_factor"])
            rotary_dim = turned + turned % 2  # half a pair is a whole one in transformers' tables
        return cls(
            n_layers=config.num_hidden_layers,
            d_model=config.hidden_size,
            d_int=architecture.mlp_width(config),
            d_head=d_head,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads or n_heads,
            rotary_dim=rotary_dim,
            n_experts=getattr(config, architecture.n_experts) if architecture.experts else 0,
        )
