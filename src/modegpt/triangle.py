"""Second moments `Σ x xᵀ` by their lower triangle: the upper one is the same, and half of the work."""

from torch import Tensor

PANEL = 384
"""Rows of the sum that are computed at once, each from its first column to the diagonal. On a CPU panels of 256 to 512
take 52 to 60 % of the time of the whole product at 1536 to 11008 columns (docs/log.md)."""


def add_lower(total: Tensor, x: Tensor) -> None:
    """Add `xᵀx` to `total` on and below its diagonal; what is above it is of no use until `fill_upper`.

    Products are in the dtype of `x`, sums in that of `total`. Cost: `tokens·n²` operations and as much again within
    the panels on the diagonal, for `PANEL` of the `n` columns. Memory: `PANEL·n`.

    Args:
        total: `(n, n)`.
        x: `(tokens, n)`.
    """
    for start in range(0, len(total), PANEL):
        end = min(start + PANEL, len(total))
        total[start:end, :end] += x[:, start:end].mT @ x[:, :end]


def fill_upper(total: Tensor) -> None:
    """Make an `(n, n)` tensor symmetric, in place, by what stands below its diagonal."""
    for start in range(0, len(total), PANEL):
        end = min(start + PANEL, len(total))
        total[:start, start:end] = total[start:end, :start].mT
        square = total[start:end, start:end]
        square.copy_(square.tril() + square.tril(-1).mT)
