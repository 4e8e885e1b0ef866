"""GLM 4 (9B, of 2024) and GLM 4 0414."""

from dataclasses import replace

from .spec import Architecture

GLM = Architecture(
    model_type="glm",
    name="Glm",
    up=("mlp.gate_up_proj", "mlp.gate_up_proj"),
    partial_rotary=True,
    interleaved=True,
    notes="GLM 4 9B, GLM Edge; gate and up fused, interleaved rotary pairs on a part of each head",
)

GLM4 = replace(
    GLM,
    model_type="glm4",
    name="Glm4",
    mlp_norm="post_mlp_layernorm",
    notes="GLM 4 and Z1 0414; as `glm`, with norms before and after each module",
)
