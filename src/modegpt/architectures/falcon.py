"""Falcon."""

from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class FalconArchitecture(Architecture):
    """Falcon, whose config switches between three head layouts, three kinds of block and two of positions."""

    def resolve(self, config: Any) -> Architecture:
        """Read the number of key heads, the kind of block, and whether positions are ALiBi's, which the mask holds."""
        alone = config.multi_query and not config.new_decoder_architecture
        parallel = bool(config.new_decoder_architecture or config.parallel_attn)
        return replace(
            self,
            kv_heads=1 if alone else "num_kv_heads",
            parallel=parallel,
            # Which repeats keys and values before it caches them.
            caches_all=bool(config.new_decoder_architecture),
            # The mask holds its biases. Stock eager attention adds them once more, which is taken for an oversight.
            rotary=not config.alibi,
        )


FALCON = FalconArchitecture(
    model_type="falcon",
    name="Falcon",
    layers="h",
    attention="self_attention",
    query="query_key_value",
    key="query_key_value",
    value="query_key_value",
    by_group=True,
    output="dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    width="ffn_hidden_size",
    scaling="inv_norm_factor",
    dropout="",
    tuple_output=True,
    notes="Falcon 7B (multi-query), 40B, 180B and 2 (grouped), RW (ALiBi); projections fused by group",
)
