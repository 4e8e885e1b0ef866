"""Coverage windows: text that the dense model writes itself, in short continuations of random tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..blocks import BlockSource, Calibration, advance
from ..decompose.psd import all_finite
from ..errors import NumericalError
from ..hidden_states import HiddenStates
from ..loading.models import compute_dtype
from ..report import free_gpu_memory_bytes
from .distributed import Team
from .sizes import cached_numbers
from .source import Source

LENGTHS = (16, 4)
"""Tokens of a continuation, the random one included. Windows take these lengths in turn: longer ones are text as the
model knows it, and keep more of what other text than the calibration text needs; shorter ones hold more random words,
and cost that text less (docs/log.md)."""
CACHE_BYTES = 2**31
"""Of host memory, for keys and values of what is written."""
CACHE_PART = 4
"""Of a GPU's free memory a fourth is for them."""
ROWS = 256
"""Distributions over the vocabulary that are in memory at once: some 100 MB each time they are copied."""
BLOCK_BYTES = 2**31
"""Of host memory, for blocks that stay there from step to step: to read one from files, convert and check it takes as
long as to run it on such short texts."""
FREE_PART = 2
"""Blocks stay on a GPU as long as one half of what was free of it still is."""
CUMULATED = 2**20
"""Float64 numbers in memory at once while tokens are drawn: what stays in the cache is summed thrice as fast."""


class Draft:
    """Continuations of one length while they are written.

    Args:
        uniforms: `(rows, length)` float64 numbers in [0, 1), which tokens are drawn by.
        start: the token with which every continuation begins, or None.
        vocab_size: the first token behind it is drawn from all of it, alike.
    """

    def __init__(self, uniforms: Tensor, start: int | None, vocab_size: int) -> None:
        """Draw the first token."""
        first = (uniforms[:, :1] * vocab_size).long()
        self.tokens = first if start is None else torch.cat((torch.full_like(first, start), first), dim=1)
        self.new = self.tokens
        """Those that no cache holds."""
        self.cache: Cache | None = None
        self.uniforms = uniforms

    @property
    def length(self) -> int:
        """Tokens of a continuation, `start` not counted."""
        return self.uniforms.shape[1]

    def add(self, step: int, drawn: Tensor) -> None:
        """Take the tokens of a step, `(rows,)`."""
        self.new = drawn[:, None]
        self.tokens = torch.cat((self.tokens, self.new), dim=1)
        if step == self.length - 1:
            self.cache = None


class Writer:
    """Lets the dense model write.

    A step runs the whole model over the token that was written last in all continuations; in those of a length for
    whose keys and values there is no room, over all that is written so far. A GPU keeps the blocks that half of its
    free memory has room for, as long as this object lives.

    Args:
        blocks: of the model.
        n_layers: of the model.
        embed: gives the hidden states before block 0 of this process's `(rows, tokens)` ids, which come behind those in
            a cache if there is one.
        caches: gives an empty cache for the continuations of each length, by their number and the tokens of each, or
            None where there is no room.
        team: the processes of the run; each writes its share.
        device: where blocks run.
        spare: whether the host has memory to spare.
        done: called with the blocks that have been run and those there are to run.
    """

    def __init__(
        self,
        blocks: BlockSource,
        n_layers: int,
        embed: Callable[[Tensor, Cache | None], Calibration],
        caches: Callable[[Sequence[tuple[int, int]]], list[Cache | None]],
        team: Team,
        device: torch.device,
        spare: bool,
        done: Callable[[int, int], None],
    ) -> None:
        """Write nothing yet."""
        self._blocks, self._n_layers, self._embed, self._caches = blocks, n_layers, embed, caches
        self._team, self._device, self._done = team, device, done
        self._kept: dict[int, nn.Module] = {}
        self._least = free_gpu_memory_bytes(device) // FREE_PART
        self._room = block_room(device, spare)
        self._n_run = self._n_to_run = 0

    def windows(self, count: int, seq_len: int, start: int | None, vocab_size: int, seed: int) -> Tensor:
        """Return `(count, seq_len)` token ids: continuations one after another, whatever the number of processes.

        Args:
            count: of windows.
            seq_len: tokens of each.
            start: the token with which every window and every continuation begins, or None.
            vocab_size: the first token of a continuation is drawn from all of it, alike.
            seed: of the draws; the global random state is neither read nor changed.

        Raises:
            NumericalError: the model's logits are NaN or infinite.
        """
        generator = torch.Generator().manual_seed(seed)
        own = seq_len - (start is not None)
        text = torch.full((count, seq_len), start or 0)
        begun = []
        for place, length in enumerate(LENGTHS[:count]):
            windows = text[place :: len(LENGTHS), seq_len - own :]
            uniforms = torch.rand(-(-windows.numel() // length), length, generator=generator, dtype=torch.float64)
            # What is drawn does not depend on the processes, of which each has something to write.
            idle = max(0, self._team.size - len(uniforms))
            uniforms = torch.cat((uniforms, uniforms[-1:].expand(idle, -1)))
            rows = len(uniforms)
            begun.append((windows, rows, Draft(self._team.share(uniforms), start, vocab_size)))
        self._write([draft for _windows, _rows, draft in begun])
        for windows, rows, draft in begun:
            written = torch.zeros(rows, draft.length, dtype=torch.long, device=self._device)
            written[self._team.rank :: self._team.size] = draft.tokens[:, -draft.length :].to(written.device)
            windows.copy_(self._team.sum_(written).cpu().flatten()[: windows.numel()].view_as(windows))
        return text

    def _write(self, drafts: Sequence[Draft]) -> None:
        """Write drafts to their ends, all at once: each step reads a block once."""
        n_steps = max(draft.length for draft in drafts) - 1
        self._n_run, self._n_to_run = 0, n_steps * self._n_layers
        self._done(0, self._n_to_run)
        shapes = [(len(draft.tokens), draft.tokens.shape[1] + draft.length - 2) for draft in drafts]
        for draft, cache in zip(drafts, self._caches(shapes), strict=True):
            draft.cache = cache
        with self._blocks.around():
            for step in range(1, n_steps + 1):
                going_on = [draft for draft in drafts if step < draft.length]
                for draft, hidden in zip(going_on, self._run(going_on), strict=True):
                    draft.add(step, self._draw(hidden, draft.uniforms[:, step]))

    def _draw(self, hidden: HiddenStates, uniforms: Tensor) -> Tensor:
        """Return the next token of each row, by its number in [0, 1), from the hidden states behind the last block."""
        drawn, row = [], 0
        for logits in self._blocks.logits(rows for states in hidden for rows in states[:, -1].split(ROWS)):
            drawn.append(sample(logits, uniforms[row : row + len(logits)]))
            row += len(logits)
        return torch.cat(drawn)

    def _run(self, drafts: Sequence[Draft]) -> list[HiddenStates]:
        """Return the hidden states of each draft behind the last block."""
        calibrations = [
            self._embed(draft.tokens if draft.cache is None else draft.new, draft.cache) for draft in drafts
        ]
        for index in range(self._n_layers):
            block = self._block(index)
            for calibration in calibrations:
                advance(block, index, calibration, self._device)
            self._n_run += 1
            self._done(self._n_run, self._n_to_run)
        return [calibration.hidden for calibration in calibrations]

    def _block(self, index: int) -> nn.Module:
        """Return a block, and keep it for the steps to come where there is room for it."""
        if index in self._kept:
            return self._kept[index]
        block = self._blocks.peek(index, self._device)
        if self._fits(block, index):
            self._kept[index] = block
        return block

    def _fits(self, block: nn.Module, index: int) -> bool:
        if self._device.type == "cuda":
            return free_gpu_memory_bytes(self._device) > self._least
        if block is self._blocks.layers[index]:  # a model in memory holds it anyway
            return True
        self._room -= sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers()))
        return self._room >= 0


