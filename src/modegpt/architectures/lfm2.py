"""Liquid AI's LFM2 and LFM3."""

from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class Lfm2Architecture(Architecture):
    """LFM2, whose config may name a width that its MLPs derive theirs from."""

    def mlp_width(self, config: Any) -> int:
        """Return the width of a dense model's MLPs."""
        width = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            width = 2 * width // 3
            if config.block_ffn_dim_multiplier is not None:
                multiple = config.block_multiple_of
                width = -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple
        return width

    def set_mlp_width(self, config: Any, width: int) -> None:
        """Name the very width."""
        config.intermediate_size, config.block_auto_adjust_ff_dim = width, False


LFM2 = Lfm2Architecture(
    model_type="lfm2",
    name="Lfm2",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    middle="ffn_norm",
    whole_attention=True,
    mixers=("conv",),
    notes="LFM2 350M to 2.6B; the MLPs alone: convolutions, and the attention of the other layers, stay whole",
)

LFM2_MOE = Architecture(
    model_type="lfm2_moe",
    name="Lfm2Moe",
    experts="feed_forward.experts",
    width="moe_intermediate_size",
    expert_files=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3", "feed_forward.experts.{}.w2"),
    middle="ffn_norm",
    whole_attention=True,
    mixers=("conv",),
    buffers=("feed_forward.expert_bias",),
    float32=("feed_forward.expert_bias",),
    notes="LFM2 8B-A1B; the experts alone: convolutions, attention and the MLPs of the first layers stay whole",
)


@dataclass(frozen=True)
class Lfm3Architecture(Architecture):
    """LFM3, whose config says whether norms stand behind attention and MLP."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether there are these norms."""
        resolved = super().resolve(config)
        return resolved if config.use_sandwich_norm else replace(resolved, mlp_norm="")


LFM3 = Lfm3Architecture(
    model_type="lfm3",
    name="Lfm3",
    up=LFM2.up,
    down=LFM2.down,
    middle=LFM2.middle,
    mlp_norm="post_ffn_norm",
    whole_attention=True,
    mixers=LFM2.mixers,
    file_names=((".self_attn.g_proj.", ".self_attn.gate_proj."),),
    notes="LFM3 1.7B; the MLPs alone: convolutions, and the gated attention of the other layers, stay whole",
)
