"""GPT-2, and its kin of code models, GPT-BigCode."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .spec import Architecture


@dataclass(frozen=True)
class Gpt2Architecture(Architecture):
    """GPT-2 and GPT-BigCode; as a decoder alone."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse cross attention, whose second module has no ranks here; read whether all heads share a key."""
        if config.add_cross_attention:
            raise InputError("the model has cross attention (add_cross_attention); give a decoder without it")
        resolved = super().resolve(config)
        # GPT-BigCode's alone. Its config's number of key heads can be that of a default number of heads.
        shared = getattr(config, "multi_query", None)
        return resolved if shared is None else replace(resolved, kv_heads=int(shared))


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

GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    name="GPTBigCode",
    causal_lm="",
    by_group=True,
    notes="StarCoder 1, SantaCoder, Granite Code 20B and 34B; multi-query, learned positions: query and key may be cut "
    "to any subspace",
)
