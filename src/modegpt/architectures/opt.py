"""OPT."""

from torch import nn

from .spec import Architecture


class OptArchitecture(Architecture):
    """OPT; its 350M model, alone, normalises after each module."""

    def middle_module(self, block: nn.Module) -> nn.Module:
        """Return the norm before the MLP, or, where the norm comes after it, the MLP's first layer."""
        return super().middle_module(block) if block.do_layer_norm_before else block.get_submodule("fc1")


OPT = OptArchitecture(
    model_type="opt",
    name="OPT",
    layers="decoder.layers",
    output="out_proj",
    up=("fc1",),
    down="fc2",
    middle="final_layer_norm",
    adds_mlp="do_layer_norm_before",
    width="ffn_dim",
    rotary=False,
    scale_query=True,
    dropout="dropout",
    notes="LayerNorm, ReLU, biases everywhere, learned positions: query and key may be cut to any subspace",
)
