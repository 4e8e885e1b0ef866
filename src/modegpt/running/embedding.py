"""How texts enter the blocks: in which batches, with which weights, and where their hidden states are held."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache

from ..blocks import TOKENS_PER_BATCH, Calibration
from ..config import CompressionConfig
from ..hidden_states import HiddenStates
from ..report import Stopwatch, free_gpu_memory_bytes
from ..sums.token_weights import token_weights
from .distributed import Team
from .own_text import LENGTHS, empty_caches
from .source import Source

OFFSET_PERIOD = 4096
"""Tokens after which the count of `Calibration.offsets` begins anew, whatever the size of a batch."""
GPU_PART = 8
"""Of a GPU's free memory an eighth is for hidden states; what it has no room for is on the host."""


@dataclass(frozen=True)
class Embedding:
    """Turns windows of token ids into the hidden states before block 0."""

    source: Source
    config: CompressionConfig
    seq_len: int
    """Tokens in a window of the text; a batch of shorter windows holds as many tokens as one of these."""
    device: torch.device
    team: Team
    watch: Stopwatch
    spill: Path | None
    """Where hidden states go that memory has no room for; None for the system's temporary folder."""

    def shared(self, windows: Tensor, streams: int, texts: int = 1) -> Calibration:
        """Return this process's share of the windows that moments are taken on, each token with its weight.

        Args:
            windows: `(samples, tokens)` token ids, those of all processes.
            streams: how many sets of hidden states the run holds at once, which share the room there is.
            texts: how many texts they are of.
        """
        calibration = self.embed(self.team.share(windows), streams, texts)
        length = windows.shape[1]
        size, weights = self._batch_size(length), token_weights(windows, self.config.rarity_exponent)
        if weights is not None:
            calibration.weights = self.team.share(weights).split(size)
        calibration.offsets = self.team.share(torch.arange(len(windows)) * length % OFFSET_PERIOD).split(size)
        return calibration

    def embed(self, windows: Tensor, streams: int = 1, texts: int = 1) -> Calibration:
        """Return the hidden states of these very windows; `streams` and `texts` as for `shared`."""
        with self.watch.stage("embed"):
            limit, free = self.config.max_host_memory, free_gpu_memory_bytes(self.device)
            share = self.source.states_held(streams, texts)
            host = None if limit is None else int(limit / share)
            hidden = HiddenStates(host, self.spill, self.device, int(free / (GPU_PART * share)))
            return self.source.blocks.embed(windows, self._batch_size(windows.shape[1]), hidden)

    def continued(self, tokens: Tensor, cache: Cache | None) -> Calibration:
        """Return the hidden states of tokens that go on where a cache ends; without one they are whole texts.

        Such states are held of continuations of all lengths at once.
        """
        if cache is None:
            return self.embed(tokens, len(LENGTHS), len(LENGTHS))
        with self.watch.stage("embed"):
            # Beside the cache they are small; keys and values that blocks hand on are in it, too.
            here = HiddenStates(device=self.device, device_bytes=sys.maxsize)
            return self.source.blocks.embed(tokens, len(tokens), here, cache)

    def caches(self, shapes: Sequence[tuple[int, int]]) -> list[Cache | None]:
        """Return empty caches for texts of each `(rows, tokens)`; None where no batch or no memory can hold them."""
        most = self._batch_size(2)  # rows: each may have a token before the first
        n_tokens = [rows * length if rows <= most else 0 for rows, length in shapes]
        return empty_caches(self.source, n_tokens, self.device, spare=self.config.host_to_spare)

    def _batch_size(self, seq_len: int) -> int:
        """Return how many windows of a length run at once."""
        fitting = TOKENS_PER_BATCH[self.device.type]
        if self.config.batch_size:  # of the text's windows
            fitting = self.config.batch_size * self.seq_len
        return max(1, fitting // seq_len)
