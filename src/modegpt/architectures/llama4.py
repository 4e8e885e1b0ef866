"""Llama 4."""

from typing import Any

from .spec import Architecture


class Llama4Architecture(Architecture):
    """Llama 4, whose config has one width for an expert and for the MLP beside the experts, which stays whole."""

    def set_mlp_width(self, config: Any, width: int) -> None:
        """Leave it as it is."""


LLAMA4_TEXT = Llama4Architecture(
    model_type="llama4_text",
    name="Llama4Text",
    causal_lm="Llama4ForCausalLM",
    # The rotary embedding is a table of complex numbers, queries and keys are normalised behind it, and in the layers
    # without one queries grow with their position.
    whole_attention=True,
    upcast_rotary=True,
    experts="feed_forward.experts",
    n_experts="num_local_experts",
    shared_down="feed_forward.shared_expert.down_proj",
    notes="Llama 4 Scout 17B-16E and Maverick 17B-128E, in `llama4` files; the experts alone: attention, the shared "
    "expert and the MLPs of layers without experts stay whole",
)
