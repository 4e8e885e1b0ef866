"""Scores every module of every layer by what compressing it alone does to the model's predictions.

Lin et al. give layers parameters by how much they change the residual stream. This asks the solvers instead, and the
rest of the model: each module is compressed alone, to its trial rank, and what the dense layers behind it make of that
is compared with what they make of the dense block, on text that the solver has not seen.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .blocks import Calibration, advance
from .config import MODULES, CompressionConfig
from .distributed import Team
from .moments import BlockMoments, record_moments
from .own_text import ROWS
from .preparation import Source, layer_sizes
from .ranks import trial_rank
from .surgery import compress_block, needed_moments

HELD_TOKENS = 1024
"""Tokens of text, and of what the model writes, on which damage is measured; at most a quarter of the text's windows.
The trials carry them through the model, `3L²/2` blocks in all."""
HELD_LENGTH = 4
"""Tokens of a continuation of the held text that the model writes: text that is far from any that solvers see."""
EVERY = 3
"""Of the held tokens, every third is compared: a row of the vocabulary's size for each trial. Its period is prime to
that of the written continuations, so that all their tokens get their turn."""


def hold_out(windows: Tensor, n_processes: int) -> tuple[Tensor, Tensor]:
    """Divide calibration windows into those that solvers see and those on which the damage is measured.

    Of a long window its first `HELD_TOKENS` are enough.

    Args:
        windows: `(samples, seq_len)` token ids.
        n_processes: each of which must get a window to see: where there are too few, the held ones are seen, too.

    Returns:
        The seen and the held windows; the held ones are evenly spaced.
    """
    wanted = -(-HELD_TOKENS // windows.shape[1])
    count = max(1, min(wanted, len(windows) // 4))
    seen = torch.ones(len(windows), dtype=torch.bool)
    held = torch.arange(count) * len(windows) // count
    seen[held] = False
    return windows[seen] if int(seen.sum()) >= n_processes else windows, windows[held, :HELD_TOKENS]


def measure_damages(
    source: Source,
    config: CompressionConfig,
    team: Team,
    device: torch.device,
    seen: Calibration,
    held: Calibration,
    done: Callable[[int], None],
) -> Tensor:
    """Return, for every layer and module, `D = E_t KL(p_t ‖ p̂_t)` in nats of the next-token distribution.

    `p` is the dense model's and `p̂` that of the dense model with the one module compressed to its trial rank, from
    moments of the dense hidden states. All trials are carried along in one pass over the blocks, as a streamed model
    allows no other; each process carries its share of them. Cost: that pass with moments, `3L` solvers, `3L²/2` blocks
    on the held tokens and the head on a third of those, `3L` times. Memory: the hidden states of `3L` trials.

    Args:
        source: the model.
        config: the solvers and their settings.
        team: the processes of the run.
        device: where blocks run.
        seen: this process's share of what moments are taken on; advanced to behind the last block.
        held: all of what damage is measured on, the same on every process; likewise.
        done: called with the number of blocks that have been run.

    Returns:
        `(n_layers, 3)` float64, in the order of `MODULES`; 0 where a module stays whole.

    Raises:
        NumericalError: a moment is NaN, infinite or indefinite; names the layer.
    """
    damages = torch.zeros(source.dims.n_layers, len(MODULES), dtype=torch.float64)
    trials: dict[tuple[int, int], Calibration] = {}
    for index in range(source.dims.n_layers):
        block = source.blocks.peek(index, device)
        for trial in trials.values():
            advance(block, index, trial, device)
        for column, narrow in _narrow_blocks(block, index, source, config, team, device, seen):
            trials[index, column] = held.copy()
            advance(narrow, index, trials[index, column], device)
            del narrow
        advance(block, index, held, device)
        del block
        done(index + 1)
    for place, divergence in _divergences(source, held, trials):
        damages[place] = divergence
    return team.sum_(damages.to(device)).cpu()


def _narrow_blocks(
    block: nn.Module,
    index: int,
    source: Source,
    config: CompressionConfig,
    team: Team,
    device: torch.device,
    seen: Calibration,
) -> Iterator[tuple[int, nn.Module]]:
    """Take a block's moments, and yield copies with one module compressed, each with its place in `MODULES`.

    Of those, a process is given every `team.size`-th.
    """
    architecture, dims = source.architecture, source.dims
    sizes = layer_sizes(block, architecture, dims)
    ranks = {module: trial_rank(sizes.full[module], sizes.step[module]) for module in MODULES if module in sizes.full}
    modules = [
        module
        for module, rank in ranks.items()
        if module in config.modules and module not in sizes.whole and rank < sizes.full[module]
    ]
    moments = BlockMoments.zeros(dims, needed_moments(modules, block, architecture, dims, config), device)
    with record_moments(block, architecture, dims, moments, seen.weights):
        advance(block, index, seen, device)
    team.sum_moments(moments)
    moments.check_finite(index)
    for module in modules:
        column = MODULES.index(module)
        if (index * len(MODULES) + column) % team.size != team.rank:
            continue
        narrow = copy.deepcopy(block)
        chosen = {**dims.full_ranks, module: ranks[module]}
        compress_block(narrow, architecture, dims, moments, chosen, config, source.config, index)
        yield column, narrow
        del narrow


@torch.no_grad()
def _divergences(
    source: Source, held: Calibration, trials: dict[tuple[int, int], Calibration]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the mean divergence of each trial from the dense model, both as they are behind the last block."""
    streams = (held, *trials.values())
    logits = source.blocks.logits(rows for stream in streams for rows in _compared(stream))
    dense = [log_probabilities(next(logits)) for _ in _compared(held)]
    n_rows = sum(map(len, dense))
    for place in trials:
        total = sum(divergence(expected, log_probabilities(next(logits))) for expected in dense)
        yield place, total / n_rows


def divergence(expected: Tensor, found: Tensor) -> float:
    """Return `Σ KL(expected ‖ found)` in nats over rows of log-probabilities, `(..., vocabulary)`."""
    lost = expected - found
    # Σ p d = Σ p (d + exp(−d) − 1), as Σ p exp(−d) = Σ p̂ = 1: no terms of first order that must cancel.
    lost += torch.expm1(-lost)
    return (lost * expected.exp()).sum().item()


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-softmax in float64, in which no probability that matters vanishes."""
    return logits.log_softmax(-1, dtype=torch.float64)


def _compared(stream: Calibration) -> Iterator[Tensor]:
    """Yield the hidden states of the tokens that are compared, `(rows, d_model)`."""
    for states in stream.hidden:
        yield from states[:, ::EVERY].flatten(0, 1).split(ROWS)
