"""OLMo 1, 2 and 3, OLMoE, FlexOlmo and OLMo Hybrid."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .clipping import refuse_clipping
from .spec import Architecture


@dataclass(frozen=True)
class OlmoArchitecture(Architecture):
    """OLMo 1 and OLMoE, whose config can clip queries, keys and values."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse clipping, which does not commute with a change of the basis."""
        refuse_clipping(config.clip_qkv, "an OLMo without, such as OLMo-1B-hf")
        return super().resolve(config)


OLMO = OlmoArchitecture(
    model_type="olmo",
    name="Olmo",
    notes="OLMo 1; LayerNorm without gains; models with `clip_qkv` are refused",
)

OLMO2 = Architecture(
    model_type="olmo2",
    name="Olmo2",
    # The block has norms after its modules only, so the MLP reads the residual stream itself.
    middle="mlp",
    mlp_norm="post_feedforward_layernorm",
    query_norm="q_norm",
    key_norm="k_norm",
    norm_input="flat",
    notes="OLMo 2; norms after each module; one norm over all query heads, one over all key heads: "
    "query-key stays whole",
)

OLMOE = OlmoArchitecture(
    model_type="olmoe",
    name="Olmoe",
    experts="mlp.experts",
    query_norm="q_norm",
    key_norm="k_norm",
    norm_input="flat",
    notes="OLMoE; one norm over all query heads, one over all key heads: query-key stays whole",
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    name="Olmo3",
    notes="OLMo 3; as `olmo2`, with a sliding window in three layers of four and rotary tables by layer type",
)

FLEX_OLMO = replace(
    OLMO2,
    model_type="flex_olmo",
    name="FlexOlmo",
    experts="mlp.experts",
    notes="FlexOlmo 7x7B; as `olmo2`, with experts",
)


class OlmoHybridArchitecture(Architecture):
    """OLMo Hybrid, whose layers have their norms behind attention and MLP, or, with linear attention, before them."""

    def output_norm(self, block: nn.Module) -> Any:
        """Return the norm behind the MLP, or None in a layer with linear attention."""
        return getattr(block, self.mlp_norm, None)

    def middle_module(self, block: nn.Module) -> nn.Module:
        """Return the norm before the MLP, or the MLP, whichever reads the residual stream."""
        return block.get_submodule("post_attention_layernorm" if self.output_norm(block) is None else "mlp")


OLMO_HYBRID = OlmoHybridArchitecture(
    model_type="olmo_hybrid",
    name="OlmoHybrid",
    middle="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
    whole_attention=True,
    mixers=("linear_attn",),
    upcast_mixers=True,
    file_names=(
        (".input_layernorm.", ".attention_layer_norm."),
        (".post_attention_layernorm.", ".feedforward_layer_norm."),
    ),
    joined_files=((".conv1d.", (".q_conv1d.", ".k_conv1d.", ".v_conv1d.")),),
    float32=("linear_attn.A_log",),
    notes="OLMo Hybrid 7B; the MLPs alone: linear attention in three layers of four, and the attention of the others, "
    "stay whole",
)
