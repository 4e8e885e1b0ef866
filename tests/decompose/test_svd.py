import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float64
from oracles import (
    GAUSSIAN_TOLERANCE,
    ROUNDING,
    algorithm_3,
    algorithm_3_grouped,
    normal,
    properties,
    seeds,
    square_root,
    states,
)
from torch import Tensor

from modegpt.decompose import NotPositiveDefiniteError, joint_svd, value_eigenvectors

D_MODEL, D_HEAD, N_KV_HEADS, N_TOKENS = 10, 4, 2, 60
METHODS = [joint_svd, value_eigenvectors]
ranks = st.integers(1, D_HEAD)


def weights(seed, per_group=1):
    """`W_V` of each key-value head and the `W_O` of its query heads, `(n_kv_heads, per_group, d_head, d_model)`."""
    return normal(seed, N_KV_HEADS, D_MODEL, D_HEAD), normal(seed + 1, N_KV_HEADS, per_group, D_HEAD, D_MODEL)


def side_by_side(W_O):
    return W_O.transpose(1, 2).flatten(2)


def value_moment(x, W_V):
    """`G_V = W_Vᵀ C W_V` of each head."""
    return W_V.mT @ (x.T @ x) @ W_V


def problem(seed, n_tokens=N_TOKENS, m=7):
    """Values `v`, their moments and output blocks, without a model around them."""
    v = torch.stack([states(seed + h, n_tokens, D_HEAD) for h in range(N_KV_HEADS)])
    return v, v.mT @ v, normal(seed + 100, N_KV_HEADS, D_HEAD, m)


def measured_error(v, output, result):
    return ((v @ output - v @ result.basis @ result.output).norm() / (v @ output).norm()).item()


@properties
@given(seeds, ranks)
def test_joint_svd_equals_algorithm_3_as_printed(seed, rank):
    x, (W_V, W_O) = states(seed + 7, N_TOKENS, D_MODEL), weights(seed)
    result = joint_svd(value_moment(x, W_V), side_by_side(W_O), rank)
    assert isinstance(result.basis, Float64[Tensor, f"{N_KV_HEADS} {D_HEAD} {rank}"])
    assert isinstance(result.output, Float64[Tensor, f"{N_KV_HEADS} {rank} {D_MODEL}"])
    for head in range(N_KV_HEADS):
        new_V, new_O = algorithm_3(x, W_V[head], W_O[head, 0], rank)
        # The factors are free up to an invertible matrix between them; their product is not.
        product = W_V[head] @ result.basis[head] @ result.output[head]
        torch.testing.assert_close(product, new_V @ new_O, **GAUSSIAN_TOLERANCE)


@properties
@given(seeds, ranks)
def test_joint_svd_equals_algorithm_3_where_the_input_correlation_is_singular(seed, rank):
    # Fewer tokens than d_model, but not than d_head: C has no inverse, and products agree where tokens have been.
    x, (W_V, W_O) = normal(seed + 7, 8, D_MODEL), weights(seed)
    result = joint_svd(value_moment(x, W_V), side_by_side(W_O), rank)
    for head in range(N_KV_HEADS):
        new_V, new_O = algorithm_3(x, W_V[head], W_O[head, 0], rank)
        ours = x @ W_V[head] @ result.basis[head] @ result.output[head]
        # The oracle's root of C is exact to sqrt(eps · largest eigenvalue) = 1e-7 in its null directions; outputs
        # are of size 10.
        torch.testing.assert_close(ours, x @ new_V @ new_O, rtol=1e-6, atol=1e-6)


@properties
@given(seeds, ranks, st.integers(1, 3))
def test_joint_svd_discards_the_energy_of_the_smallest_singular_values(seed, rank, per_group):
    x, (W_V, W_O) = states(seed + 7, N_TOKENS, D_MODEL), weights(seed, per_group)
    result = joint_svd(value_moment(x, W_V), side_by_side(W_O), rank)
    # Theorem 3 on the d_model-sized matrix, a group's output blocks side by side: nothing of rank k does better.
    root = square_root(x.T @ x)
    values = torch.linalg.svdvals(root @ W_V @ side_by_side(W_O))
    discarded, total = values[:, rank:D_HEAD].square().sum(), values.square().sum()
    # The square of a relative error is exact to n · eps · total = 1e-14; at full rank that is all there is.
    assert result.error**2 == pytest.approx((discarded / total).item(), rel=1e-9, abs=1e-14)
    dense = x @ W_V @ side_by_side(W_O)
    lost = x @ W_V @ (side_by_side(W_O) - result.basis @ result.output)
    assert result.error == pytest.approx((lost.norm() / dense.norm()).item(), rel=1e-9, abs=1e-12)


