"""How much each calibration token counts: less, the more often it occurs."""

from torch import Tensor


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
