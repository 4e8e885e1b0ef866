"""GPT-J, and its kin of code models, CodeGen."""

from dataclasses import replace

from .spec import Architecture

GPTJ = Architecture(
    model_type="gptj",
    name="GPTJ",
    layers="h",
    attention="attn",
    whole_attention=True,
    output="out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    parallel=True,
    width="n_inner",
    notes="GPT-J 6B; the MLPs alone, as sines and cosines come in an order of their own; parallel blocks",
)

CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    name="CodeGen",
    query="qkv_proj",
    key="qkv_proj",
    value="qkv_proj",
    notes="CodeGen 350M to 16B; as `gptj`",
)
