"""Gemma 1, 2 and 3 (text)."""

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
