"""Scores every module of every layer by what compressing it does: the damage that the run's own solvers leave.

Lin et al. give layers parameters by how much they change the residual stream. This asks the solvers instead: each
module is compressed alone, to its trial rank, and the block is run once more on tokens that the solver has not seen.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .config import MODULES, CompressionConfig
from .distributed import Team
from .moments import BlockMoments, record_moments
from .preparation import Source, layer_sizes
from .ranks import trial_rank
from .surgery import compress_block, needed_moments


class DamageScorer:
    """For every layer and module: `E_t ‖y_t − ŷ_t‖² / ‖y_t‖²`, `y` the dense block's output.

    The norm of each token's residual stream is what the next norm divides by, so errors of different layers compare,
    and a few tokens of huge norm do not hide the others. Moments are those of the dense model's hidden states, from
    every batch of the calibration text but the first, on which the damage is measured.

    Cost: one pass over the blocks with moments, and for each module its solver and one batch more.

    Args:
        source: the model.
        config: the solvers and their settings.
        team: the processes of the run.
        device: where blocks run.
    """

    def __init__(self, source: Source, config: CompressionConfig, team: Team, device: torch.device) -> None:
        """Start with no layers."""
        self._source, self._config, self._team, self._device = source, config, team, device
        self._damages: list[list[float]] = []

    @contextmanager
    def watch(self, block: nn.Module, index: int) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """See `scoring.Scorer.watch`."""
        source = self._source
        sizes = layer_sizes(block, source.architecture, source.dims)
        modules = [module for module in MODULES if module in self._config.modules and module not in sizes.whole]
        names = needed_moments(modules, block, source.architecture, source.dims, self._config)
        moments = BlockMoments.zeros(source.dims, names, self._device)
        held: dict[str, Any] = {}

        def note(_module: Any, _inputs: Any, named: dict[str, Any]) -> None:
            held.setdefault("arguments", named)

        with ExitStack() as stack:
            stack.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)

            def add(before: Tensor, after: Tensor) -> None:
                if "before" not in held:
                    held.update(before=before.clone(), after=after)  # the output is about to be written over it
                    stack.enter_context(record_moments(block, source.architecture, source.dims, moments))

            yield add
            if not moments.n_tokens:  # there is one batch: it must serve for both
                with torch.no_grad():
                    block(held["before"], **held["arguments"])
        self._team.sum_moments(moments)
        moments.check_finite(index)
        damages = [0.0] * len(MODULES)
        for module in modules:
            rank = trial_rank(sizes.full[module], sizes.step[module])
            if rank < sizes.full[module]:
                damages[MODULES.index(module)] = self._damage(block, index, moments, {module: rank}, held)
        self._damages.append(damages)

    @torch.no_grad()
    def _damage(
        self, block: nn.Module, index: int, moments: BlockMoments, ranks: dict[str, int], held: dict[str, Any]
    ) -> float:
        source, narrow = self._source, copy.deepcopy(block)
        ranks = {**source.dims.full_ranks, **ranks}
        compress_block(narrow, source.architecture, source.dims, moments, ranks, self._config, source.config, index)
        output = narrow(held["before"], **held["arguments"])
        output = output[0] if isinstance(output, tuple) else output
        lost = (output - held["after"]).float().square().sum(-1, dtype=torch.float64)
        total = held["after"].float().square().sum(-1, dtype=torch.float64)
        share = lost / total.clamp_min(torch.finfo(torch.float32).tiny)
        sums = self._team.sum_(torch.stack((share.sum(), torch.ones_like(share).sum())))
        return (sums[0] / sums[1]).item()

    def scores(self) -> Tensor:
        """Return `(n_layers, 3)` float64, in the order of `MODULES`; 0 where a module stays whole."""
        return torch.tensor(self._damages, dtype=torch.float64)
