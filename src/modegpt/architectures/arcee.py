"""Arcee's foundation models."""

from .spec import Architecture

ARCEE = Architecture(
    model_type="arcee",
    name="Arcee",
    up=("mlp.up_proj",),
    notes="AFM 4.5B; a plain MLP of squared ReLUs, scaled rotary embeddings",
)
