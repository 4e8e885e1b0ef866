"""Scores every module of every layer by what compressing it alone does to the model's predictions.

Lin et al. give layers parameters by how much they change the residual stream. This asks the solvers instead, and the
rest of the model: each module is compressed alone, to its trial rank, and what the dense layers behind it make of that
is compared with what they make of the dense block, on text that the solver has not seen.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..blocks import Calibration, advance
from ..config import MODULES, CompressionConfig
from ..moments import record_moments
from ..ranks.whole import LayerSizes, trial_rank
from .distributed import Team
from .own_text import ROWS
from .source import Source
from .surgery import blank_moments, compress_block

HELD_TOKENS = 1024
"""Tokens of text, and of what the model writes, on which damage is measured; at most a quarter of the text's windows.
The trials carry them through the model, `3L²/2` blocks in all."""
HELD_LENGTH = 512
"""Of them at most from one window."""
SEEN_COST, LOGIT_COST = 2, 200
"""What the progress bar reckons with, measured on SmolLM2-135M and a CPU: a token on which moments are taken costs 2.2
passes of a held token, solvers included; the divergence of a logit takes the time of 200 multiplications."""
COMPARED = {"cpu": 2**18, "cuda": 2**24}
"""Logits that are compared at once: what stays in a processor's cache takes a third of the time."""
STEEPEST = -60.0
"""Where a log-probability rises by more, `p exp(−d)` leaves float32: `p` below 10⁻³⁸ counts when it becomes large."""
EVERY = 3
"""Of the held tokens, every third is compared: a row of the vocabulary's size for each trial. Its period is prime to
that of the written continuations, so that all their tokens get their turn."""


