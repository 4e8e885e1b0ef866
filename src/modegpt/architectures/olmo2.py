"""OLMo 2."""

from .spec import Architecture

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
