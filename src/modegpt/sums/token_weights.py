"""How much each calibration token counts: less, the more often it occurs, and the larger its hidden state."""

import torch
from torch import Tensor

ASTRAY = 10.0
"""How many norms of its dense hidden state a token may be away from it without being bounded."""


def token_weights(windows: Tensor, exponent: float) -> Tensor | None:
    """Return `w_t ∝ n(token_t)^-α` of every token, `(samples, seq_len)` float64 of mean 1; None for `α = 0`.

    `n` counts a token's occurrences in all windows. A second moment is an average over tokens, and a few token types
    make up most of any text: their states are fitted many times over, while those of a rare one are seen once. On other
    text the rare ones are others, and more. At `α = 1` every type would count alike; a small `α` moves towards that
    without giving up much of the text's own average (importance weighting: Shimodaira, 2000).

    Args:
        windows: `(samples, seq_len)` token ids, of all processes.
        exponent: `α ≥ 0`.
    """
    if not exponent:
        return None
    _types, places, counts = windows.unique(return_inverse=True, return_counts=True)
    weights = counts.double().pow(-exponent)[places]
    return weights / weights.mean()


def weighed_by_norm(weights: Tensor | None, states: Tensor, rms: Tensor | None = None) -> Tensor:
    """Return `w_t / ‖h_t‖` of every token, `(batch, tokens)` float32 on the device of the states; 0 where `h_t = 0`.

    The layers behind a block read its output normed, so an error of a given size matters less, the larger the state is:
    `w_t / ‖h_t‖²` would count it as the next norm sees it. Halfway loses least on other text (docs/log.md), and tokens
    with massive states, which some models make of the first one, no longer rule a moment.

    Where a norm divides the MLP's output by its RMS `r_t` before it is added, it divides an error of it, too; half of
    that exponent is `w_t / (r_t ‖h_t‖)`.

    Args:
        weights: `(batch, tokens)`, or None where all count alike.
        states: `(batch, tokens, d_model)` hidden states behind a block.
        rms: `(batch, tokens)` `r`, where there is such a norm.
    """
    norms = states.float().norm(dim=-1)
    if rms is not None:
        norms *= rms.to(norms.device)
    inverse = torch.where(norms > 0, 1 / norms, 0)
    return inverse if weights is None else weights.to(states.device, torch.float32) * inverse


def bounded_astray(weights: Tensor, states: Tensor, output: Tensor) -> Tensor:
    """Return `w_t min(1, (c ‖h_t‖ / ‖h_t − ĥ_t‖)²)`, which bounds `w_t ‖h_t − ĥ_t‖²` by `w_t c² ‖h_t‖²`, `c = 10`.

    Some models make a massive state of a few tokens in one layer, and of which tokens hangs on little: the compressed
    model may do so for one that the dense model does not. One such token can be most of what a layer is off by, and a
    fit would give up all the others for it (docs/log.md). What the layers behind read of it, normed, is wrong by no
    more than twice the norm, however far it is off. Where no token is, the weights are those given, to the bit.

    Args:
        weights: `(batch, tokens)` `w`.
        states: `(batch, tokens, d_model)` `h`, the dense model's hidden states behind a block.
        output: those `ĥ` of the compressed model.
    """
    states, output = states.float(), output.float()
    off = (states - output).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return weights * (ASTRAY * states.norm(dim=-1) / off).clamp(max=1).square()
