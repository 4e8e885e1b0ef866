"""Jais 2."""

from .spec import Architecture

JAIS2 = Architecture(
    model_type="jais2",
    name="Jais2",
    up=("mlp.up_proj",),
    notes="Jais 2 8B and 70B; LayerNorm, a plain MLP of squared ReLUs, biases everywhere",
)
