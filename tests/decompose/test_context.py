import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float64
from oracles import GAUSSIAN_TOLERANCE, ROUNDING, normal, properties, seeds, states
from torch import Tensor

from modegpt.decompose import NotPositiveDefiniteError, joint_svd, value_eigenvectors
from modegpt.decompose.context import alternate, context_svd
from modegpt.decompose.svd import joint_basis

D_MODEL, D_HEAD, N_HEADS, N_TOKENS = 9, 4, 4, 120
WIDTH = N_HEADS * D_HEAD
ranks = st.integers(1, D_HEAD)
key_heads = st.sampled_from([1, 2, 4])
GROUPED = [1, 2]


def problem(seed, n_tokens=N_TOKENS):
    """Contexts of all heads, correlated with each other, their moment and an output projection."""
    u = states(seed, n_tokens, WIDTH) @ (torch.eye(WIDTH, dtype=torch.float64) + 0.3 * normal(seed + 1, WIDTH, WIDTH))
    return u, u.T @ u, normal(seed + 2, D_MODEL, WIDTH)


def by_head(u, output, n_kv_heads):
    """Contexts `(n_kv_heads, per_group, n_tokens, d_head)` and output blocks `(…, d_head, d_model)`."""
    heads = u.reshape(len(u), n_kv_heads, -1, D_HEAD).permute(1, 2, 0, 3)
    return heads, output.T.reshape(n_kv_heads, -1, D_HEAD, D_MODEL)


