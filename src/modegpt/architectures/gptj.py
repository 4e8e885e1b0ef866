"""GPT-J, and its kin of code models, CodeGen."""

from dataclasses import replace
from typing import Any

from ..cache_name import CACHE
from .dimensions import Dimensions
from .spec import Architecture


class GptjArchitecture(Architecture):
    """GPT-J, whose config names how many coordinates of a head turn."""

    def dimensions(self, config: Any) -> Dimensions:
        """Read the sizes from a dense model's config."""
        return replace(super().dimensions(config), rotary_dim=config.rotary_dim)


GPTJ = GptjArchitecture(
    model_type="gptj",
    name="GPTJ",
    layers="h",
    attention="attn",
    output="out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    parallel=True,
    width="n_inner",
    kv_heads=0,
    interleaved=True,
    sines_first=True,
    output_dropout="resid_dropout",
    tuple_output=CACHE == "past_key_values",  # until transformers 5.23
    notes="GPT-J 6B; partial rotary of neighbouring coordinates, parallel blocks",
)

CODEGEN = replace(
    GPTJ,
    model_type="codegen",
    name="CodeGen",
    query="qkv_proj",
    key="qkv_proj",
    value="qkv_proj",
    # As on the four devices that it was trained on.
    fused_parts=4,
    fused_order="query value key",
    upcast_rotary=True,
    notes="CodeGen 350M to 16B; as `gptj`, with projections fused in four parts",
)
