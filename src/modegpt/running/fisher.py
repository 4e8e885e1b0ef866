"""What the neurons of the last blocks do to the next-token distribution: its Fisher information, at some tokens.

A change `δ` of a token's last hidden state changes its prediction `p` by `KL = ½ δᵀFδ + O(δ³)` nats, with
`F = Jᵀ(diag p − p pᵀ)J` and `J` the derivative of the logits. The last blocks' outputs reach that state nearly as they
are, so a neuron that goes costs `½ Σ_t z_ti² w_iᵀF_t w_i` there. Which tokens feel a neuron, its energy cannot tell
(docs/log.md).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..architectures import Architecture
from ..architectures.access import affine
from ..blocks import BlockSource, Calibration, advance
from ..hidden_states import HiddenStates
from ..observing.normed_outputs import through_norm

DEPTH = 4
"""Blocks at the end of the model whose neurons are chosen by this, too. On SmolLM2 it takes 8 to 38 % off what the last
two MLPs cost alone, a few per cent in the fourth-last, and nothing further ahead (docs/log.md)."""
EVERY = 7
"""Of a window's tokens, every seventh is probed: prime to the length of written continuations, so that all have a turn.
Every thirteenth does nearly as well; a quarter of the windows does not (docs/log.md)."""
HEAD_SHARE = 0.08
"""Of the multiplications of one pass over the blocks, what the head may cost: a small model with a large vocabulary has
more of them in its head than in all its blocks, and fewer of its tokens are probed (docs/log.md)."""
_SPREAD = 0x9E3779B1
"""An odd number near `2^32` over the golden ratio, by which Knuth hashes: seeds side by side end up far apart."""
ROWS = 128
"""Distributions over the vocabulary that are in memory at once."""


def stride(head: int, blocks: int, seq_len: int) -> int:
    """Return every how manieth token is probed: `EVERY`, or the next odd number at which the head costs its share.

    Whatever they cost, at least eight tokens of a window are probed, or the fewer that `EVERY` gives.

    Args:
        head: weights of the head, `vocab·d_model`; each token meets them forward and backward.
        blocks: weights of all blocks together.
        seq_len: tokens of a window.
    """
    wanted = min(math.ceil(2 * head / (HEAD_SHARE * blocks)) | 1, (seq_len // 8 - 1) | 1)
    return max(EVERY, wanted)


class FisherProbe:
    """Takes the Fisher information at some tokens of a run, and gives it to the last blocks.

    Args:
        blocks: of the dense model.
        peek: gives each of them that is still to come.
        n_layers: of the model.
        numbers: `(samples,)` places in the text of this process's windows: what is drawn for one depends on its place.
        device: where blocks run.
        seed: of the draws; the global random state is neither read nor changed.
        every: so manieth token of a window is probed (`stride`).
    """

    def __init__(
        self,
        blocks: BlockSource,
        peek: Callable[[int], nn.Module],
        n_layers: int,
        numbers: Tensor,
        device: torch.device,
        seed: int,
        every: int = EVERY,
    ) -> None:
        """Take nothing yet."""
        self._blocks, self.peek, self._n_layers, self._device = blocks, peek, n_layers, device
        self._numbers, self._seed = numbers.tolist(), seed
        # Not from the first token, where they are few: it may be the same in every window.
        self.every, self._probed = every, slice(every - EVERY, None, every)
        self._roots: Tensor | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def ready(self) -> bool:
        """Whether the logits have been differentiated."""
        return self._roots is not None

    def reaches(self, index: int) -> bool:
        """Tell whether the neurons of block `index` are chosen by this, too."""
        return index >= self._n_layers - DEPTH

    def take(self, block: nn.Module, index: int, dense: Calibration) -> None:
        """Run the dense model on to its end and differentiate the logits of the probed tokens, unless that was done.

        Args:
            block: dense block `index`.
            index: the first of the blocks that are run.
            dense: the hidden states of this process's windows before it; they stay as they are.

        Cost: at most `DEPTH` blocks, and `differentiate`. Memory: a copy of the hidden states, and `differentiate`.
        """
        if self.ready:
            return
        probe = dense.copy()
        for layer in range(index, self._n_layers):
            advance(block if layer == index else self.peek(layer), layer, probe, self._device)
        self.differentiate(probe.hidden)

    def differentiate(self, hidden: HiddenStates) -> None:
        """Differentiate the logits of the probed tokens, and add what has waited for it.

        Cost: the head, forward and backward, on the probed tokens. Memory: `ROWS` distributions a few times, and
        `(probed, d_model)` that stay.

        Args:
            hidden: the dense model's hidden states of this process's windows behind the last block.
        """
        group: list[_Part] = []

        def rows() -> Iterator[Tensor]:
            windows = (window for states in hidden for window in states)
            parts = (
                _Part(draw_seed(self._seed, number, part), probed)
                for number, window in zip(self._numbers, windows, strict=True)
                for part, probed in enumerate(window[self._probed].split(ROWS))
            )
            for group[:] in _grouped(parts):
                yield torch.cat([part.states.to(self._device) for part in group])

        def noise(logits: Tensor) -> Tensor:
            split = logits.split([len(part.states) for part in group])
            return torch.cat([fisher_noise(own, part.seed) for own, part in zip(split, group, strict=True)])

        pulled = self._blocks.pull_back(rows(), noise)
        roots = torch.cat([root.cpu() for root in pulled])
        self._roots = roots.view(len(self._numbers), -1, roots.shape[1])
        while self._waiting:
            self._waiting.pop(0)()

    @contextmanager
    def record(self, block: nn.Module, architecture: Architecture, dense: Calibration, total: Tensor) -> Iterator[None]:
        """While the context is open, every forward of a dense `block` adds its probed tokens to `total`.

        Before the logits have been differentiated the tokens are kept, and added as soon as that is done. Memory then:
        `(probed, d_int)`, and the block's down projection.

        Args:
            block: one of the last.
            architecture: its family.
            dense: this process's windows, a batch a forward.
            total: `(3, d_int)` float64: `Σ w e z²`, `Σ w e z` and `Σ w e`, with `e_ti = (g_tᵀ w_i)²`.
        """
        down = architecture.projection(block, "down")
        weight = affine(down).weight
        norm = architecture.output_norm(block)
        weights = dense.weights or [None] * len(dense.hidden)
        ends = accumulate((len(states) for states in dense.hidden), initial=0)
        batches = iter(zip(pairwise(ends), weights, strict=True))

        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            (first, end), weights = next(batches)

            def probed(states: Tensor) -> Tensor:
                each = states.reshape(end - first, -1, states.shape[-1])[:, self._probed]
                return each.to(torch.float32, copy=True)  # of the others nothing is to be kept

            z, normed = probed(inputs[0]), None if norm is None else probed(output)
            add_now = partial(self._add, total, slice(first, end), weights, z, weight, norm, normed)
            if self.ready:
                add_now()
            else:
                self._waiting.append(add_now)

        handle = down.register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()

    def _add(
        self,
        total: Tensor,
        windows: slice,
        weights: Tensor | None,
        z: Tensor,
        weight: Tensor,
        norm: nn.Module | None,
        normed: Tensor | None,
    ) -> None:
        """Add the probed tokens of some windows: what the down projection reads, and what a norm behind it does."""
        assert self._roots is not None
        roots = self._roots[windows].to(z.device)
        if norm is not None and normed is not None:
            roots = through_norm(norm, normed, roots)
        felt = (roots @ weight.float()).square()
        if weights is not None:
            felt *= weights[:, self._probed, None].to(felt)
        total.add_(torch.stack([(felt * z.pow(power)).sum((0, 1)) for power in (2, 1, 0)]))


class _Part(NamedTuple):
    """Probed tokens of one window, which are drawn for together."""

    seed: int
    states: Tensor
    """`(rows, d_model)`, at most `ROWS`."""


def _grouped(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Put parts together as long as they have at most `ROWS` rows: the head reads all its weights for each group."""
    group: list[_Part] = []
    for part in parts:
        if sum(len(each.states) for each in group) + len(part.states) > ROWS:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def draw_seed(seed: int, number: int, part: int) -> int:
    """Return the seed of one draw: of a run's seed, a window's number below 2^20, and the part of that window.

    It has 32 bits, as a CPU's generator leaves out what is above them.
    """
    return (seed * _SPREAD + (number << 12) + part) % 2**32


def fisher_noise(logits: Tensor, seed: int) -> Tensor:
    """Return random `u = √p ∘ ε − p (√pᵀε)` for each row, of mean 0 and covariance `diag p − p pᵀ`, `p = softmax`.

    So `Jᵀu` has the covariance `F = Jᵀ(diag p − p pᵀ)J` of a gradient of `log p_v` with `v` drawn from `p`, and lighter
    tails. Cost: one Gaussian number a logit.

    Args:
        logits: `(rows, vocab)` float32.
        seed: of the draw.
    """
    probabilities = logits.softmax(-1)
    generator = torch.Generator(logits.device).manual_seed(seed)
    noise = torch.randn(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)
    noise *= probabilities.sqrt()
    return noise.sub_(probabilities * noise.sum(-1, keepdim=True))
