"""ShortGPT (Men et al. 2024, arXiv:2403.03853): the layers that change the residual stream least are left out."""

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from ..importance import InfluenceMeter
from ..progress import Progress
from .layers import fewest, without
from .reduced import Reduced
from .walk import Walk, layer_parameters


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Score every layer by its Block Influence, `1 − E cos(x_in, x_out)` (their equation 1): one pass.

    Those of the lowest score are left out until they hold the share that is asked for.
    """
    walk = Walk(dense, windows)
    n_layers = len(walk.layers)
    meter = InfluenceMeter(n_layers)
    for index in range(n_layers):
        progress("scores", index, n_layers)
        walk.advance(index, lambda before, after, index=index: meter.update(index, before, after))
    order, sizes = meter.scores().argsort(stable=True).tolist(), layer_parameters(dense)

    def at(sparsity: float) -> Reduced:
        left_out = fewest(sizes, order, sparsity)
        assert left_out is not None, "all layers hold every share"
        return without(dense, left_out)

    return at
