"""Granite 3, and Granite 4 without experts."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import InputError
from .spec import Architecture

GRANITE = Architecture(
    model_type="granite",
    name="Granite",
    mlp_factor="residual_multiplier",
    notes="Granite 3, dense; attention, residual and embedding multipliers",
)

GRANITE_MOE = replace(
    GRANITE,
    model_type="granitemoe",
    name="GraniteMoe",
    up=(),
    down="",
    experts="block_sparse_moe.experts",
    n_experts="num_local_experts",
    file_names=(
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    ),
    notes="Granite 3 with experts, 1B-A400M and 3B-A800M; multipliers as above",
)


@dataclass(frozen=True)
class GraniteHybridArchitecture(Architecture):
    """Granite 4, whose config may set experts beside each MLP, and Mamba in place of attention."""

    def resolve(self, config: Any) -> Architecture:
        """Refuse experts, and read whether every layer attends, and with a rotary embedding."""
        if config.num_local_experts:
            raise InputError(
                f"the model has {config.num_local_experts} experts beside each MLP (num_local_experts); "
                "give a Granite 4 without any, such as Granite 4.0 H Micro"
            )
        resolved = super().resolve(config)
        if "linear_attention" in config.layer_types:
            return resolved
        rotary = config.position_embedding_type == "rope"
        return replace(resolved, whole_attention=False, mixers=(), upcast_mixers=False, rotary=rotary)


GRANITE_HYBRID = GraniteHybridArchitecture(
    model_type="granitemoehybrid",
    name="GraniteMoeHybrid",
    up=("shared_mlp.input_linear", "shared_mlp.input_linear"),
    down="shared_mlp.output_linear",
    width="shared_intermediate_size",
    mlp_factor="residual_multiplier",
    whole_attention=True,
    mixers=("mamba",),
    upcast_mixers=True,
    notes="Granite 4 350M to 3B without experts; in the H models the MLPs alone: Mamba layers and attention stay whole",
)