def hold_out(windows: Tensor, n_processes: int) -> tuple[Tensor, Tensor]:
    """Divide calibration windows into those that solvers see and those on which the damage is measured.

    Of a long window its first `HELD_LENGTH` tokens are enough: two texts tell more than one twice as long.

    Args:
        windows: `(samples, seq_len)` token ids.
        n_processes: each of which must get a window to see: where there are too few, the held ones are seen, too.

    Returns:
        The seen and the held windows; the held ones are evenly spaced.
    """
    length = min(windows.shape[1], HELD_LENGTH)
    wanted = -(-HELD_TOKENS // length)
    count = max(1, min(wanted, len(windows) // 4))
    seen = torch.ones(len(windows), dtype=torch.bool)
    held = torch.arange(count) * len(windows) // count
    seen[held] = False
    return windows[seen] if int(seen.sum()) >= n_processes else windows, windows[held, :length]


def trial_ranks(size: LayerSizes, config: CompressionConfig) -> dict[str, int]:
    """Return the trial rank of each module of a block that is to be compressed and that a trial makes smaller."""
    asked = [module for module in MODULES if module in config.modules and module in size.full]
    ranks = {module: trial_rank(size.full[module], size.step[module]) for module in asked if module not in size.whole}
    return {module: rank for module, rank in ranks.items() if rank < size.full[module]}


def measure_damages(
    source: Source,
    sizes: Sequence[LayerSizes],
    config: CompressionConfig,
    team: Team,
    device: torch.device,
    seen: Calibration,
    held: Calibration,
    done: Callable[[int, int], None],
) -> Tensor:
    """Return, for every layer and module, `D = E_t KL(p_t ‖ p̂_t)` in nats of the next-token distribution.

    `p` is the dense model's and `p̂` that of the dense model with the one module compressed to its trial rank, from
    moments of the dense hidden states. All trials are carried along in one pass over the blocks, as a streamed model
    allows no other; each process carries its share of them. Cost: that pass with moments, `3L` solvers, `3L²/2` blocks
    on the held tokens and the head on a third of those, `3L` times. Memory: the hidden states of `3L` trials.

    Args:
        source: the model.
        sizes: of its layers.
        config: the solvers and their settings.
        team: the processes of the run.
        device: where blocks run.
        seen: this process's share of what moments are taken on; advanced to behind the last block.
        held: all of what damage is measured on, the same on every process; likewise.
        done: called with the steps done and those to do, as `work` counts them.

    Returns:
        `(n_layers, 3)` float64, in the order of `MODULES`; 0 where a module stays whole.

    Raises:
        NumericalError: a moment is NaN, infinite or indefinite; names the layer.
    """
    damages = torch.zeros(source.dims.n_layers, len(MODULES), dtype=torch.float64)
    trials: dict[tuple[int, int], Calibration] = {}
    ranks = [trial_ranks(size, config) for size in sizes]
    own = _own_trials(ranks, team)
    head = source.config.vocab_size * (source.dims.d_model + LOGIT_COST) / (EVERY * sizes[-1].total)
    steps = work([len(trials) for trials in own], seen.hidden.n_tokens / held.hidden.n_tokens, head)
    n_done, n_steps = 0, sum(steps)
    done(0, n_steps)
    for index in range(source.dims.n_layers):
        block = source.blocks.peek(index, device)
        for trial in trials.values():
            advance(block, index, trial, device)
        narrowed = _narrow_blocks(block, index, source, ranks[index], own[index], config, team, device, seen)
        for column, narrow in narrowed:
            trials[index, column] = held.copy()
            advance(narrow, index, trials[index, column], device)
            del narrow
        advance(block, index, held, device)
        del block
        n_done += steps[index]
        done(n_done, n_steps)
    for count, (place, divergence) in enumerate(_divergences(source, held, trials), 1):
        damages[place] = divergence
        done(n_done + steps[-1] * count // len(trials), n_steps)
    return team.sum_(damages.to(device)).cpu()


def work(trials: Sequence[int], ratio: float, head: float) -> list[int]:
    """Return the steps of every block and, last, of the head: later blocks carry more trials, and take longer.

    Args:
        trials: how many begin at each block.
        ratio: tokens on which moments are taken, of each on which damage is measured.
        head: what the head costs for a trial, in steps. A step is a pass of the held tokens through a block.
    """
    own = round(SEEN_COST * ratio) + 1
    return [own + carried for carried in itertools.accumulate(trials)] + [round(head * (1 + sum(trials)))]


def _own_trials(modules: Sequence[Iterable[str]], team: Team) -> list[list[str]]:
    """Return, of the modules of every block, those whose trials this process carries: every `team.size`-th of all."""
    places = itertools.count()
    return [[module for module in each if next(places) % team.size == team.rank] for each in modules]


def _narrow_blocks(
    block: nn.Module,
    index: int,
    source: Source,
    ranks: dict[str, int],
    own: Sequence[str],
    config: CompressionConfig,
    team: Team,
    device: torch.device,
    seen: Calibration,
) -> Iterator[tuple[int, nn.Module]]:
    """Take a block's moments, and yield copies with one of the `own` modules compressed, and its place in `MODULES`."""
    architecture, dims = source.architecture, source.block_dims(index)
    moments = blank_moments([*ranks], block, architecture, dims, config, device)
    with record_moments(block, architecture, dims, moments, seen.weights):
        advance(block, index, seen, device)
    team.sum_moments(moments, index)
    for module in own:
        narrow = copy.deepcopy(block)
        chosen = {**dims.full_ranks, module: ranks[module]}
        compress_block(narrow, architecture, dims, moments, chosen, config, source.config, index)
        yield MODULES.index(module), narrow
        del narrow


@torch.no_grad()
def _divergences(
    source: Source, held: Calibration, trials: dict[tuple[int, int], Calibration]
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the mean divergence of each trial from the dense model, both as they are behind the last block."""
    streams = (held, *trials.values())
    logits = source.blocks.logits(rows for stream in streams for rows in _compared(stream))
    dense = [next(logits).log_softmax(-1) for _ in _compared(held)]
    n_rows = sum(map(len, dense))
    for place in trials:
        total = sum(divergence(expected, next(logits)) for expected in dense)
        yield place, total / n_rows


def divergence(expected: Tensor, logits: Tensor) -> float:
    """Return `Σ KL(p ‖ p̂)` in nats over rows, with `p̂ = softmax(logits)`.

    With `d = log p − log p̂` it is `Σ p (d + exp(−d) − 1)`, as `Σ p exp(−d) = Σ p̂ = 1`: no terms of first order that
    must cancel, and rounding of `d` counts by its square, or times `d`. So float32 gives four digits, of 10⁻⁶ nats too.

    Args:
        expected: `(rows, vocabulary)` `log p`, float32.
        logits: `(rows, vocabulary)` float32.
    """
    size = max(1, COMPARED[expected.device.type] // expected.shape[-1])
    total = expected.new_zeros((), dtype=torch.float64)
    for told, found in zip(expected.split(size), logits.split(size), strict=True):
        lost = told - found.log_softmax(-1)
        if lost.amin() < STEEPEST:
            told, lost = told.double(), lost.double()
            # `p exp(−d)` as one power: beyond 709, exp(−d) leaves float64 as well.
            total += (told.exp() * (lost - 1) + (told - lost).exp()).sum()
            continue
        lost += torch.expm1(-lost)
        total += lost.mul_(told.exp()).sum(-1).double().sum()
    return total.item()


def _compared(stream: Calibration) -> Iterator[Tensor]:
    """Yield the hidden states of the tokens that are compared, `(rows, d_model)`."""
    for states in stream.hidden:
        yield from states[:, ::EVERY].flatten(0, 1).split(ROWS)
