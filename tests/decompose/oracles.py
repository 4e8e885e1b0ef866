"""The paper's algorithms as printed, in the paper's layout (`x W`), and the matrices they are tried on.

Square roots, inverses and pseudo-inverses are formed explicitly, so nothing here shares a shortcut with the package.
"""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

GAUSSIAN_TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
"""For results of size one on `states`, whose moments have a condition number below 1e4: rounding grows to about
`n · eps · cond = 10 · 2e-16 · 1e4 = 2e-11`, and a selected subspace is divided by a relative gap (1e-2 or more)."""

ROUNDING = {"rtol": 1e-12, "atol": 1e-12}
"""For a few well-conditioned products and sums of size one: `n · eps` is 1e-14, and this leaves a factor of 100."""

ERROR_FLOOR = 1e-6
"""Where an error is the root of a difference of two energies, `sqrt(n · eps)` = 5e-8 cannot be told from zero."""

seeds = st.integers(0, 2**32 - 1)
properties = settings(max_examples=25, deadline=None, derandomize=True)
"""The same examples on every run; a matrix is small, so 25 of them take a fraction of a second."""


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def states(seed: int, n_tokens: int, width: int) -> Tensor:
    """Gaussian activations whose coordinates differ in scale, tenfold from first to last in a shuffled order."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    return normal(seed, n_tokens, width) * torch.logspace(-0.5, 0.5, width, dtype=torch.float64)[order]


def square_root(matrix: Tensor) -> Tensor:
    """`C^{1/2}`: the symmetric positive semidefinite root."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.mT


def selection(scores: Tensor, k: int) -> Tensor:
    """`S_k`: the matrix that selects the top `k` columns, in ascending order."""
    kept = scores.argsort(descending=True)[:k].sort().values
    return torch.eye(len(scores), dtype=scores.dtype)[:, kept]


def algorithm_1(C: Tensor, W_D: Tensor, k: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Type I: `S_k` and the new `W_D`."""
    scores = torch.diagonal(C @ torch.linalg.inv(C + ridge * torch.eye(len(C), dtype=C.dtype)))
    S = selection(scores, k)
    return S, torch.linalg.pinv(S.T @ C @ S) @ S.T @ C @ W_D


def algorithm_2_scores(Q: Tensor, K: Tensor) -> Tensor:
    """Type II: `s_i = ‖C_Q^{1/2}[:, i]‖ ‖C_K^{1/2}[:, i]‖` for the query and key states of one head."""
    return square_root(Q.T @ Q).norm(dim=0) * square_root(K.T @ K).norm(dim=0)


def algorithm_2_grouped_scores(queries: list[Tensor], K: Tensor) -> Tensor:
    """Type II under grouped queries: `s_i = sqrt(Σ_h ‖C_{h,Q}^{1/2}[:, i]‖² ‖C_K^{1/2}[:, i]‖²)`."""
    return sum(algorithm_2_scores(Q, K) ** 2 for Q in queries).sqrt()


def algorithm_3(X: Tensor, W_V: Tensor, W_O: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Type III: the new `W_V` and `W_O` of one head, through two SVDs of `d_model`-sized matrices."""
    root = square_root(X.T @ X)
    U, Sigma, Vt = torch.linalg.svd(root @ W_V, full_matrices=False)
    U2, Sigma2, Vt2 = torch.linalg.svd(torch.diag(Sigma) @ Vt @ W_O, full_matrices=False)
    # A root's eigenvalues carry an error of sqrt(eps), so what pinv may call zero lies at 1e-7, not at eps.
    inverse_root = torch.linalg.pinv(root, rtol=1e-7, hermitian=True)
    return inverse_root @ U @ U2[:, :k], torch.diag(Sigma2[:k]) @ Vt2[:k]


def algorithm_3_grouped(X: Tensor, W_V: Tensor, W_O: list[Tensor], k: int) -> tuple[Tensor, list[Tensor]]:
    """Type III under grouped queries: one eigenmatrix for the whole group, no second SVD.

    The appendix prints the SVD of `C W_V` and multiplies `W_V` by `U_k` from the right. `U` has `d_model` rows, so
    the factor that fits is the right one; and the line it says it modifies takes `C^{1/2} W_V`, as does this.
    """
    _, _, Vt = torch.linalg.svd(square_root(X.T @ X) @ W_V, full_matrices=False)
    basis = Vt[:k].T
    return W_V @ basis, [basis.T @ each for each in W_O]


def features(query: Tensor, key: Tensor, rotary_dim: int) -> Tensor:
    """The features that `decompose.logits.gram` describes, one by one: `(..., n_queries, n_keys, d_head)`."""
    half = rotary_dim // 2
    query, key = query[..., :, None, :], key[..., None, :, :]
    product = query * key
    q1, q2, k1, k2 = query[..., :half], query[..., half:rotary_dim], key[..., :half], key[..., half:rotary_dim]
    real = product[..., :half] + product[..., half:rotary_dim]
    return torch.cat((real, q2 * k1 - q1 * k2, product[..., rotary_dim:]), dim=-1)
