"""Second moments `Σ x xᵀ` by their lower triangle: the upper one is the same, and half of the work."""

from torch import Tensor

from .exact_products import product, right_factors

PANEL = {"cpu": 384, "cuda": 1024}
"""Rows of the sum that are computed at once, each from its first column to the diagonal, by device type. On a CPU
panels of 256 to 512 take 52 to 60 % of the time of the whole product at 1536 to 11008 columns; a GPU takes longer to
add many small ones (docs/log.md)."""


def add_lower(total: Tensor, left: Tensor, roots: Tensor | None) -> None:
    """Add `Σ w x xᵀ` to `total` on and below its diagonal; what is above it is of no use until `fill_upper`.

    Products come in float32, and are summed in the dtype of `total`. Cost: `tokens·n²` operations and as much again
    within the panels on the diagonal, for `PANEL` of the `n` columns, and all that for each right factor. Memory:
    `2·PANEL·n`.

    Args:
        total: `(n, n)`.
        left: `(tokens, n)`, `exact_products.left_factor` of `x`.
        roots: `(tokens, 1)` square roots of the weights, as for `left_factor`.
    """
    rights, panel = right_factors(left, left, roots), PANEL[total.device.type]
    for start in range(0, len(total), panel):
        end = min(start + panel, len(total))
        # In place: `total[…] += …` would then copy the sum onto itself.
        total[start:end, :end].add_(product(left[:, start:end], [right[:, :end] for right in rights]))


def fill_upper(total: Tensor) -> None:
    """Make an `(n, n)` tensor symmetric, in place, by what stands below its diagonal."""
    panel = PANEL[total.device.type]
    for start in range(0, len(total), panel):
        end = min(start + panel, len(total))
        total[:start, start:end] = total[start:end, :start].mT
        square = total[start:end, start:end]
        square.copy_(square.tril() + square.tril(-1).mT)
