"""Meta's Code World Model."""

from .spec import Architecture

CWM = Architecture(
    model_type="cwm",
    name="Cwm",
    notes="Code World Model 32B; grouped queries, sliding window in three layers of four, scaled rotary embeddings",
)
