"""GPT-Neo."""

from .spec import Architecture

GPT_NEO = Architecture(
    model_type="gpt_neo",
    name="GPTNeo",
    layers="h",
    attention="attn.attention",
    output="out_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    middle="ln_2",
    kv_heads=0,
    rotary=False,
    scaling=1.0,
    upcast_scores=True,
    # Of local layers a window, which the model's mask knows nothing of.
    mask_buffer="bias",
    dropout="attn_dropout",
    output_dropout="resid_dropout",
    tuple_output=True,
    notes="GPT-Neo 125M to 2.7B, TinyStories; learned positions: query and key may be cut to any subspace",
)
