"""MPT."""

from typing import Any

from .clipping import refuse_clipping
from .spec import Architecture


class MptArchitecture(Architecture):
    """MPT, whose config can clip queries, keys and values."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse clipping, which does not commute with a change of the basis."""
        refuse_clipping(config.attn_config.clip_qkv or None, "an MPT without, such as MPT-7B")
        return super().resolve(config)


MPT = MptArchitecture(
    model_type="mpt",
    name="Mpt",
    layers="blocks",
    attention="attn",
    query="Wqkv",
    key="Wqkv",
    value="Wqkv",
    output="out_proj",
    up=("ffn.up_proj",),
    down="ffn.down_proj",
    middle="norm_2",
    width="",
    kv_heads=0,
    rotary=False,
    position_bias="position_bias",
    scaling="softmax_scale",
    dropout="attn_dropout_p",
    tuple_output=True,
    notes="MPT 7B and 30B; LayerNorm, no biases, ALiBi positions: query and key may be cut to any subspace; models "
    "with `clip_qkv` are refused",
)
