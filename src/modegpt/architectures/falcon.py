"""Falcon."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .spec import Architecture


@dataclass(frozen=True)
class FalconArchitecture(Architecture):
    """Falcon, whose config switches between three head layouts and three kinds of block."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse ALiBi, and read the number of key heads and the kind of block."""
        if config.alibi:
            raise InputError(
                "the model has ALiBi positions (alibi), which its own attention adds to the scores; "
                "give a Falcon with rotary positions, such as Falcon-7B"
            )
        kv_heads = 1 if config.multi_query else config.num_attention_heads
        if config.new_decoder_architecture:
            kv_heads = config.num_kv_heads
        parallel = bool(config.new_decoder_architecture or config.parallel_attn)
        # Which repeats keys and values before it caches them.
        return replace(self, kv_heads=kv_heads, parallel=parallel, caches_all=bool(config.new_decoder_architecture))


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
    notes="Falcon 7B (multi-query), 40B, 180B and 2 (grouped); projections fused by group; ALiBi models are refused",
)
