"""FLAP (An et al. 2024, arXiv:2312.11983): heads and neurons that vary little go, and biases take over their means.

As their code has it where the paper leaves it open (`WIFV`, `AL-AM`): the scores of attention are squared before they
are standardised.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..architectures.access import affine
from ..progress import Progress
from .reduced import Reduced, reaches, require
from .units import by_group, costs, n_groups, readers, remove
from .walk import Decoder, Walk, blocks_of, layer_parameters, reading


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Score every group of heads and every neuron in one pass over the dense model.

    A feature `i` of an output or down projection scores `Var(z_i)·‖W_{:i}‖²` over the calibration tokens; scores of a
    projection are standardised to mean 0 and deviation 1 (a group's is the mean of its features'), and of all layers
    together the lowest go. What they put out on average is added to the projection's bias.
    """
    walk = Walk(dense, windows)
    n_layers = len(walk.layers)
    means: list[Tensor] = []
    scores: list[Tensor] = []
    for index, block in enumerate(walk.layers):
        progress("scores", index, n_layers)
        modules = readers(walk, block)
        spread = Spread(len(modules))
        with reading(modules, spread.add):
            walk.advance(index)
        means += spread.means()
        attention, mlp = (
            variance * affine(module).weight.double().square().sum(0)
            for module, variance in zip(modules, spread.variances(), strict=True)
        )
        scores += [by_group(_standard(attention.square()), walk).mean(1), _standard(mlp)]
    del walk  # with all hidden states: what is returned lives on
    decoder, total = Decoder(dense), sum(layer_parameters(dense))
    prices, entries = _prices(decoder)

    @torch.no_grad()
    def at(sparsity: float) -> Reduced:
        kept, removed = _choose(scores, prices, entries, (sparsity, total))
        require("flap", removed, sparsity, total)
        model = copy.deepcopy(dense)
        for index, module in enumerate(m for block in blocks_of(model) for m in readers(decoder, block)):
            features = kept[index].repeat_interleave(len(means[index]) // len(kept[index]))
            remove(module, features, means[index])
        return Reduced(model, removed, removed / total)

    return at


def most(dense: PreTrainedModel) -> int:
    """Return the parameters that go if every unit does, less those of the biases."""
    decoder = Decoder(dense)
    prices, entries = _prices(decoder)
    units = [n_groups(decoder.dims), decoder.dims.d_int] * len(decoder.layers)
    return sum(price * count for price, count in zip(prices, units, strict=True)) - sum(entries)


def _prices(decoder: Decoder) -> tuple[list[int], list[int]]:
    """Return, by projection, what one of its units holds, and what it must get for the first of them that goes."""
    prices = [cost for block in decoder.layers for cost in costs(decoder, block)]
    projections = [module for block in decoder.layers for module in readers(decoder, block)]
    return prices, [0 if affine(module).bias is not None else decoder.dims.d_model for module in projections]


def _standard(scores: Tensor) -> Tensor:
    """Return scores of mean 0 and deviation 1; zeros where all are equal."""
    moved = scores - scores.mean()
    return moved / moved.std().clamp_min(torch.finfo(scores.dtype).tiny)


def _choose(
    scores: list[Tensor], prices: list[int], entries: list[int], goal: tuple[float, int]
) -> tuple[list[Tensor], int]:
    """Take the units of the lowest scores until they hold enough parameters, less those that their removal adds.

    Args:
        scores: by projection, `(units,)`.
        prices: by projection, what one unit holds.
        entries: by projection, what it gets when its first unit goes.
        goal: the share to remove, and the parameters that it is of; all units go where they do not hold as many.

    Returns:
        By projection, `(units,)`, whether each stays, and the parameters removed.
    """
    owners = torch.cat([torch.full((len(part),), index) for index, part in enumerate(scores)])
    numbers = torch.cat([torch.arange(len(part)) for part in scores])
    kept, removed = [torch.ones(len(part), dtype=torch.bool) for part in scores], 0
    for place in torch.cat(scores).argsort(stable=True).tolist():
        if reaches(removed, *goal):
            break
        index = int(owners[place])
        removed += prices[index] - (entries[index] if kept[index].all() else 0)
        kept[index][numbers[place]] = False
    return kept, removed


class Spread:
    """Means and variances of the features that several modules read.

    Args:
        count: of modules.
    """

    def __init__(self, count: int) -> None:
        """Start with no tokens."""
        self._seen: list[tuple[int, Tensor, Tensor] | None] = [None] * count
        """Of each module: tokens, a point near its features' means, and the sums of distances from it and squares."""

    def add(self, number: int, rows: Tensor) -> None:
        """Add `(tokens, width)` of the module of a number."""
        rows = rows.double()
        # The squares of a feature far from zero would swallow its variance.
        tokens, near, sums = self._seen[number] or (0, rows.mean(0), torch.zeros_like(rows[:2]))
        moved = rows - near
        self._seen[number] = (tokens + len(rows), near, sums + torch.stack((moved.sum(0), moved.square().sum(0))))

    def means(self) -> list[Tensor]:
        """Return the `(width,)` means of each module's features."""
        return [near + sums[0] / tokens for tokens, near, sums in self._all()]

    def variances(self) -> list[Tensor]:
        """Return their variances, `Σ (z − mean)² / (tokens − 1)`."""
        return [(sums[1] - sums[0].square() / n).clamp_min(0) / max(n - 1, 1) for n, _near, sums in self._all()]

    def _all(self) -> list[tuple[int, Tensor, Tensor]]:
        return [seen for seen in self._seen if seen is not None]
