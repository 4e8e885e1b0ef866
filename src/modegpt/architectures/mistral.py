"""Mistral 7B and its like; Ministral; Ministral 3."""

from .spec import Architecture

MISTRAL = Architecture(model_type="mistral", name="Mistral", notes="grouped queries, sliding window")

MINISTRAL = Architecture(
    model_type="ministral", name="Ministral", notes="as `mistral`, with a sliding window in some layers, by their type"
)

MINISTRAL3 = Architecture(
    model_type="ministral3",
    name="Ministral3",
    query_growth="llama_4_scaling_beta",
    notes="Ministral 3 3B to 14B, in `mistral3` files; queries grow behind the length that was trained first",
)
