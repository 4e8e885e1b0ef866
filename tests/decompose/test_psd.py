import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GAUSSIAN_TOLERANCE, ROUNDING, normal, properties, seeds, states

from modegpt.decompose import NotPositiveDefiniteError, psd

EPS = torch.finfo(torch.float64).eps


def moment(seed, n_tokens, width):
    x = states(seed, n_tokens, width)
    return x.T @ x


def test_tolerance_is_that_of_pinv():
    # torch documents max(m, n) * eps as the default rtol of pinv.
    assert psd.tolerance(torch.eye(7, dtype=torch.float64)) == 7 * EPS
    assert psd.tolerance(torch.eye(7, dtype=torch.float32)) == 7 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("function", [psd.symmetrize, psd.cholesky, psd.root, psd.inverse, lambda a: psd.solve(a, a)])
def test_what_is_not_finite_is_refused(function, bad):
    matrix = moment(0, 20, 4)
    matrix[1, 2] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        function(matrix)


@pytest.mark.parametrize("function", [psd.symmetrize, psd.cholesky, psd.root, psd.inverse, lambda a: psd.solve(a, a)])
@pytest.mark.parametrize("n_tokens", [2, 20])
def test_inputs_are_not_mutated(function, n_tokens):
    matrix = moment(0, n_tokens, 4)
    before = matrix.clone()
    function(matrix)
    assert torch.equal(matrix, before)


@properties
@given(seeds, st.integers(1, 8))
def test_cholesky_factors_a_definite_matrix_without_jitter(seed, width):
    matrix = moment(seed, 6 * width, width)
    lower, jitter = psd.cholesky(matrix)
    assert jitter == 0
    torch.testing.assert_close(lower @ lower.T, matrix, **ROUNDING)
    assert torch.equal(lower, lower.tril())