def widen(basis):
    return torch.block_diag(*basis.repeat_interleave(N_HEADS // len(basis), dim=0))


def objective(u, output, basis):
    """`Σ_h min_Y ‖U_h W_h − U_h B Y‖²` of each group, by explicit least squares."""
    heads, blocks = by_head(u, output, len(basis))
    read = heads @ basis[:, None]
    target = heads @ blocks
    return (target - read @ torch.linalg.lstsq(read, target).solution).square().sum((1, 2, 3))


def alternation(u, output, n_kv_heads, rank, rounds):
    heads, blocks = by_head(u, output, n_kv_heads)
    metrics = heads.mT @ heads
    start = joint_svd(metrics.sum(1), blocks.transpose(1, 2).flatten(2), rank).basis
    basis, history = alternate(metrics, blocks @ blocks.mT, start, rounds)
    return start, basis, torch.stack(history)


@properties
@given(seeds, st.integers(1, D_HEAD - 1), key_heads)
def test_the_objective_never_rises_and_is_what_it_says(seed, rank, n_kv_heads):
    u, _, output = problem(seed)
    start, basis, history = alternation(u, output, n_kv_heads, rank, rounds=5)
    total = (u @ output.T).square().sum()
    # Differences of traces: n · eps · cond is 1e-11 of their size.
    assert bool((history.diff(dim=0) <= 1e-10 * total).all())
    close = {"rtol": 1e-8, "atol": 1e-10 * total.item()}
    torch.testing.assert_close(history[0], objective(u, output, start), **close)
    torch.testing.assert_close(history[-1], objective(u, output, basis), **close)


@pytest.mark.parametrize("n_kv_heads", GROUPED)
@pytest.mark.parametrize("seed", range(4))
def test_a_group_ends_below_the_stacked_optimum_and_the_papers_rule(seed, n_kv_heads):
    u, _, output = problem(seed)
    start, basis, _ = alternation(u, output, n_kv_heads, 2, rounds=6)
    heads, blocks = by_head(u, output, n_kv_heads)
    papers = value_eigenvectors((heads.mT @ heads).sum(1), blocks.transpose(1, 2).flatten(2), 2).basis
    ours, stacked, rule = (objective(u, output, each).sum() for each in (basis, start, papers))
    assert ours < 0.995 * stacked
    assert ours < 0.9 * rule


@pytest.mark.parametrize("seed", range(4))
def test_few_rounds_go_most_of_the_way_where_outputs_are_of_many_sizes(seed):
    u, _, output = problem(seed)
    output = output @ torch.diag(torch.logspace(0, 2, D_HEAD, dtype=torch.float64).repeat(N_HEADS))
    few, many = (alternation(u, output, 1, 2, rounds)[2] for rounds in (4, 300))
    # What is left of the way is 0.004 at most; steps that do not divide by the mean of the outputs' Gram leave 0.03.
    assert few[-1] - many[-1] < 0.01 * (few[0] - many[-1])


@pytest.mark.parametrize("seed", range(2))
def test_many_rounds_end_where_no_basis_nearby_is_better(seed):
    u, _, output = problem(seed)
    _, basis, history = alternation(u, output, 1, 2, rounds=300)
    # Converged: the last round moved the loss by less than rounding can.
    assert (history[-2] - history[-1]).item() <= 1e-9 * history[0].item()
    for step in normal(seed + 9, 20, 1, D_HEAD, 2) * 1e-3:
        assert objective(u, output, basis + step) >= history[-1] * (1 - 1e-9)


@properties
@given(seeds, st.integers(1, D_HEAD - 1))
def test_with_one_query_head_a_key_head_the_basis_is_the_joint_svd(seed, rank):
    u, moment, output = problem(seed)
    heads, blocks = by_head(u, output, N_HEADS)
    expected = joint_svd((heads.mT @ heads).sum(1), blocks.flatten(1, 2), rank).basis
    torch.testing.assert_close(context_svd(moment, output, N_HEADS, N_HEADS, rank).basis, expected, **ROUNDING)
    # It is optimal already: alternating leads nowhere else.
    _, basis, _ = alternation(u, output, N_HEADS, rank, rounds=3)
    space, other = (each @ each.mT for each in (expected, basis))
    torch.testing.assert_close(other, space, rtol=0, atol=1e-9)


@properties
@given(seeds, ranks, key_heads)
def test_the_output_is_the_least_squares_fit_of_all_heads_together(seed, rank, n_kv_heads):
    u, moment, output = problem(seed)
    result = context_svd(moment, output, N_HEADS, n_kv_heads, rank)
    assert isinstance(result.basis, Float64[Tensor, f"{n_kv_heads} {D_HEAD} {rank}"])
    assert isinstance(result.output, Float64[Tensor, f"{D_MODEL} {N_HEADS * rank}"])
    read = u @ widen(result.basis)
    fit = torch.linalg.lstsq(read, u @ output.T).solution
    # Mixed contexts have a condition number up to 1e6, squared in the moment: 1e-16 · 1e6 and room for 1e2.
    torch.testing.assert_close(result.output.T, fit, rtol=1e-7, atol=1e-7)
    measured = (u @ output.T - read @ fit).norm() / (u @ output.T).norm()
    assert result.error == pytest.approx(measured.item(), rel=1e-7, abs=1e-7)
    assert result.deficiency == 0
    # Heads make up for each other: no worse than each head's own fit to its own part.
    heads, blocks = by_head(u, output, n_kv_heads)
    own = torch.linalg.lstsq(heads @ result.basis[:, None], heads @ blocks).solution.reshape(-1, D_MODEL)
    alone = (u @ output.T - read @ own).norm() / (u @ output.T).norm()
    assert result.error <= alone.item() * (1 + 1e-7) + 1e-7


def test_a_head_takes_over_what_an_equal_head_loses():
    u, _, output = problem(3)
    u[:, D_HEAD : 2 * D_HEAD] = u[:, :D_HEAD]
    output[:, 2 * D_HEAD :] = 0
    # Two equal heads with two dims of four each, and different bases: together they hold all four.
    result = context_svd(u.T @ u, output, N_HEADS, N_HEADS, 2)
    assert result.error == pytest.approx(0, abs=1e-6)  # root of eps · cond


@properties
@given(seeds, st.integers(1, D_HEAD - 1), key_heads, st.sampled_from([0.01, 0.1, 1.0]))
def test_a_ridge_pulls_to_the_projected_weights(seed, rank, n_kv_heads, ridge):
    u, moment, output = problem(seed)
    plain, result = (context_svd(moment, output, N_HEADS, n_kv_heads, rank, each) for each in (0.0, ridge))
    assert torch.equal(result.basis, plain.basis)
    wide = widen(result.basis)
    kept = wide.T @ moment @ wide
    projected = wide.T @ output.T
    damped = kept + ridge * kept.diagonal().diag()
    expected = projected + torch.linalg.inv(damped) @ wide.T @ moment @ (output.T - wide @ projected)
    torch.testing.assert_close(result.output.T, expected, rtol=1e-7, atol=1e-7)  # as for the plain fit
    measured = (u @ output.T - u @ wide @ result.output.T).norm() / (u @ output.T).norm()
    assert result.error == pytest.approx(measured.item(), rel=1e-7, abs=1e-7)
    assert result.error >= plain.error - 1e-7
    far = context_svd(moment, output, N_HEADS, n_kv_heads, rank, 1e12)
    torch.testing.assert_close(far.output.T, projected, rtol=0, atol=1e-9)  # a quotient of moments over the ridge


@pytest.mark.parametrize("n_tokens", [0, 3, N_TOKENS])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_full_rank_is_exact_even_where_the_moment_is_singular(n_kv_heads, n_tokens):
    _, moment, output = problem(4, n_tokens)
    result = context_svd(moment, output, N_HEADS, n_kv_heads, D_HEAD)
    torch.testing.assert_close(widen(result.basis) @ result.output.T, output.T, **GAUSSIAN_TOLERANCE)
    assert result.error == pytest.approx(0, abs=1e-9)
    assert result.deficiency == WIDTH - min(n_tokens, WIDTH)


@properties
@given(seeds, ranks, key_heads, st.sampled_from([3, 7]), st.sampled_from([0.0, 0.1]))
def test_fewer_tokens_than_dims(seed, rank, n_kv_heads, n_tokens, ridge):
    u, moment, output = problem(seed, n_tokens)
    result = context_svd(moment, output, N_HEADS, n_kv_heads, rank, ridge)
    dense = u @ output.T
    measured = ((dense - u @ widen(result.basis) @ result.output.T).norm() / dense.norm()).item()
    assert result.error == pytest.approx(measured, abs=1e-5)  # root of eps times a condition of 1e6
    if not ridge:
        assert result.deficiency == max(0, N_HEADS * rank - n_tokens)
        if n_tokens <= N_HEADS * rank:
            assert measured == pytest.approx(0, abs=1e-5)


@properties
@given(seeds, ranks, key_heads)
def test_the_basis_is_orthonormal_and_its_signs_are_fixed(seed, rank, n_kv_heads):
    _, moment, output = problem(seed)
    basis = context_svd(moment, output, N_HEADS, n_kv_heads, rank).basis
    eye = torch.eye(rank, dtype=torch.float64).expand(n_kv_heads, -1, -1)
    torch.testing.assert_close(basis.mT @ basis, eye, **ROUNDING)
    assert bool((basis.gather(-2, basis.abs().argmax(-2, keepdim=True)) > 0).all())


def test_contexts_or_weights_that_are_all_zero():
    _, moment, output = problem(5)
    silent = context_svd(torch.zeros_like(moment), output, N_HEADS, 2, 3)
    assert (silent.error, silent.deficiency) == (0.0, N_HEADS * 3)
    torch.testing.assert_close(silent.output.T, widen(silent.basis).T @ output.T, **ROUNDING)
    unread = context_svd(moment, torch.zeros_like(output), N_HEADS, 2, 3)
    assert not unread.output.any()
    assert unread.error == 0


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_a_direction_that_only_rounding_filled_wins_nothing(seed):
    """Values of rank 3 of 32, four query heads each for two key-value heads; the second has values of full rank."""
    n_tokens, d_head, n_heads = 400, 32, 8
    flat = normal(seed, n_tokens, 3) * torch.tensor([1, 1e-2, 1e-4]) @ normal(seed + 1, 3, d_head)
    full = normal(seed + 2, n_tokens, d_head)
    order = [torch.randperm(n_tokens, generator=torch.Generator().manual_seed(head)) for head in range(n_heads)]
    mixed = [0.6 * values + 0.4 * values[order[head]] for head, values in enumerate([flat] * 4 + [full] * 4)]
    u = torch.cat(mixed, dim=1).float()
    moment, u, output = (u.T @ u).double(), u.double(), normal(seed + 3, 24, n_heads * d_head)
    result = context_svd(moment, output, n_heads, 2, 1, ridge=0.1)
    wide = torch.block_diag(*result.basis.repeat_interleave(4, dim=0))
    measured = (u @ output.T - u @ wide @ result.output.T).norm() / (u @ output.T).norm()
    # What the moment says is true of the tokens, too, but for the rounding of its products, 1e-7 of a head's energy.
    assert result.error == pytest.approx(measured.item(), rel=1e-5)
    assert result.output.abs().max() < 3 * output.abs().max()  # noise asks for weights in the thousands
    blocks = output.T.reshape(2, 4, d_head, -1)
    metrics = torch.stack([moment[i : i + d_head, i : i + d_head] for i in range(0, len(moment), d_head)])
    metrics = metrics.reshape(2, 4, d_head, d_head)
    start = joint_basis(metrics.sum(1), (blocks @ blocks.mT).sum(1), 1)
    alternated, _ = alternate(metrics, blocks @ blocks.mT, start)
    torch.testing.assert_close(result.basis, torch.stack((start[0], alternated[1])), **ROUNDING)
    assert (alternated - start).abs().amax((1, 2)).min() > 1e-2  # each would go elsewhere


@pytest.mark.parametrize("dead", [0, 3])
def test_a_dead_head_changes_nothing_for_the_others(dead):
    u, _, output = problem(6)
    u[:, dead * D_HEAD : (dead + 1) * D_HEAD] = 0
    result = context_svd(u.T @ u, output, N_HEADS, 2, 2)
    assert bool(torch.isfinite(result.output).all())
    assert result.deficiency == 2
    measured = (u @ output.T - u @ widen(result.basis) @ result.output.T).norm() / (u @ output.T).norm()
    assert result.error == pytest.approx(measured.item(), rel=1e-7)


def test_inputs_are_not_mutated():
    _, moment, output = problem(7)
    before = moment.clone(), output.clone()
    for rank in (1, 3, D_HEAD):
        context_svd(moment, output, N_HEADS, 2, rank, 0.1)
    assert torch.equal(moment, before[0])
    assert torch.equal(output, before[1])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(which, bad):
    _, *inputs = problem(8)
    inputs[which][1, 2] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        context_svd(*inputs, N_HEADS, 2, 2)
