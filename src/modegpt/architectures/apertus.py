"""Apertus, of the Swiss AI Initiative."""

from .spec import Architecture

APERTUS = Architecture(
    model_type="apertus",
    name="Apertus",
    up=("mlp.up_proj",),
    middle="feedforward_layernorm",
    query_norm="q_norm",
    key_norm="k_norm",
    buffers=("mlp.act_fn.beta", "mlp.act_fn.eps"),
    notes="Apertus 8B and 70B; a plain MLP of xIELUs; norms on each query and key head: query-key stays whole",
)
