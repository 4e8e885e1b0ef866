"""A projection that has a bias can carry the mean of its input there, exactly: only what varies has to be fitted."""

from collections.abc import Callable

from torch import Tensor

from ..moments import BlockMoments

CONSTANT = 1e-5
"""Variance over mean square below which a state is taken for a constant. The products in `C` are rounded to float32,
1e-7 of the mean square each: of 20 such states together, 1e-6 still left a negative direction, and 1e-5 never did."""


def centred(moments: BlockMoments, name: str) -> Tensor:
    """Return the moment `C`, or `C − s sᵀ/n` where the sum `s` of the states was taken as well.

    What is left there of a state that hardly varies is rounding error: it has zero rows and columns, as a constant has.
    """
    moment, total = moments[name], moments.sums.get(f"{name}_sum")
    if total is None:
        return moment
    left = moment - total[:, None] * moments.mean(name)
    constant = left.diagonal() <= CONSTANT * moment.diagonal()
    left[constant], left[:, constant] = 0, 0
    return left


def shifted_bias(
    bias: Tensor | None,
    moments: BlockMoments,
    name: str,
    dense: Tensor,
    narrow: Tensor,
    keep: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Return the bias that keeps the mean output: `b + W μ − Ŵ μ_S`; the bias as it is where no sum was taken.

    Args:
        bias: of the dense projection.
        moments: hold `<name>_sum`, or do not.
        name: of the moment.
        dense: `(d_model, n)` dense projection.
        narrow: `(d_model, rank)` new one.
        keep: gives what the new one reads of the `(n,)` mean: `(rank,)`.
    """
    if bias is None or f"{name}_sum" not in moments.sums:
        return bias
    mean = moments.mean(name)
    return bias.double() + dense @ mean - narrow @ keep(mean)
