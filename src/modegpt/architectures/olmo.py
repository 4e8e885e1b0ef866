"""OLMo 1, 2 and 3, OLMoE and FlexOlmo."""

from dataclasses import dataclass, replace
from typing import Any

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
