"""Positive semidefinite matrices: the home of Cholesky, jitter, pseudo-inverse, and of what counts as singular.

All functions work in the dtype of their input: float64, or float32 where a caller says why that is enough.
"""

from typing import NamedTuple

import torch
from torch import Tensor

JITTER_STEPS = 10
"""How often a failing Cholesky is retried, each time with ten times the jitter: eps·n to 1e9·eps·n of the diagonal. As
the products in a moment are rounded to float32, one of some ten rows may need 1e-5 in float64."""
KNOWN = 1e-6
"""Of its largest eigenvalue, the share below which one of a moment is rounding error of the products in it: float32's
eps, some times over."""

COLUMN_BLOCK = {"cpu": 512, "cuda": 2048}
"""Columns of an inverse that are solved for at once, by device type. On a GPU too few leave most of it idle; 2048 of
11008 take 1.2 times the operations of 512."""


class NotPositiveDefiniteError(ArithmeticError):
    """A matrix holds NaN or infinity, or must be positive (semi)definite and has a negative direction."""


class Factor(NamedTuple):
    """A lower Cholesky factor and the relative jitter that was needed to obtain it (0 when none was)."""

    lower: Tensor
    jitter: float


class Solution(NamedTuple):
    """The solution of `A X = B`, the numerical rank of `A` and the name of the method that was used."""

    x: Tensor
    rank: int


def tolerance(matrix: Tensor) -> float:
    """Relative size below which an eigenvalue of an `n × n` matrix is rounding error: `n · eps`.

    The value is the default of `torch.linalg.pinv` and `lstsq`, so results agree with those on the same matrix.
    """
    return matrix.shape[-1] * torch.finfo(matrix.dtype).eps


