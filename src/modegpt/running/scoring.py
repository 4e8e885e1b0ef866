"""One pass over the dense blocks that gives the scores an allocation rule asks for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..architectures import Architecture
from ..architectures.access import affine
from ..architectures.fused import weights_of
from ..importance import InfluenceMeter, outlier_ratio
from ..observing.experts import Routed, watched
from ..observing.inputs import inputs_of
from .distributed import Team


class Scorer(Protocol):
    """Looks at each block while the calibration text passes through it."""

    @contextmanager
    def watch(self, block: nn.Module, index: int) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """Open the context around a block's pass; it gives what to call with input and output of each batch."""
        ...

    def scores(self) -> Tensor:
        """Return the scores, summed over all processes."""
        ...


class InfluenceScorer:
    """Block Influence of every layer, or of its attention and MLP apart.

    Apart, attention is scored from the block's input `x` to the residual stream after it (its own norm included where
    the family has one), and the MLP from there to the block's output. In a parallel block there is no such stream:
    each is scored by what it alone adds, `x` to `x + attention` and `x` to `x + MLP`. Where a block has no MLP, its
    output is what follows the attention.

    Args:
        n_layers: of the model.
        architecture: tells where the residual stream between attention and MLP is read.
        apart: whether attention and MLP are scored apart.
        team: the processes of the run.
    """

    def __init__(self, n_layers: int, architecture: Architecture, apart: bool, team: Team) -> None:
        """Start with no tokens."""
        self._meter = InfluenceMeter(n_layers, 2 if apart else 1)
        self._architecture, self._apart, self._team = architecture, apart, team

    @contextmanager
    def watch(self, block: nn.Module, index: int) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """See `Scorer.watch`."""
        with ExitStack() as stack:
            seen = self._read(block, stack)

            def add(before: Tensor, after: Tensor) -> None:
                states = [state.reshape(before.shape) for state in seen]
                seen.clear()
                if self._apart and self._architecture.parallel:
                    (attention,) = states
                    self._meter.update_parts(index, (before, before + attention), (before, after - attention))
                else:
                    middle = states if states or not self._apart else [after]
                    self._meter.update(index, before, *middle, after)

            yield add

    def _read(self, block: nn.Module, stack: ExitStack) -> list[Tensor]:
        """Return where each pass notes what attention adds in a parallel block, else the residual stream after it.

        Nothing is noted where attention and MLP are not scored apart, or there is no MLP.
        """
        if self._apart and self._architecture.parallel:
            seen: list[Tensor] = []
            attention = block.get_submodule(self._architecture.attention)
            hook = attention.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
            stack.callback(hook.remove)
            return seen
        if self._apart and self._architecture.any_mlp(block):
            return stack.enter_context(inputs_of(self._architecture.middle_module(block)))
        return []

    def scores(self) -> Tensor:
        """See `Scorer.scores`."""
        self._team.sum_(self._meter.totals)
        return self._meter.scores()


class OutlierScorer:
    """OWL's share of outlying weights of every layer (Yin et al. 2023).

    Args:
        architecture: tells where the linear layers are.
        threshold: OWL's M.
        team: the processes of the run.
    """

    def __init__(self, architecture: Architecture, threshold: float, team: Team) -> None:
        """Start with no layers."""
        self._architecture, self._threshold, self._team = architecture, threshold, team
        self._ratios: list[float] = []

    @contextmanager
    def watch(self, block: nn.Module, index: int) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """See `Scorer.watch`."""
        linears, mixture = self._architecture.linears(block), self._architecture.mixture(block)
        weights = [affine(linear).weight for linear in linears]
        n_linears = len(weights)
        if mixture is not None:
            weights += [matrix for pair in zip(*weights_of(mixture), strict=True) for matrix in pair]
        squares = [weight.new_zeros(weight.shape[1], dtype=torch.float64) for weight in weights]

        def add_rows(place: int, rows: Tensor) -> None:
            squares[place] += rows.flatten(0, -2).float().square().sum(0, dtype=torch.float64)

        def add_sent(states: Tensor, _chosen: Tensor, _shares: Tensor, sent: list[Routed]) -> None:
            for each in sent:
                first = n_linears + 2 * each.number
                add_rows(first, states.index_select(0, each.places))
                add_rows(first + 1, each.activations)

        def adding(place: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _module, inputs: add_rows(place, inputs[0])

        with ExitStack() as stack:
            for place, linear in enumerate(linears):
                stack.callback(linear.register_forward_pre_hook(adding(place)).remove)
            if mixture is not None:
                stack.enter_context(watched(mixture, add_sent))
            yield lambda _before, _after: None
        norms = [self._team.sum_(square).sqrt() for square in squares]
        self._ratios.append(outlier_ratio(weights, norms, self._threshold, index))

    def scores(self) -> Tensor:
        """See `Scorer.scores`."""
        return torch.tensor(self._ratios, dtype=torch.float64)
