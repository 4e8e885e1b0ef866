"""Mistral 7B and its like; Ministral."""

from .spec import Architecture

MISTRAL = Architecture(model_type="mistral", name="Mistral", notes="grouped queries, sliding window")

MINISTRAL = Architecture(
    model_type="ministral", name="Ministral", notes="as `mistral`, with a sliding window in some layers, by their type"
)