def all_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor is free of NaN and infinity."""
    # One pass, where a mask of the tensor's size takes twenty times as long; NaN passes through both.
    return not tensor.numel() or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def require_finite(tensor: Tensor, name: str) -> None:
    """Raise `NotPositiveDefiniteError` if an entry is NaN or infinite; comparisons would let NaN pass in silence."""
    if not all_finite(tensor):
        raise NotPositiveDefiniteError(f"{name} holds NaN or infinity")


def symmetrize(matrix: Tensor) -> Tensor:
    """Return `(A + Aᵀ)/2` of a `(..., n, n)` tensor; raise if an entry is not finite."""
    require_finite(matrix, "the matrix")
    return (matrix + matrix.mT) / 2


def cholesky(matrix: Tensor, shift: float | Tensor = 0.0) -> Factor:
    """Factor a positive definite matrix as `A + diag(shift) = L Lᵀ`, adding jitter to the diagonal only if it must.

    The jitter starts at `n·eps` of each diagonal entry and grows tenfold; the factor says how much it was. Only the
    lower triangle of the `(n, n)` matrix is read. Memory: one working copy beside the factor.

    Raises:
        NotPositiveDefiniteError: if the factorisation fails at every step, or an entry is not finite.
    """
    require_finite(matrix, "the matrix")
    diagonal = matrix.diagonal() + shift
    working = matrix.clone()
    jitter = 0.0
    for step in range(JITTER_STEPS + 1):
        working.diagonal().copy_(diagonal + jitter * diagonal.abs())
        lower, info = torch.linalg.cholesky_ex(working)
        if not info.any():
            return Factor(lower, jitter)
        jitter = tolerance(matrix) * 10**step
    raise NotPositiveDefiniteError(
        f"Cholesky failed with jitter up to {jitter / 10:.1e} of the diagonal: the matrix has a negative direction"
    )


def inverse_diagonal(lower: Tensor) -> Tensor:
    """Return the diagonal of `(L Lᵀ)⁻¹` for an `(n, n)` Cholesky factor: the squared column norms of `L⁻¹`.

    Solved a block of columns at a time, each on the part of `L` below it: `n³/3` operations, all of them matrix
    products, and no second `n × n` result. (LAPACK's own inverse of a factor runs several times slower.)
    """
    result, block = torch.empty_like(lower.diagonal()), COLUMN_BLOCK[lower.device.type]
    for start in range(0, len(lower), block):
        triangle = lower[start:, start:]
        columns = torch.eye(len(triangle), min(block, len(triangle)), dtype=lower.dtype, device=lower.device)
        solved = torch.linalg.solve_triangular(triangle, columns, upper=False)
        result[start : start + block] = solved.square().sum(0)
    return result


def solve(matrix: Tensor, rhs: Tensor, known: float = 0.0) -> Solution:
    """Minimum-norm solution of `A X = B` for a positive semidefinite `(n, n)` matrix `A` and `(n, m)` `B`.

    `A` is first scaled to unit diagonal (`D⁻¹ A D⁻¹`, `D = diag(A)^½`), which makes neurons of very different
    size comparable. If its Cholesky pivots all exceed `√(n·eps)` and `known`, the triangular solves give `A⁻¹B` in
    `n³/3 + 2n²m` operations. Otherwise the scaled matrix may be singular and its pseudo-inverse is taken through an
    eigendecomposition (about `9n³`); the minimum norm is then that of `D X`. Rows of zero diagonal get zeros, and leave
    the others to the triangular solves.

    Args:
        matrix: `A`.
        rhs: `B`.
        known: eigenvalues of the scaled matrix below this share of the largest count as zero there, too.
    """
    require_finite(matrix, "the matrix")
    scale, scaled = _unit_diagonal(matrix)
    lower = _sound_factor(scaled, known)
    if lower is not None:
        found = torch.cholesky_solve(scale[:, None] * rhs, lower)
        return Solution(scale[:, None] * found, int(scale.count_nonzero()))
    scaled.diagonal().mul_(scale > 0)
    values, vectors = torch.linalg.eigh(scaled)
    keep = values > max(tolerance(matrix), known) * values[-1].clamp_min(0)
    inverse = torch.where(keep, 1 / torch.where(keep, values, 1), 0)
    projected = vectors.mT @ (scale[:, None] * rhs)
    return Solution(scale[:, None] * (vectors @ (inverse[:, None] * projected)), int(keep.sum()))


def inverse(matrix: Tensor) -> Tensor:
    """Return the inverses of `(..., n, n)` positive semidefinite matrices, or their pseudo-inverses.

    By Cholesky factors, as `solve`, where all of the batch are sound; else all by `root`. Cost: about `n³` operations
    each, or `11n³`. Meant for head-sized matrices.
    """
    require_finite(matrix, "the matrix")
    scale, scaled = _unit_diagonal(matrix)
    lower = _sound_factor(scaled)
    if lower is None:
        found = root(matrix)
        return found.inverse @ found.inverse.mT
    return scale[..., :, None] * torch.cholesky_inverse(lower) * scale[..., None, :]


def _unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return `diag(A)^-½`, 0 where that is 0, and `A` scaled by it on both sides, with 1 in these places, too.

    So one dead neuron does not make the whole of it singular; what is solved for it is 0 by its scale.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(0).rsqrt(), 0)
    scaled = (scale[..., :, None] * matrix).mul_(scale[..., None, :])
    scaled.diagonal(dim1=-2, dim2=-1).add_(scale == 0)
    return scale, scaled


def _sound_factor(scaled: Tensor, known: float = 0.0) -> Tensor | None:
    """Return the Cholesky factors of matrices of unit diagonal, or None where one of them may be singular."""
    lower, info = torch.linalg.cholesky_ex(scaled)
    # A pivot carries a rounding error of n·eps over the pivots before it, so a zero one can come out well above n·eps;
    # above √(n·eps) the error is smaller than the pivot.
    pivots = lower.diagonal(dim1=-2, dim2=-1).square()
    return lower if not info.any() and bool((pivots > max(tolerance(scaled) ** 0.5, known)).all()) else None


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of `(..., n, n)` symmetric matrices, in ascending order.

    Many head-sized ones are solved on the CPU, wherever they are: those wider than 32 a GPU is given one after another
    (PyTorch's issue 174674), and takes longer for each than LAPACK.
    """
    values, vectors = torch.linalg.eigh(matrix.cpu() if matrix.is_cuda and matrix.ndim > 2 else matrix)
    return values.to(matrix.device), vectors.to(matrix.device)


def leading(matrix: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis, `(n, rank)`, of the largest eigenvalues of an `(n, n)` symmetric matrix: `9n³`."""
    return torch.linalg.eigh(symmetrize(matrix)).eigenvectors[:, len(matrix) - rank :]


class Root(NamedTuple):
    """`root` with `A = rootᵀ root`, its pseudo-inverse, and the numerical rank of each matrix of the batch."""

    root: Tensor
    inverse: Tensor
    rank: Tensor


def root(matrix: Tensor) -> Root:
    """Factor `(..., n, n)` positive semidefinite matrices as `A = Rᵀ R`, `R = Λ^½ Eᵀ`, with `R⁺ = E Λ^{-½}`.

    Serves where the design writes a Cholesky factor `Lᵀ`: any `R` with `RᵀR = A` gives the same decomposition, and
    this one has a pseudo-inverse when `A` is singular. Meant for head-sized matrices: about `9n³` each.
    """
    values, vectors = eigh(symmetrize(matrix))
    keep = values > tolerance(matrix) * values[..., -1:].clamp_min(0)
    sqrt = torch.where(keep, values, 0).sqrt()
    inverse = torch.where(keep, 1 / torch.where(keep, sqrt, 1), 0)
    return Root(sqrt[..., :, None] * vectors.mT, vectors * inverse[..., None, :], keep.sum(-1))
