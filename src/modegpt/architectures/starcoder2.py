"""StarCoder 2."""

from .spec import Architecture

STARCODER2 = Architecture(
    model_type="starcoder2",
    name="Starcoder2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    output_dropout="residual_dropout",
    notes="StarCoder 2; LayerNorm, biases everywhere, a plain MLP, sliding window",
)
