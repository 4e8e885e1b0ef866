"""Coverage windows: text that the dense model writes itself, in short continuations of random tokens."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .blocks import BlockSource, Calibration, advance
from .decompose.psd import all_finite
from .distributed import Team
from .errors import NumericalError
from .hidden_states import HiddenStates
from .report import free_gpu_memory_bytes

LENGTH = 4
"""Tokens of a continuation, the random one included; others cost more or lose more (docs/log.md)."""
ROWS = 256
"""Distributions over the vocabulary that are in memory at once: some 100 MB each time they are copied."""
FREE_PART = 2
"""Blocks stay on a GPU from step to step as long as one half of what was free of it still is: to read and copy one
takes longer than to run it on such short texts."""
CUMULATED = 2**20
"""Float64 numbers in memory at once while tokens are drawn: what stays in the cache is summed thrice as fast."""


class Writer:
    """Lets the dense model write.

    Every step runs the whole model over all that is written so far. A cache would save half of the tokens at this
    length, and would have to be held for all continuations at once, for a model that may not fit in memory itself.
    A GPU keeps the blocks that half of its free memory has room for, as long as this object lives.

    Args:
        blocks: of the model.
        n_layers: of the model.
        embed: gives the hidden states before block 0 of this process's `(rows, tokens)` ids.
        team: the processes of the run; each writes its share.
        device: where blocks run.
        done: called with the blocks that have been run and those there are to run.
    """

    def __init__(
        self,
        blocks: BlockSource,
        n_layers: int,
        embed: Callable[[Tensor], Calibration],
        team: Team,
        device: torch.device,
        done: Callable[[int, int], None],
    ) -> None:
        """Write nothing yet."""
        self._blocks, self._n_layers, self._embed = blocks, n_layers, embed
        self._team, self._device, self._done = team, device, done
        self._kept: dict[int, nn.Module] = {}
        self._least = free_gpu_memory_bytes(device) // FREE_PART

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
        self._done(0, (LENGTH - 1) * self._n_layers)
        own = seq_len - (start is not None)
        rows = max(self._team.size, -(-count * own // LENGTH))
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(rows, LENGTH, generator=generator, dtype=torch.float64)
        text = torch.zeros(rows, LENGTH, dtype=torch.long, device=self._device)
        text[self._team.rank :: self._team.size] = self._write(self._team.share(uniforms), start, vocab_size).to(
            text.device
        )
        text = self._team.sum_(text).cpu().flatten()[: count * own].view(count, own)
        return text if start is None else torch.cat((text.new_full((count, 1), start), text), dim=1)

    def _write(self, uniforms: Tensor, start: int | None, vocab_size: int) -> Tensor:
        """Return the `(rows, LENGTH)` tokens that uniform numbers of this shape stand for."""
        tokens = (uniforms[:, :1] * vocab_size).long()
        lead = tokens.new_full((len(tokens), start is not None), start or 0)
        for step in range(1, LENGTH):
            hidden = self._run(torch.cat((lead, tokens), dim=1), (step - 1) * self._n_layers)
            drawn, row = [], 0
            for logits in self._blocks.logits(rows for states in hidden for rows in states[:, -1].split(ROWS)):
                drawn.append(sample(logits, uniforms[row : row + len(logits), step]))
                row += len(logits)
            tokens = torch.cat((tokens, torch.cat(drawn)[:, None]), dim=1)
        return tokens

    def _run(self, tokens: Tensor, n_done: int) -> HiddenStates:
        """Return the hidden states behind the last block."""
        calibration = self._embed(tokens)
        for index in range(self._n_layers):
            advance(self._block(index), index, calibration, self._device)
            self._done(n_done + index + 1, (LENGTH - 1) * self._n_layers)
        return calibration.hidden

    def _block(self, index: int) -> nn.Module:
        """Return a block, and keep it for the steps to come where a GPU has room for it."""
        if index in self._kept:
            return self._kept[index]
        block = self._blocks.peek(index, self._device)
        if free_gpu_memory_bytes(self._device) > self._least:
            self._kept[index] = block
        return block


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
    """Return the token with which all windows begin, if they do: Gemma's `<bos>`, say.

    Args:
        windows: of a text, or ids of which nothing is known; one alone tells nothing.
        known: the token that was put before each, if one was.
    """
    if known is not None:
        return known
    return int(windows[0, 0]) if len(windows) > 1 and (windows[:, 0] == windows[0, 0]).all() else None
