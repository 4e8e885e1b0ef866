"""Coverage windows: calibration windows in which tokens are replaced, strange words in real contexts."""

import torch
from torch import Tensor

REPLACED = 0.3
"""Share of the tokens that are replaced at random."""


def replace_tokens(windows: Tensor, count: int, start: int | None, vocab_size: int, seed: int) -> Tensor:
    """Return copies of some windows in which tokens are replaced by random ones.

    Args:
        windows: `(samples, seq_len)` token ids.
        count: copies to make, of evenly spaced windows; at most `samples`.
        start: the token with which every window begins, or None.
        vocab_size: tokens are drawn from all of it, alike.
        seed: of the draws; the global random state is neither read nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    copies = windows[torch.arange(count) * len(windows) // max(1, count)].clone()
    replaced = torch.rand(copies.shape, generator=generator) < REPLACED
    if start is not None:
        replaced[:, 0] = False
    copies[replaced] = torch.randint(vocab_size, (int(replaced.sum()),), generator=generator, dtype=copies.dtype)
    return copies
