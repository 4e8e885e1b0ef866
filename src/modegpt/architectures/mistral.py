"""Mistral 7B."""

from .spec import Architecture

MISTRAL = Architecture(model_type="mistral", name="Mistral", notes="grouped queries, sliding window")
