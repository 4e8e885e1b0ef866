"""Wanda-sp: Wanda's metric (Sun et al. 2024, arXiv:2306.11695) for heads and neurons, as An et al. (2024) have it."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..architectures.access import affine
from ..progress import Progress
from .reduced import Reduced, unreachable
from .units import Costs, by_group, costs, n_groups, readers, remove
from .walk import Decoder, Walk, layer_parameters, reading


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Return what removes the same share of every block.

    A feature `i` of an output or down projection scores `mean_o |W_oi|·‖z_i‖₂`; the groups of heads of the lowest sums,
    as many whole ones as the share allows, and the neurons of the lowest scores go. Where groups are too coarse for the
    share, neurons make up for them. Each block sees what the blocks before it, already cut, put out.
    """

    @torch.no_grad()
    def at(sparsity: float) -> Reduced:
        model = copy.deepcopy(dense)
        walk = Walk(model, windows)
        sizes, removed, n_layers = layer_parameters(dense), 0, len(walk.layers)
        for index, block in enumerate(walk.layers):
            progress("compress", index, n_layers)
            output, down = readers(walk, block)
            weights = [affine(module).weight for module in (output, down)]
            squares = [torch.zeros_like(weight[0], dtype=torch.float64) for weight in weights]

            def see(number: int, rows: Tensor, squares: list[Tensor] = squares) -> None:
                squares[number] += rows.float().square().sum(0, dtype=torch.float64)

            with reading((output, down), see):
                for _ in walk.run(index):
                    pass
            scores = [
                weight.double().abs().mean(0) * square.sqrt() for weight, square in zip(weights, squares, strict=True)
            ]
            cost = costs(walk, block)
            goal = sparsity * sizes[index]
            units = n_groups(walk.dims), walk.dims.d_int
            gone_groups, gone_neurons = _counts(goal, cost, units, sparsity)
            grouped = by_group(scores[0], walk)
            kept = torch.ones_like(grouped, dtype=torch.bool)
            kept[grouped.sum(1).argsort(stable=True)[:gone_groups]] = False
            remove(output, kept.flatten())
            kept = torch.ones_like(scores[1], dtype=torch.bool)
            kept[scores[1].argsort(stable=True)[:gone_neurons]] = False
            remove(down, kept)
            removed += gone_groups * cost.group + gone_neurons * cost.neuron
            walk.advance(index)
        return Reduced(model, removed, removed / sum(sizes))

    return at


def _counts(goal: float, cost: Costs, units: tuple[int, int], sparsity: float) -> tuple[int, int]:
    """Return how many groups and how many neurons of a block go: no more groups than their share, if that will do.

    Args:
        goal: parameters of the block to remove, at least.
        cost: of one of each.
        units: how many groups and neurons the block has; one of each stays.
        sparsity: the share of groups that goes, rounded down.

    Raises:
        InputError: the block has not as many.
    """
    all_groups, all_neurons = units
    for groups in range(min(int(sparsity * all_groups + 1e-9), all_groups - 1), all_groups):
        neurons = max(0, math.ceil((goal - groups * cost.group) / cost.neuron - 1e-9))
        if neurons < all_neurons:
            return groups, neurons
    raise unreachable("wanda-sp", sparsity * _most(cost, units) / goal, sparsity)


def most(dense: PreTrainedModel) -> int:
    """Return the parameters that go if the same share goes of every block, and one unit of each kind stays."""
    decoder, sizes = Decoder(dense), layer_parameters(dense)
    units = n_groups(decoder.dims), decoder.dims.d_int
    blocks = zip(decoder.layers, sizes, strict=True)
    return int(min(_most(costs(decoder, block), units) / size for block, size in blocks) * sum(sizes))


def _most(cost: Costs, units: tuple[int, int]) -> int:
    return (units[0] - 1) * cost.group + (units[1] - 1) * cost.neuron
