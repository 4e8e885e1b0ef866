"""Weighted products of hidden states, `Σ_t w_t x_t y_tᵀ`: in float32, or as exactly by a GPU's bfloat16 products.

A product of two bfloat16 numbers, of 8 bits each, is exact in float32. So the moments of a model that runs in bfloat16
are taken on tensor cores, whose sums lose what those of float32 products do if few are summed at once (`TOGETHER`), and
which are some eight times as fast (docs/log.md). Weights go into one factor, as two bfloat16 numbers that have 16 bits
together: their rounding, 2^-17, is far below that of the states. That is two products for one.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

TOGETHER = 1024
"""Tokens whose products are summed on tensor cores, which cut off what does not fit, so that sums end nearer to zero:
with 1024 tokens by 3e-6 of sums of squares, as float32 products do, with 16384 by 7e-5 (an H200; docs/log.md)."""
HELD = 2**27
"""Float32 numbers that are held of such sums: 512 MiB."""


def weighted(x: Tensor, roots: Tensor | None) -> Tensor:
    """Return `w x`, `(tokens, n)` float32; arguments as for `left_factor`."""
    return x.float() if roots is None else roots.square() * x.float()


def left_factor(x: Tensor, roots: Tensor | None) -> Tensor:
    """Return what stands on the left of `Σ w x yᵀ` for any `y`: `√w x` in float32, or `x` itself for tensor cores.

    Args:
        x: `(tokens, n)` states.
        roots: `(tokens, 1)` float32 square roots of the weights; None where all are one.
    """
    if _exact(x):
        return x
    return x.float() if roots is None else roots * x.float()


def right_factors(left: Tensor, y: Tensor, roots: Tensor | None) -> list[Tensor]:
    """Return what stands on the right: the sum over them of `leftᵀ right` is `Σ w x yᵀ`.

    Args:
        left: `left_factor` of `x`.
        y: `(tokens, m)` states, or `left` where it is `x`, too.
        roots: as for `left_factor`.
    """
    if not _exact(left):
        return [left if y is left else left_factor(y.float(), roots)]
    if roots is None and y.dtype == left.dtype:
        return [y]
    # Both steps compute in float32 and store in another dtype than they read: states this wide take as long as passes
    # over them do.
    whole = y if roots is None else roots.square() * y
    high = whole.to(left.dtype)
    return [high, torch.sub(whole, high, out=torch.empty_like(high))]


def product(left: Tensor, rights: Sequence[Tensor]) -> Tensor:
    """Return `Σ_right leftᵀ right`, `(n, m)` float32, of `(tokens, n)` and `(tokens, m)` factors.

    Cost: `2·tokens·n·m` operations for each right factor.
    """
    first, *rest = rights
    if not _exact(left):
        return left.mT @ first
    total = _in_parts(left, first)
    for small in rest:  # some 2^-9 of the first: what is cut off of its sums does not count
        total += _in_float32(left, small)
    return total


def cross_product(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return `Σ w x yᵀ`, `(n, m)` float32, of `(tokens, n)` states, `(tokens, m)` float32 and `(tokens, 1)` weights.

    In float32 the weights go into `x`, which should be the narrower one.
    """
    left = left_factor(x, None)
    if not _exact(left):
        return product(weights * left, [y])
    return product(left, right_factors(left, weights * y, None))


def _in_parts(left: Tensor, right: Tensor) -> Tensor:
    """Return `leftᵀ right` in float32, of which the sums of at most `TOGETHER` tokens are taken on tensor cores.

    Many parts are one batched product, whose results are added in one pass: half of what it takes to add one after
    another, which is as long as the products take. Memory: `HELD` numbers, or one result, beside the sum.
    """
    n_parts, n_last = divmod(len(left), TOGETHER)
    if not n_parts:
        return _in_float32(left, right)
    at_once = max(1, HELD // (left.shape[1] * right.shape[1]))
    whole = (x[: n_parts * TOGETHER].unflatten(0, (n_parts, TOGETHER)).split(at_once) for x in (left, right))
    pairs = zip(*whole, strict=True)
    total = _added(_in_float32(*next(pairs)))
    for pair in pairs:
        total += _added(_in_float32(*pair))
    if n_last:
        total += _in_float32(left[-n_last:], right[-n_last:])
    return total


def _added(parts: Tensor) -> Tensor:
    return parts.sum(0) if len(parts) > 1 else parts[0]


def _exact(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and _has_tensor_cores(x.device)


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Tell whether a GPU multiplies bfloat16 matrices with float32 results: PyTorch before 2.8 does not say."""
    probe = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        found = _in_float32(probe, probe) + _in_float32(probe[None], probe[None])
        return torch.cuda.get_device_capability(device) >= (8, 0) and bool(found.eq(32).all())
    except (RuntimeError, TypeError):
        return False


def _in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return `leftᵀ right` in float32, of two matrices or of two batches of them."""
    multiply = torch.mm if left.ndim == 2 else torch.bmm
    return multiply(left.mT, right, out_dtype=torch.float32)
