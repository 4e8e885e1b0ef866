"""Baidu's ERNIE 4.5."""

from .spec import Architecture

ERNIE4_5 = Architecture(
    model_type="ernie4_5",
    name="Ernie4_5",
    interleaved=True,
    upcast_rotary=True,
    notes="ERNIE 4.5, dense; interleaved rotary pairs, biases everywhere where `use_bias` says so",
)
