"""GPT-Neo."""

from .spec import Architecture

GPT_NEO = Architecture(
    model_type="gpt_neo",
    name="GPTNeo",
    layers="h",
    attention="attn",
    whole_attention=True,
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.out_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    middle="ln_2",
    tuple_output=True,
    notes="GPT-Neo 125M to 2.7B, TinyStories; the MLPs alone, as local attention makes its own mask",
)
