"""The sizes of a decoder."""

from dataclasses import dataclass


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
