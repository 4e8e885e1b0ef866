"""SLEB (Song et al. 2024, arXiv:2402.09025): layers are left out one after another, each time that whose loss is least.

The loss is that of the next token on the calibration text, of the model without all layers that are out already and
without this one, too (their metric 3). The first and the last of the layers that are left stay while there are others,
as in their code.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..progress import Progress
from .layers import fewest, without
from .reduced import Reduced
from .walk import Walk, layer_parameters

TOKENS = 4096
"""Calibration tokens that are used, from the first on: every layer that stays is tried for every layer that goes."""


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Return what leaves out as many layers as a sparsity asks for; what one sparsity found, the next goes on from.

    Cost: for each layer left out, `n²/2` blocks and `n` heads on `TOKENS` tokens, of `n` layers that are left.
    """
    windows = windows[: max(1, TOKENS // windows.shape[1])]
    out: list[int] = []
    sizes = layer_parameters(dense)

    def at(sparsity: float) -> Reduced:
        while (left_out := fewest(sizes, out, sparsity)) is None:
            out.append(_least(dense, windows, out, lambda done, total: progress(f"layer {len(out) + 1}", done, total)))
        return without(dense, left_out)

    return at


@torch.no_grad()
def _least(dense: PreTrainedModel, windows: Tensor, out: list[int], progress: Callable[[int, int], None]) -> int:
    """Return the layer without which the loss is least, beside those that are out."""
    walk = Walk(dense, windows)
    left = [index for index in range(len(walk.layers)) if index not in out]
    losses: dict[int, float] = {}
    candidates = left[1:-1] or left
    for place, candidate in enumerate(left):
        progress(place, len(left))
        # The layers before it are run once for all candidates behind them.
        if candidate in candidates:
            losses[candidate] = _loss(walk, left[place + 1 :])
        walk.advance(candidate)
    return min(losses, key=lambda index: losses[index])


def _loss(walk: Walk, layers: list[int]) -> float:
    """Return the mean loss of the next token if only these layers follow; the walk stays where it is."""
    before = walk.calibration
    walk.calibration = before.copy()
    for index in layers:
        walk.advance(index)
    states, walk.calibration = walk.calibration.hidden, before
    total, first = torch.zeros((), dtype=torch.float64), 0
    for batch in states:
        ids = walk.windows[first : first + len(batch)].to(walk.device)
        first += len(batch)
        for logits, window in zip(walk.blocks.logits(batch[:, :-1]), ids, strict=True):
            total += nn.functional.cross_entropy(logits, window[1:], reduction="sum").cpu().double()
    return float(total) / (len(walk.windows) * (walk.windows.shape[1] - 1))
