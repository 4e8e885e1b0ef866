"""Kyutai's Helium."""

from .spec import Architecture

HELIUM = Architecture(
    model_type="helium",
    name="Helium",
    interleaved=True,
    notes="Helium 1 2B; interleaved rotary pairs, grouped queries",
)
