"""Coverage windows: text that the dense model writes itself, in short continuations of random tokens."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .architectures import Dimensions
from .blocks import BlockSource, Calibration, advance
from .distributed import Team
from .errors import NumericalError
from .hidden_states import HiddenStates

LENGTH = 16
"""Tokens of a continuation, the random one included (docs/log.md)."""
CACHE_BYTES = {"cpu": 2**30, "cuda": 2**33}
"""Memory for the keys and values of the continuations that are written together. Fewer at once would not slow a model
that is in memory down; one that is streamed is read once more for each such group and token."""
ROWS = 256
"""Distributions over the vocabulary that are in memory at once: some 100 MB each time they are copied."""


class Writer:
    """Lets the dense model write.

    Continuations are written in groups. A group's keys and values are kept, so that every step runs one token of each
    through the model; a model that is read block by block is read for each step of each group.

    Args:
        blocks: of the model.
        n_layers: of the model.
        embed: gives the hidden states before block 0 of `(rows, tokens)` ids, one batch of them, and the arguments of
            every block, for tokens that come after those whose keys and values are in the cache.
        team: the processes of the run; each writes its share.
        device: where blocks run.
        rows: continuations of a group.
        done: called with the blocks that have been run and those there are to run.
    """

    def __init__(
        self,
        blocks: BlockSource,
        n_layers: int,
        embed: Callable[[Tensor, Cache], Calibration],
        team: Team,
        device: torch.device,
        rows: int,
        done: Callable[[int, int], None],
    ) -> None:
        """Write nothing yet."""
        self._blocks, self._n_layers, self._embed = blocks, n_layers, embed
        self._team, self._device, self._rows, self._done = team, device, rows, done
        self._n_run = self._n_to_run = 0

    def windows(self, count: int, seq_len: int, length: int, start: int | None, vocab_size: int, seed: int) -> Tensor:
        """Return `(count, seq_len)` token ids: continuations one after another, whatever the number of processes.

        Args:
            count: of windows.
            seq_len: tokens of each.
            length: tokens of a continuation, the random one included.
            start: the token with which every window and every continuation begins, or None.
            vocab_size: the first token of a continuation is drawn from all of it, alike.
            seed: of the draws; the global random state is neither read nor changed.

        Raises:
            NumericalError: the model's logits are NaN or infinite.
        """
        own = seq_len - (start is not None)
        rows = max(self._team.size, -(-count * own // length))
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(rows, length, generator=generator, dtype=torch.float64)
        groups = self._team.share(uniforms).split(self._rows)
        self._n_run, self._n_to_run = 0, len(groups) * (length - 1) * self._n_layers
        self._done(0, self._n_to_run)
        text = torch.zeros(rows, length, dtype=torch.long, device=self._device)
        written = torch.cat([self._write(group, start, vocab_size) for group in groups])
        text[self._team.rank :: self._team.size] = written.to(text.device)
        text = self._team.sum_(text).cpu().flatten()[: count * own].view(count, own)
        return text if start is None else torch.cat((text.new_full((count, 1), start), text), dim=1)

    def _write(self, uniforms: Tensor, start: int | None, vocab_size: int) -> Tensor:
        """Return the tokens of a group, for which uniform numbers stand, `(rows, length)` both."""
        cache = DynamicCache(config=self._blocks.model.config)
        tokens = (uniforms[:, :1] * vocab_size).long()
        new = tokens if start is None else torch.cat((torch.full_like(tokens, start), tokens), dim=1)
        for step in range(1, uniforms.shape[1]):
            hidden, drawn, row = self._run(new, cache), [], 0
            for logits in self._blocks.logits(rows for states in hidden for rows in states[:, -1].split(ROWS)):
                drawn.append(sample(logits, uniforms[row : row + len(logits), step]))
                row += len(logits)
            new = torch.cat(drawn)[:, None]
            tokens = torch.cat((tokens, new), dim=1)
        return tokens

    def _run(self, tokens: Tensor, cache: Cache) -> HiddenStates:
        """Return the hidden states behind the last block; each block adds keys and values to the cache."""
        calibration = self._embed(tokens, cache)
        for index in range(self._n_layers):
            block = self._blocks.peek(index, self._device)
            advance(block, index, calibration, self._device)
            del block
            self._n_run += 1
            self._done(self._n_run, self._n_to_run)
        return calibration.hidden


def rows_at_once(dims: Dimensions, length: int, itemsize: int, device: torch.device) -> int:
    """Return how many continuations' keys and values `CACHE_BYTES` holds, at least one.

    Args:
        dims: of the model.
        length: tokens of a continuation.
        itemsize: bytes of a number that the model computes with.
        device: where blocks run.
    """
    token = 2 * dims.n_layers * dims.n_kv_heads * dims.d_head * itemsize
    return max(1, CACHE_BYTES[device.type] // (token * (length + 1)))


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens at which the cumulated softmax passes numbers in [0, 1), `(rows,)` on the CPU.

    Args:
        logits: `(rows, vocab)` float32.
        uniforms: `(rows,)` float64.

    Raises:
        NumericalError: the logits are NaN or infinite.
    """
    if not torch.isfinite(logits).all():
        raise NumericalError("the dense model gives NaN or infinity as logits: check its weights")
    cumulated = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    # Relative to the sum, which rounding leaves beside 1; a token of probability 0 is never the first to pass.
    targets = uniforms.to(logits.device)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp_max(logits.shape[1] - 1).cpu()


def beginning(windows: Tensor) -> int | None:
    """Return the token with which all windows begin, if they do (and there are several): Gemma's `<bos>`, say."""
    return int(windows[0, 0]) if len(windows) > 1 and (windows[:, 0] == windows[0, 0]).all() else None