def test_cholesky_reports_the_jitter_it_needed():
    # A negative eigenvalue of -1e-12 beside a diagonal of one: the steps are 2·eps·10^j, and 4.4e-12 is the first
    # that lifts it above zero.
    matrix = torch.diag(torch.tensor([1.0, 1.0], dtype=torch.float64)) + torch.tensor(
        [[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64
    ) * (1 + 1e-12)
    lower, jitter = psd.cholesky(matrix)
    assert jitter == pytest.approx(2 * EPS * 1e4, rel=1e-12)
    # The factor is that of the matrix with its diagonal raised by the reported share, and of no other.
    torch.testing.assert_close(lower @ lower.T, matrix + jitter * torch.eye(2, dtype=torch.float64), rtol=0, atol=4e-16)


def test_the_first_jitter_is_the_tolerance():
    # Singular to the bit, so the least jitter there is already lifts its zero pivot.
    ones = torch.ones(2, 2, dtype=torch.float64)
    lower, jitter = psd.cholesky(ones)
    assert jitter == psd.tolerance(ones)
    torch.testing.assert_close(lower @ lower.T, ones + jitter * torch.eye(2, dtype=torch.float64), rtol=0, atol=4e-16)


@properties
@given(seeds, st.integers(1, 8), st.sampled_from([0.5, 3.0]))
def test_cholesky_of_a_shifted_matrix(seed, width, shift):
    matrix = moment(seed, max(1, width - 2), width)  # singular without the shift
    lower, jitter = psd.cholesky(matrix, shift)
    assert jitter == 0
    torch.testing.assert_close(lower @ lower.T, matrix + shift * torch.eye(width, dtype=torch.float64), **ROUNDING)


@pytest.mark.parametrize("width", [1, 5, psd.COLUMN_BLOCK["cpu"], psd.COLUMN_BLOCK["cpu"] + 3])
def test_inverse_diagonal_equals_the_explicit_inverse_on_both_sides_of_a_block(width):
    x = normal(12, 2 * width + 10, width)
    matrix = x.T @ x / width + torch.eye(width, dtype=torch.float64)
    expected = torch.linalg.inv(matrix).diagonal()
    # Eigenvalues lie between 1 and 20, the diagonal of the inverse near 0.3: n · eps · cond = 515 · 2e-16 · 20 = 2e-12.
    torch.testing.assert_close(psd.inverse_diagonal(psd.cholesky(matrix).lower), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("lowest", [-1.0, -1e-4])
def test_cholesky_raises_on_a_negative_direction(lowest):
    turn = torch.linalg.qr(normal(3, 4, 4)).Q
    matrix = turn @ torch.diag(torch.tensor([3.0, 2.0, 1.0, lowest], dtype=torch.float64)) @ turn.T
    with pytest.raises(NotPositiveDefiniteError, match="negative direction"):
        psd.cholesky(matrix)


@properties
@given(seeds, st.integers(1, 8), st.integers(1, 3))
def test_solve_equals_lstsq_on_a_definite_matrix(seed, width, columns):
    matrix, rhs = moment(seed, 6 * width, width), normal(seed + 1, width, columns)
    x, rank = psd.solve(matrix, rhs)
    assert rank == width
    torch.testing.assert_close(x, torch.linalg.lstsq(matrix, rhs).solution, **GAUSSIAN_TOLERANCE)


@properties
@given(seeds, st.integers(2, 8))
def test_solve_of_a_singular_matrix_has_minimum_scaled_norm(seed, width):
    matrix = moment(seed, width - 1, width)
    rhs = matrix @ normal(seed + 1, width, 2)
    x, rank = psd.solve(matrix, rhs)
    scale = matrix.diagonal().sqrt()
    scaled = matrix / scale / scale[:, None]
    # Square Gaussian matrices can be ill-conditioned: up to 1e8 in the moment, and eps · 1e8 = 2e-8 of x's size.
    tolerance = 1e-6 * (1 + x.abs().max().item())
    assert rank == width - 1
    torch.testing.assert_close(matrix @ x, rhs, rtol=0, atol=tolerance)
    expected = torch.linalg.pinv(scaled, hermitian=True) @ (rhs / scale[:, None]) / scale[:, None]
    torch.testing.assert_close(x, expected, rtol=0, atol=tolerance)


def test_solve_is_equivariant_to_the_scale_of_neurons():
    matrix, rhs = moment(5, 30, 4), normal(6, 4, 2)
    # Powers of four: their roots are exact, so scaling changes no bit of the mantissas. Without the scaling to unit
    # diagonal the small neurons would fall below n·eps.
    scale = torch.tensor([2.0**-40, 1.0, 2.0**20, 2.0**40], dtype=torch.float64)
    x, rank = psd.solve(scale[:, None] * matrix * scale, scale[:, None] * rhs)
    assert rank == 4
    torch.testing.assert_close(scale[:, None] * x, psd.solve(matrix, rhs).x, rtol=1e-14, atol=0)


def test_solve_gives_zeros_to_dead_rows_and_counts_them():
    matrix, rhs = moment(7, 30, 4), normal(8, 4, 2)
    matrix[2] = matrix[:, 2] = 0
    x, rank = psd.solve(matrix, rhs)
    alive = torch.tensor([0, 1, 3])
    assert rank == 3
    assert torch.equal(x[2], torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(x[alive], psd.solve(matrix[alive][:, alive], rhs[alive]).x, **GAUSSIAN_TOLERANCE)


def test_a_dead_row_costs_the_others_nothing():
    """Left to a pseudo-inverse in float32, this one would lose every direction but that of the mean."""
    width, ridge = 400, 0.01
    states = 1 + 0.05 * normal(9, 4 * width, width)
    matrix, rhs = (states.T @ states).float(), normal(10, width, 2).float()
    matrix.diagonal().mul_(1 + ridge)
    expected = psd.solve(matrix, rhs).x
    framed = torch.zeros(width + 1, width + 1)
    framed[:width, :width] = matrix
    x, rank = psd.solve(framed, torch.cat((rhs, torch.ones(1, 2))))
    assert rank == width
    assert torch.equal(x[width], torch.zeros(2))
    # The condition of the scaled matrix is at most (n + λ)/λ, and eps of float32 is 2⁻²³: 5e-3 in all.
    torch.testing.assert_close(x[:width], expected, rtol=0, atol=5e-3 * expected.abs().max().item())


def test_solve_of_zero_is_zero():
    x, rank = psd.solve(torch.zeros(3, 3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64))
    assert rank == 0
    assert torch.equal(x, torch.zeros(3, 2, dtype=torch.float64))


@properties
@given(seeds, st.integers(2, 6), st.sampled_from([1, 3, 36]))
def test_root_and_its_inverse_are_a_moore_penrose_pair(seed, width, n_tokens):
    # Coordinates of one scale: with fewer tokens than coordinates the smallest nonzero eigenvalue stays above 1e-9.
    x = normal(seed, n_tokens, width)
    matrix = torch.stack([x.T @ x, torch.eye(width, dtype=torch.float64)])
    root, inverse, rank = psd.root(matrix)
    assert rank.tolist() == [min(n_tokens, width), width]
    # Products are exact to n · eps of the largest eigenvalue (at most 100); R⁺ is up to 1e4, so R⁺R loses 1e4 · eps.
    torch.testing.assert_close(root.mT @ root, matrix, rtol=0, atol=1e-11)
    torch.testing.assert_close(root @ inverse @ root, root, rtol=0, atol=1e-9)
    projector = inverse @ root
    torch.testing.assert_close(projector, projector.mT, rtol=0, atol=1e-9)
    torch.testing.assert_close(projector.diagonal(dim1=-2, dim2=-1).sum(-1), rank.double(), rtol=0, atol=1e-9)


def test_root_of_zero_is_zero():
    root, inverse, rank = psd.root(torch.zeros(2, 3, 3, dtype=torch.float64))
    assert not root.any()
    assert not inverse.any()
    assert rank.tolist() == [0, 0]


@properties
@given(seeds, st.integers(1, 6))
def test_inverses_of_a_batch_are_those_of_its_matrices(seed, width):
    batch = torch.stack([moment(seed + place, 6 * width, width) for place in range(2)])
    torch.testing.assert_close(psd.inverse(batch), torch.linalg.inv(batch), **GAUSSIAN_TOLERANCE)
    assert torch.equal(psd.inverse(batch[None]), psd.inverse(batch)[None])


@properties
@given(seeds, st.integers(2, 6))
def test_where_one_of_a_batch_is_singular_all_are_pseudo_inverses(seed, width):
    batch = torch.stack([moment(seed, 6 * width, width), moment(seed, width - 1, width)])
    expected = torch.linalg.pinv(batch, hermitian=True)
    torch.testing.assert_close(psd.inverse(batch)[0], expected[0], **GAUSSIAN_TOLERANCE)
    # The nonzero eigenvalues of few tokens can be small: what is compared is the projection on them.
    torch.testing.assert_close((batch @ psd.inverse(batch))[1], (batch @ expected)[1], **GAUSSIAN_TOLERANCE)


def test_a_zero_matrix_has_a_zero_inverse():
    assert torch.equal(psd.inverse(torch.zeros(2, 3, 3, dtype=torch.float64)), torch.zeros(2, 3, 3).double())


@pytest.mark.parametrize(("n_rows", "n_tokens", "size"), [(64, 20, 1e3), (40, 10, 1e6)])
def test_a_moment_of_float32_products_of_few_large_states_has_a_factor(n_rows, n_tokens, size):
    """Its directions that no token takes are noise of 1e-7 of the diagonal, which no fixed shift reaches."""
    states = (normal(n_rows, n_tokens, n_rows) * size).float()
    moment = (states.T @ states).double()
    assert torch.linalg.eigvalsh(moment)[0] < 0
    found = psd.cholesky(moment, 1.0)
    assert 0 < found.jitter < 1e-4


def test_what_float32_products_do_not_know_is_no_direction():
    states = normal(1, 30, 50).float()
    moment, rhs = (states.T @ states).double(), normal(2, 50, 3)
    blind, aware = psd.solve(moment, rhs), psd.solve(moment, rhs, psd.KNOWN)
    exact = psd.solve(states.double().T @ states.double(), rhs)
    assert (exact.rank, aware.rank) == (30, 30)
    assert blind.rank > 30
    torch.testing.assert_close(aware.x, exact.x, rtol=1e-3, atol=1e-3 * exact.x.abs().max().item())
    assert blind.x.norm() > 100 * exact.x.norm()
