"""Other training-free methods, for comparing them on the same model, text and sparsity.

Each is written from its paper, and its authors' code where the two differ, one file a method. What it gives computes
what the method's model would, in the dense model's class: weights that the method removes are zeros, factors are
multiplied out, rotations are undone. So perplexity and accuracy are the method's, and its parameters are counted; its
speed and memory cannot be seen here.
"""

from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel

from ..architectures import Architecture
from . import flap, shortgpt, sleb, slicegpt, svd_llm, wanda_sp
from .layers import needs_all_layers
from .reduced import Reduced, Start, require
from .units import shared_heads
from .walk import layer_parameters, not_plain


class Baseline(NamedTuple):
    """One method."""

    start: Start
    removes: str
    """What it removes, in a few words."""
    refuses: Callable[[Architecture], str | None] = not_plain
    """Returns why it cannot be tried on a family; None where it can."""
    most: Callable[[PreTrainedModel], int] = lambda dense: sum(layer_parameters(dense))
    """Returns the parameters of a model's blocks that it can remove at most, whatever the text."""


BASELINES: dict[str, Baseline] = {
    "shortgpt": Baseline(shortgpt.start, "layers, by Block Influence", needs_all_layers),
    "sleb": Baseline(sleb.start, "layers, one after another by the loss without each", needs_all_layers),
    "flap": Baseline(
        flap.start, "heads and neurons that vary little; biases take over their means", shared_heads, flap.most
    ),
    "wanda-sp": Baseline(wanda_sp.start, "heads and neurons, by weight times input", shared_heads, wanda_sp.most),
    "svd-llm": Baseline(svd_llm.start, "ranks of every matrix, by SVD in whitened inputs", most=svd_llm.most),
    "slicegpt": Baseline(
        slicegpt.start, "directions of the residual stream, by PCA", slicegpt.not_plain_sums, slicegpt.most
    ),
}
"""By the name that `modegpt compare` knows it by."""

__all__ = ["BASELINES", "Baseline", "Reduced", "require"]
