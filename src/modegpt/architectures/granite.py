"""Granite 3 and 4, and those with sliding windows."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .dimensions import Dimensions
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
    experts="block_sparse_moe.experts",
    n_experts="num_local_experts",
    file_names=(
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    ),
    notes="Granite 3 with experts, 1B-A400M and 3B-A800M; multipliers as above",
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    name="GraniteMoeShared",
    shared_down="shared_mlp.output_linear",
    notes="Granite with experts and an MLP beside them, which stays whole; multipliers as above",
)


@dataclass(frozen=True)
class GraniteHybridArchitecture(Architecture):
    """Granite 4, whose config may set experts beside each MLP, and Mamba in place of attention."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether there are experts, whether every layer attends, and with a rotary embedding."""
        resolved = super().resolve(config)
        if config.num_local_experts:
            resolved = replace(
                resolved,
                experts=GRANITE_MOE.experts,
                n_experts=GRANITE_MOE.n_experts,
                shared_down=self.down,
                width=GRANITE_MOE.width,
                file_names=GRANITE_MOE.file_names,
            )
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
    notes="Granite 4; in the H models the MLPs alone, as Mamba layers and attention stay whole; in H Tiny and H Small "
    "the experts, as the MLPs beside them stay whole, too",
)


@dataclass(frozen=True)
class GraniteSlidingArchitecture(Architecture):
    """Granite of sliding windows and sinks, where each layer has a base of its rotary embedding, or none."""

    def block_dims(self, block: nn.Module, dims: Dimensions) -> Dimensions:
        """Return the sizes of one block: without a rotary part where its base is 0."""
        attention: Any = block.get_submodule(self.attention)
        return dims if attention.config.layer_rope_theta[attention.layer_idx] else replace(dims, rotary_dim=0)


GRANITE_SWA = GraniteSlidingArchitecture(
    model_type="granite_swa",
    name="GraniteSWA",
    mlp_factor="residual_multiplier",
    sinks="sinks",
    notes="Granite Swash 2B; sliding windows, sinks, a rotary base of each layer's own or none; multipliers as above",
)

GRANITE_MOE_SWA = replace(
    GRANITE_SWA,
    model_type="granitemoe_swa",
    name="GraniteMoeSWA",
    experts=GRANITE_MOE.experts,
    n_experts=GRANITE_MOE.n_experts,
    shared_down=GRANITE_MOE_SHARED.shared_down,
    notes="Granite Swash 3B-A600M; as `granite_swa`, with experts, and an MLP beside them where the config has one",
)
