"""SmolLM 3."""

from .spec import Architecture

SMOLLM3 = Architecture(
    model_type="smollm3",
    name="SmolLM3",
    rotary_switch=("use_rope",),
    notes="SmolLM 3; a rotary embedding in three layers of four, and query and key cut to any subspace in the others",
)
