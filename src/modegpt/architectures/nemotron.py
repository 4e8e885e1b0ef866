"""NVIDIA's Nemotron and Minitron, and the hybrid ones, Nemotron-H to 3."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import InputError
from .spec import Architecture

NEMOTRON = Architecture(
    model_type="nemotron",
    name="Nemotron",
    up=("mlp.up_proj",),
    partial_rotary=True,
    notes="Nemotron-3 8B, Nemotron-4, Minitron; LayerNorm, a plain MLP of squared ReLUs, partial rotary",
)


@dataclass(frozen=True)
class NemotronHArchitecture(Architecture):
    """Nemotron-H to 3: a block is attention, or Mamba, or an MLP, or a mixture, under one name."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether there are experts, and refuse those that do not read the residual stream itself."""
        resolved = super().resolve(config)
        if "moe" not in config.layers_block_type:
            return resolved
        if config.moe_latent_size is not None:
            raise InputError("experts in a narrower space (moe_latent_size), as in Nemotron 3 Super, are not supported")
        return replace(
            resolved,
            up=(),
            down="",
            experts="mixer.experts",
            gated_experts=False,
            n_experts="n_routed_experts",
            shared_down="mixer.shared_experts.down_proj",
            width="moe_intermediate_size",
            expert_files=("", "mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj"),
            buffers=("mixer.gate.e_score_correction_bias",),
            float32=("mixer.gate.weight", "mixer.gate.e_score_correction_bias"),
        )

    def mixing(self, block: nn.Module) -> list[tuple[Any, bool]]:
        """Return what mixes tokens in a block, if it is no MLP and no mixture: Mamba puts out a tensor, and no pair."""
        mixer: Any = block.get_submodule(self.attention)
        return [] if hasattr(mixer, "down_proj") or hasattr(mixer, "experts") else [(mixer, hasattr(mixer, "o_proj"))]


NEMOTRON_H = NemotronHArchitecture(
    model_type="nemotron_h",
    name="NemotronH",
    attention="mixer",
    whole_attention=True,
    upcast_mixers=True,
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    # An MLP is a block of its own, so what it reads is the residual stream before the block.
    middle="norm",
    file_names=(("model.", "backbone."),),
    notes="Nemotron-H, Nemotron Nano 2 and 3; the MLPs alone, or the experts, which have no gate: Mamba, attention, "
    "the shared experts and MLPs beside layers of experts stay whole",
)
