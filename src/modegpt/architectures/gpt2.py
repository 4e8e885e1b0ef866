"""GPT-2, and its kin of code models, GPT-BigCode."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .spec import Architecture


@dataclass(frozen=True)
class Gpt2Architecture(Architecture):
    """GPT-2; as a decoder alone."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse cross attention, whose second attention module has no ranks here."""
        if config.add_cross_attention:
            raise InputError("the model has cross attention (add_cross_attention); give a decoder without it")
        return super().resolve(config)


@dataclass(frozen=True)
class GptBigCodeArchitecture(Gpt2Architecture):
    """GPT-BigCode, whose config says whether all heads share one key and one value."""

    def resolve(self, config: Any) -> Architecture:
        """Read the number of key heads; refuse cross attention."""
        return replace(super().resolve(config), kv_heads=1 if config.multi_query else 0)


GPT2 = Gpt2Architecture(
    model_type="gpt2",
    name="GPT2",
    causal_lm="GPT2LMHeadModel",
    layers="h",
    attention="attn",
    query="c_attn",
    key="c_attn",
    value="c_attn",
    output="c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    middle="ln_2",
    width="n_inner",
    rotary=False,
    dropout="attn_dropout",
    output_dropout="resid_dropout",
    notes="GPT-2, DistilGPT-2; fused and transposed projections, learned positions: query and key may be cut "
    "to any subspace",
)

GPT_BIGCODE = GptBigCodeArchitecture(
    model_type="gpt_bigcode",
    name="GPTBigCode",
    layers="h",
    attention="attn",
    query="c_attn",
    key="c_attn",
    value="c_attn",
    by_group=True,
    output="c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    middle="ln_2",
    width="n_inner",
    rotary=False,
    dropout="attn_dropout",
    output_dropout="resid_dropout",
    notes="StarCoder 1, SantaCoder, Granite Code 20B and 34B; multi-query, learned positions: query and key may be cut "
    "to any subspace",
)
