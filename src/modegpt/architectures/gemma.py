"""Gemma 1 to 4 (text), and VaultGemma."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .dimensions import Dimensions
from .spec import Architecture

GEMMA = Architecture(
    model_type="gemma", name="Gemma", start_token=True, notes="Gemma 1; heads wider than the model, multi-query"
)

GEMMA2 = Architecture(
    model_type="gemma2",
    name="Gemma2",
    middle="pre_feedforward_layernorm",
    mlp_norm="post_feedforward_layernorm",
    start_token=True,
    softcap="attn_logit_softcapping",
    notes="Gemma 2; norms before and after each module, capped scores, sliding window in every other layer",
)

GEMMA3_TEXT = Architecture(
    model_type="gemma3_text",
    name="Gemma3Text",
    causal_lm="Gemma3ForCausalLM",
    middle="pre_feedforward_layernorm",
    mlp_norm="post_feedforward_layernorm",
    start_token=True,
    query_norm="q_norm",
    key_norm="k_norm",
    notes="Gemma 3, text; two rotary tables by layer type; norms on each query and key head: query-key stays whole",
)

VAULTGEMMA = Architecture(
    model_type="vaultgemma",
    name="VaultGemma",
    middle="pre_feedforward_layernorm",
    start_token=True,
    softcap="attn_logit_softcapping",
    notes="VaultGemma 1B; as `gemma2`, without the norms after each module",
)


@dataclass(frozen=True)
class Gemma4Architecture(Architecture):
    """Gemma 4, whose small models hand more than hidden states from block to block."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse those, and read whether there are experts."""
        reasons = {
            "hidden_size_per_layer_input": "every block reads embeddings of its own for each token",
            "num_kv_shared_layers": "later blocks read the keys and values of earlier ones",
        }
        for name, reason in reasons.items():
            if said := getattr(config, name, None):
                raise InputError(f"the model has {name} {said}: {reason}; give Gemma 4 31B, 26B or 12B")
        resolved = super().resolve(config)
        if not getattr(config, "enable_moe_block", False):
            return resolved
        return replace(
            resolved,
            # One more norm stands behind the sum of what this one and that of the MLP beside give.
            mlp_norm="post_feedforward_layernorm_2",
            adds_mlp=False,
            experts="experts",
            experts_per_token="top_k_experts",
            shared_down=self.down,
            width="moe_intermediate_size",
        )

    def cached(self, dims: Dimensions, ranks: dict[str, int], outputs: Mapping[str, int]) -> int:
        """Count keys twice where they are the values, too, before both are normalised."""
        keys, values = (outputs.get(f"{self.attention}.{name}", 0) for name in (self.key, self.value))
        return keys + (values or keys)


GEMMA4_TEXT = Gemma4Architecture(
    model_type="gemma4_text",
    name="Gemma4Text",
    causal_lm="Gemma4ForCausalLM",
    middle="pre_feedforward_layernorm",
    mlp_norm="post_feedforward_layernorm",
    sum_factor="layer_scalar",
    buffers=("layer_scalar",),
    start_token=True,
    # Values are normalised, too, and in some layers they are the keys.
    whole_attention=True,
    notes="Gemma 4 31B and 26B-A4B, in `gemma4` files; the MLPs, or the experts beside them, alone: queries, keys and "
    "values are normalised",
)

GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    name="Gemma4UnifiedText",
    causal_lm="Gemma4UnifiedForCausalLM",
    notes="Gemma 4 12B, in `gemma4_unified` files; as `gemma4_text`, without experts",
)
