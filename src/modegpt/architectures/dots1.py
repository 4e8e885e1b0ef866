"""Rednote's dots.llm1."""

from dataclasses import replace

from .glm import GLM4_MOE

DOTS1 = replace(
    GLM4_MOE,
    model_type="dots1",
    name="Dots1",
    partial_rotary=False,
    notes="dots.llm1; query-key, the MLPs of the first layers and the shared experts stay whole",
)
