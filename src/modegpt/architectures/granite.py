"""Granite 3 (dense)."""

from .spec import Architecture

GRANITE = Architecture(
    model_type="granite",
    name="Granite",
    mlp_factor="residual_multiplier",
    notes="Granite 3, dense; attention, residual and embedding multipliers",
)