@properties
@given(seeds, ranks, st.integers(1, 3))
def test_value_eigenvectors_equals_the_grouped_rule(seed, rank, per_group):
    x, (W_V, W_O) = states(seed + 7, N_TOKENS, D_MODEL), weights(seed, per_group)
    result = value_eigenvectors(value_moment(x, W_V), side_by_side(W_O), rank)
    outputs = result.output.unflatten(2, (per_group, D_MODEL)).transpose(1, 2)
    for group in range(N_KV_HEADS):
        new_V, new_O = algorithm_3_grouped(x, W_V[group], list(W_O[group]), rank)
        for head in range(per_group):
            product = W_V[group] @ result.basis[group] @ outputs[group, head]
            torch.testing.assert_close(product, new_V @ new_O[head], **GAUSSIAN_TOLERANCE)


@properties
@given(seeds, ranks)
def test_value_eigenvectors_error_is_measured_on_the_tokens_and_not_below_the_optimum(seed, rank):
    v, moment, output = problem(seed)
    result = value_eigenvectors(moment, output, rank)
    assert result.error == pytest.approx(measured_error(v, output, result), rel=1e-9, abs=1e-12)
    assert result.error >= joint_svd(moment, output, rank).error * (1 - 1e-9) - 1e-12  # both are rounding at full rank


@properties
@given(seeds, ranks)
def test_value_eigenvectors_discards_the_smallest_value_energy(seed, rank):
    # With an output projection that keeps lengths, the loss is that of the values themselves.
    _, moment, _ = problem(seed)
    turn = torch.linalg.qr(normal(seed + 3, N_KV_HEADS, D_HEAD, D_HEAD)).Q
    values = torch.linalg.eigvalsh(moment)
    expected = values[:, : D_HEAD - rank].sum() / values.sum()
    error = value_eigenvectors(moment, turn, rank).error
    assert error**2 == pytest.approx(expected.item(), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=seeds, n_tokens=st.sampled_from([1, 2, 3, N_TOKENS]))
