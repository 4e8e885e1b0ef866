"""A projection that has a bias can carry the mean of its input there, exactly: only what varies has to be fitted."""

from torch import Tensor

from ..moments import BlockMoments


def centred(moments: BlockMoments, name: str) -> Tensor:
    """Return the moment `C`, or `C − s sᵀ/n` where the sum `s` of the states was taken as well."""
    moment, total = moments[name], moments.sums.get(f"{name}_sum")
    return moment if total is None else moment - total[:, None] * (total / moments.n_tokens)


def shifted_bias(
    bias: Tensor | None, moments: BlockMoments, name: str, dense: Tensor, narrow: Tensor, basis: Tensor
) -> Tensor | None:
    """Return the bias that keeps the mean output: `b + W μ − Ŵ μ_S`; the bias as it is where no sum was taken.

    Args:
        bias: of the dense projection.
        moments: hold `<name>_sum`, or do not.
        name: of the moment.
        dense: `(d_model, n)` dense projection.
        narrow: `(d_model, rank)` new one.
        basis: what the new one reads: `(rank,)` indices, or an `(n, rank)` matrix.
    """
    total = moments.sums.get(f"{name}_sum")
    if bias is None or total is None:
        return bias
    mean = total / moments.n_tokens
    kept = mean @ basis if basis.ndim == 2 else mean[basis]
    return bias.double() + dense @ mean - narrow @ kept
