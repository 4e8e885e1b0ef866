"""NVIDIA's Nemotron and Minitron."""

from .spec import Architecture

NEMOTRON = Architecture(
    model_type="nemotron",
    name="Nemotron",
    up=("mlp.up_proj",),
    partial_rotary=True,
    notes="Nemotron-3 8B, Nemotron-4, Minitron; LayerNorm, a plain MLP of squared ReLUs, partial rotary",
)
