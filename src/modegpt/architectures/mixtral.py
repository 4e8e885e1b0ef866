"""Mixtral."""

from .spec import Architecture

MIXTRAL = Architecture(
    model_type="mixtral",
    name="Mixtral",
    up=(),
    down="",
    whole_mlp="mlp.experts",
    notes="Mixtral 8x7B and 8x22B; the attention alone, which is a few per cent of a block: the experts stay whole",
)
