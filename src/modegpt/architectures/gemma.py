"""Gemma 1 to 4 (text), and VaultGemma."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

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
        """Read whether there are experts, inputs of each layer, and layers that read keys and values of earlier ones.

        Raises:
            InputError: no layer has keys and values of its own.
        """
        resolved = super().resolve(config)
        if shared := getattr(config, "num_kv_shared_layers", 0):
            if shared >= config.num_hidden_layers:
                raise InputError(
                    f"the model has num_kv_shared_layers {shared}, and no more layers: it reads keys and values of "
                    "another model; give one that has its own"
                )
            resolved = replace(resolved, hands_on=True)
        if getattr(config, "hidden_size_per_layer_input", None):
            resolved = replace(resolved, token_arguments=("per_layer_input",))
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

    def layer_width(self, config: Any, index: int) -> int:
        """Return the width of one layer's MLP: with keys and values of an earlier one, it may be twice as wide."""
        wide = self.hands_on and not self.experts and config.use_double_wide_mlp
        return self.mlp_width(config) * (2 if wide and config.kv_sharing_modes[index] == "reuse" else 1)

    def block_dims(self, block: Any, dims: Dimensions) -> Dimensions:
        """Return the sizes of one block: its MLP's width may be its own."""
        return replace(dims, d_int=self.layer_width(block.config, block.layer_idx)) if self.hands_on else dims

    def behind_mlp(self, block: Any, total: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Add what the token's input of this layer gives."""
        if not self.token_arguments:
            return total
        gate = block.act_fn(block.per_layer_input_gate(total))
        return total + block.post_per_layer_input_norm(block.per_layer_projection(gate * arguments["per_layer_input"]))

    def beside_states(self, config: Any) -> tuple[int, int]:
        """Count the inputs of all layers, and keys and values of the last layer of each kind that has its own."""
        own = config.num_hidden_layers * config.hidden_size_per_layer_input if self.token_arguments else 0
        handed = 0
        for index, mode in enumerate(config.kv_sharing_modes if self.hands_on else ()):
            layer = config.per_layer_config[index]
            handed += 2 * layer.num_key_value_heads * layer.head_dim if mode == "store" else 0
        return own, handed

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
    notes="Gemma 4 E2B to 31B, in `gemma4` files; the MLPs, or the experts beside them, alone: queries, keys and "
    "values are normalised",
)

GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    name="Gemma4UnifiedText",
    causal_lm="Gemma4UnifiedForCausalLM",
    notes="Gemma 4 12B, in `gemma4_unified` files; as `gemma4_text`, without experts",
)