def block_room(device: torch.device, spare: bool) -> int:
    """Return the bytes of host memory in which blocks stay; a GPU keeps them in memory of its own."""
    return BLOCK_BYTES if spare and device.type != "cuda" else 0


def empty_caches(source: Source, n_tokens: Sequence[int], device: torch.device, spare: bool) -> list[Cache | None]:
    """Return caches for keys and values of the dense model, None for those that have no room; see `cache_bytes`."""
    sizes = cache_bytes(source, n_tokens, device, spare)
    return [DynamicCache(config=source.blocks.model.config) if size else None for size in sizes]


def cache_bytes(source: Source, n_tokens: Sequence[int], device: torch.device, spare: bool) -> list[int]:
    """Return what keys and values of the dense model take, 0 for those that have no room beside the ones before.

    Args:
        source: the dense model.
        n_tokens: by cache, of all its texts together.
        device: where blocks run.
        spare: whether the host has memory to spare.
    """
    dims = source.dims
    full = [dims.full_ranks] * dims.n_layers
    numbers = cached_numbers(source.blocks.layers, source.architecture, dims, full)["dense"]
    itemsize = compute_dtype(device, source.dtype).itemsize
    room = free_gpu_memory_bytes(device) // CACHE_PART if device.type == "cuda" else CACHE_BYTES * spare
    sizes: list[int] = []
    for count in n_tokens:
        needed = count * numbers * itemsize
        sizes.append(needed if needed <= room - sum(sizes) else 0)
    return sizes


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens at which the cumulated softmax passes numbers in [0, 1), `(rows,)` on the CPU.

    Args:
        logits: `(rows, vocab)` float32.
        uniforms: `(rows,)` float64.

    Raises:
        NumericalError: the logits are NaN or infinite.
    """
    if not all_finite(logits):
        raise NumericalError("the dense model gives NaN or infinity as logits: check its weights")
    size = max(1, CUMULATED // logits.shape[1])
    drawn = []
    for rows, numbers in zip(logits.split(size), uniforms.to(logits.device).split(size), strict=True):
        cumulated = rows.softmax(-1).cumsum(-1, dtype=torch.float64)
        # Relative to the sum, which rounding leaves beside 1; a token of probability 0 is never the first to pass.
        targets = numbers[:, None] * cumulated[:, -1:]
        drawn.append(torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp_max(logits.shape[1] - 1))
    return torch.cat(drawn).cpu()


def beginning(windows: Tensor, known: int | None = None) -> int | None:
    """Return the token with which all windows begin, if they do and more follows: Gemma's `<bos>`, say.

    Args:
        windows: of a text, or ids of which nothing is known; one alone tells nothing.
        known: the token that was put before each, if one was.
    """
    if known is not None:
        return known
    tells = len(windows) > 1 and windows.shape[1] > 1
    return int(windows[0, 0]) if tells and (windows[:, 0] == windows[0, 0]).all() else None
