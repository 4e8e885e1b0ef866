"""Granite 3 (dense)."""

from .spec import Architecture

GRANITE = Architecture(
    model_type="granite",
    name="Granite",
    plain_mlp=False,
    notes="Granite 3, dense; attention, residual and embedding multipliers",
)