def test_full_rank_is_exact_even_where_the_moment_is_singular(method, seed, n_tokens):
    _, moment, output = problem(seed, n_tokens)
    result = method(moment, output, D_HEAD)
    # R⁺R is formed from eigenvalues down to 1e-6 of the largest; it is the identity to 1e3 · eps and better than 1e-9.
    torch.testing.assert_close(result.basis @ result.output, output, **GAUSSIAN_TOLERANCE)
    assert result.error == pytest.approx(0, abs=1e-9)
    assert result.deficiency == N_KV_HEADS * max(0, D_HEAD - n_tokens)


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=seeds, rank=ranks, n_tokens=st.sampled_from([0, 2, N_TOKENS]))
def test_the_basis_is_orthonormal_and_its_signs_are_fixed(method, seed, rank, n_tokens):
    _, moment, output = problem(seed, n_tokens)
    basis = method(moment, output, rank).basis
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank, dtype=torch.float64).expand(2, -1, -1), **ROUNDING)
    assert bool((basis.gather(-2, basis.abs().argmax(-2, keepdim=True)) > 0).all())


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=seeds, rank=ranks)
def test_turning_the_values_turns_the_basis_only(method, seed, rank):
    _, moment, output = problem(seed)
    turn = torch.linalg.qr(normal(seed + 4, N_KV_HEADS, D_HEAD, D_HEAD)).Q
    order = torch.randperm(D_HEAD, generator=torch.Generator().manual_seed(seed))
    plain = method(moment, output, rank)
    turned = method(turn @ moment @ turn.mT, turn @ output, rank)
    torch.testing.assert_close(turned.basis @ turned.output, turn @ plain.basis @ plain.output, **GAUSSIAN_TOLERANCE)
    permuted = method(moment[:, order][..., order], output[:, order], rank)
    product = (plain.basis @ plain.output)[:, order]
    torch.testing.assert_close(permuted.basis @ permuted.output, product, **GAUSSIAN_TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_heads_do_not_touch_each_other(method):
    _, moment, output = problem(5)
    both = method(moment, output, 2)
    swapped = method(moment.flip(0), output.flip(0), 2)
    for head in range(N_KV_HEADS):
        alone = method(moment[head : head + 1], output[head : head + 1], 2)
        expected = alone.basis[0] @ alone.output[0]
        # A batched product may sum in another order: a few eps of size one.
        torch.testing.assert_close(both.basis[head] @ both.output[head], expected, **ROUNDING)
        torch.testing.assert_close(swapped.basis[1 - head] @ swapped.output[1 - head], expected, **ROUNDING)


@pytest.mark.parametrize("method", METHODS)
def test_the_bias_is_compressed_with_the_values(method):
    # Values x W_V + b in the moment, and the bias through the same basis: the error is that of the whole output.
    x, (W_V, W_O) = states(6, N_TOKENS, D_MODEL), weights(7)
    bias = 5 * normal(8, N_KV_HEADS, 1, D_HEAD)
    v, output = x @ W_V + bias, side_by_side(W_O)
    result = method(v.mT @ v, output, 2)
    compressed = (x @ (W_V @ result.basis) + bias @ result.basis) @ result.output
    measured = (v @ output - compressed).norm() / (v @ output).norm()
    assert result.error == pytest.approx(measured.item(), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_tokens", [2, N_TOKENS])
def test_inputs_are_not_mutated(method, n_tokens):
    _, moment, output = problem(9, n_tokens)
    before = moment.clone(), output.clone()
    method(moment, output, 3)
    assert torch.equal(moment, before[0])
    assert torch.equal(output, before[1])


@pytest.mark.parametrize("method", METHODS)
@properties
@given(seed=seeds, rank=ranks, n_tokens=st.sampled_from([1, 2, 3]))
def test_rank_deficient_values(method, seed, rank, n_tokens):
    v, moment, output = problem(seed, n_tokens)
    result = method(moment, output, rank)
    assert result.deficiency == N_KV_HEADS * (D_HEAD - n_tokens)
    # Weights stay of the size of the dense ones: nothing is divided by a vanishing eigenvalue. R⁺ U_k Σ_k V_kᵀ can
    # exceed W_O by the skew of the projection only, at most the root of the moment's condition (1e3 where not zero).
    assert result.output.abs().max() < 1e3 * output.abs().max()
    measured = measured_error(v, output, result)
    # Both are exact to sqrt(n · eps): the error is a root.
    assert result.error == pytest.approx(measured, abs=1e-7)
    if rank >= n_tokens:
        assert measured == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_duplicate_coordinate_costs_nothing(method):
    v, _, output = problem(10)
    v[..., 2] = v[..., 1]
    result = method(v.mT @ v, output, 3)
    assert measured_error(v, output, result) == pytest.approx(0, abs=1e-7)  # root of eps
    assert result.deficiency == N_KV_HEADS


@pytest.mark.parametrize("method", METHODS)
def test_a_dead_coordinate_costs_nothing(method):
    v, _, output = problem(11)
    v[..., 0] = 0
    result = method(v.mT @ v, output, 3)
    assert measured_error(v, output, result) == pytest.approx(0, abs=1e-7)  # root of eps
    torch.testing.assert_close(result.basis[:, 0], torch.zeros(2, 3, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_values_that_are_all_zero(method):
    _, moment, output = problem(12)
    result = method(torch.zeros_like(moment), output, 3)
    assert (result.error, result.deficiency) == (0.0, N_KV_HEADS * D_HEAD)
    # Nothing is known of the values, so the output projection is only projected, not erased.
    torch.testing.assert_close(result.output, result.basis.mT @ output, **ROUNDING)


@pytest.mark.parametrize("method", METHODS)
def test_an_output_that_is_zero(method):
    _, moment, output = problem(13)
    result = method(moment, torch.zeros_like(output), 2)
    assert not result.output.any()
    assert result.error == 0


@properties
@given(seeds, ranks, st.sampled_from([1, 2]), st.sampled_from([2, 3, N_TOKENS]))
def test_joint_svd_with_fewer_output_columns_than_rank(seed, rank, m, n_tokens):
    v, moment, output = problem(seed, n_tokens, m)
    result = joint_svd(moment, output, rank)
    values = torch.linalg.svdvals(v @ output)
    expected = (values[:, rank:].square().sum() / values.square().sum()).sqrt()
    assert measured_error(v, output, result) == pytest.approx(expected.item(), abs=1e-7)  # root of eps
    assert result.error == pytest.approx(expected.item(), abs=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(method, which, bad):
    _, *inputs = problem(14)
    inputs[which][1, 2, 2] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        method(*inputs, 2)
