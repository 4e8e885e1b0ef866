"""BLOOM."""

from dataclasses import replace
from typing import Any

from .spec import Architecture


class BloomArchitecture(Architecture):
    """BLOOM, whose config says what is added to the output of attention and MLP."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether it is the residual stream, or what they read of it behind their norms."""
        return replace(super().resolve(config), adds_mlp=not config.apply_residual_connection_post_layernorm)


BLOOM = BloomArchitecture(
    model_type="bloom",
    name="Bloom",
    layers="h",
    attention="self_attention",
    query="query_key_value",
    key="query_key_value",
    value="query_key_value",
    by_group=True,
    output="dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    width="",
    kv_heads=0,
    rotary=False,
    position_bias="alibi",
    scaling="inv_norm_factor",
    output_dropout="hidden_dropout",
    adds_attention=True,
    tuple_output=True,
    notes="BLOOM and BLOOMZ; LayerNorm, biases everywhere, ALiBi positions: query and key may be cut to any subspace",
)
