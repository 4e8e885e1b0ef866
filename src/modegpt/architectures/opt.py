"""OPT."""

from .spec import Architecture

OPT = Architecture(
    model_type="opt",
    name="OPT",
    layers="decoder.layers",
    output="out_proj",
    up=("fc1",),
    down="fc2",
    middle="final_layer_norm",
    width="ffn_dim",
    rotary=False,
    scale_query=True,
    notes="LayerNorm, ReLU, biases everywhere, learned positions: query-key coordinates are chosen singly",
)
