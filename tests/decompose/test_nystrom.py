import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float64, Int64
from oracles import ERROR_FLOOR, GAUSSIAN_TOLERANCE, ROUNDING, algorithm_1, normal, properties, seeds, states
from torch import Tensor

from modegpt.decompose import NotPositiveDefiniteError, nystrom, ridge_leverage_scores
from modegpt.decompose.nystrom import damped_loss, refit, refit_weight

D_INT, D_MODEL = 8, 5
ranks = st.integers(1, D_INT)


def problem(seed, n_tokens=6 * D_INT):
    z = states(seed, n_tokens, D_INT)
    return z, z.T @ z, normal(seed + 1, D_MODEL, D_INT)


def measured_error(z, down, result):
    dense = z @ down.T
    return ((dense - z[:, result.kept] @ result.weight.T).norm() / dense.norm()).item()


def chosen(seed, rank):
    return torch.randperm(D_INT, generator=torch.Generator().manual_seed(seed))[:rank].sort().values


@properties
@given(seeds, ranks, st.sampled_from([0.1, 1.0, 100.0]))
def test_equals_algorithm_1_as_printed(seed, rank, ridge):
    _, moment, down = problem(seed)
    result = nystrom(moment, down, rank, ridge)
    S, W_D = algorithm_1(moment, down.T, rank, ridge)
    assert isinstance(result.kept, Int64[Tensor, f"{rank}"])
    assert isinstance(result.weight, Float64[Tensor, f"{D_MODEL} {rank}"])
    assert torch.equal(result.kept, S.argmax(0))
    torch.testing.assert_close(result.weight.T, W_D, **GAUSSIAN_TOLERANCE)


@properties
@given(seeds, st.sampled_from([0.1, 1.0, 100.0]))
def test_leverage_scores_equal_the_explicit_inverse(seed, ridge):
    _, moment, _ = problem(seed)
    expected = (moment @ torch.linalg.inv(moment + ridge * torch.eye(D_INT, dtype=torch.float64))).diagonal()
    scores = ridge_leverage_scores(moment, ridge)
    torch.testing.assert_close(scores, expected, **GAUSSIAN_TOLERANCE)
    assert bool(((scores >= 0) & (scores < 1)).all())


def test_the_default_ridge_is_the_papers():
    _, moment, down = problem(0)
    assert torch.equal(ridge_leverage_scores(moment), ridge_leverage_scores(moment, 1.0))
    assert torch.equal(nystrom(moment / 100, down, 3).kept, nystrom(moment / 100, down, 3, ridge=1.0).kept)


@properties
@given(seeds, ranks)
def test_refit_equals_lstsq_on_the_kept_columns(seed, rank):
    z, moment, down = problem(seed)
    kept = chosen(seed, rank)
    weight, error, deficiency = refit(moment, down, kept)
    fit = torch.linalg.lstsq(z[:, kept], z @ down.T)
    assert deficiency == 0
    torch.testing.assert_close(weight.T, fit.solution, **GAUSSIAN_TOLERANCE)
    left = (z @ down.T - z[:, kept] @ fit.solution).norm() / (z @ down.T).norm()
    assert error == pytest.approx(left.item(), rel=1e-9, abs=ERROR_FLOOR)


@properties
@given(seeds, st.integers(1, D_INT - 1), st.sampled_from([0.01, 0.3, 10.0]))
def test_a_ridge_is_relative_to_each_neuron_and_pulls_to_the_original_weights(seed, rank, ridge):
    z, moment, down = problem(seed)
    kept = chosen(seed, rank)
    weight, error, deficiency = refit(moment, down, kept, ridge)
    lost = torch.tensor([i for i in range(D_INT) if i not in kept.tolist()])
    inner = moment[kept][:, kept]
    correction = torch.linalg.inv(inner + ridge * inner.diagonal().diag()) @ moment[kept][:, lost] @ down[:, lost].T
    torch.testing.assert_close(weight, down[:, kept] + correction.T, **GAUSSIAN_TOLERANCE)
    assert deficiency == 0
    left = (z @ down.T - z[:, kept] @ weight.T).norm() / (z @ down.T).norm()
    assert error == pytest.approx(left.item(), rel=1e-9, abs=ERROR_FLOOR)
    assert error >= refit(moment, down, kept)[1] * (1 - 1e-9)  # no ridge, no smaller error: to rounding
    assert torch.equal(refit_weight(moment, down, kept, ridge), weight)
    every = torch.arange(D_INT)
    assert torch.equal(refit_weight(moment, down, every, ridge), down)


@properties
@given(seeds, ranks, st.sampled_from([0.03, 1.0]))
def test_the_damped_loss_is_what_the_refit_leaves_and_what_holds_it_back(seed, rank, ridge):
    z, moment, down = problem(seed)
    kept = chosen(seed, rank)
    weight, _error, _deficiency = refit(moment, down, kept, ridge)
    left = z @ down.mT - z[:, kept] @ weight.mT
    held_back = moment.diagonal()[kept] * (weight - down[:, kept]).square().sum(0)
    expected = left.square().sum() + ridge * held_back.sum()
    torch.testing.assert_close(damped_loss(moment, down, kept, ridge), expected, **ROUNDING)


def test_nothing_dropped_loses_nothing():
    _, moment, down = problem(0)
    assert damped_loss(moment, down, torch.arange(D_INT), 0.3) == 0


def test_a_large_ridge_only_drops():
    _, moment, down = problem(12)
    kept = chosen(12, 5)
    weight, _, _ = refit(moment, down, kept, ridge=1e12)
    # The correction is a quotient of moments, near one, over the ridge.
    torch.testing.assert_close(weight, down[:, kept], rtol=0, atol=1e-11)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_a_refit_leaves_its_inputs_alone(ridge):
    _, moment, down = problem(13)
    before = moment.clone(), down.clone()
    refit(moment, down, chosen(13, 5), ridge)
    assert torch.equal(moment, before[0])
    assert torch.equal(down, before[1])


@properties
@given(seeds, st.integers(1, D_INT - 1))
def test_error_squared_is_the_discarded_energy(seed, rank):
    z, moment, down = problem(seed)
    result = nystrom(moment, down, rank)
    # What the dropped neurons add beyond the span of the kept ones: the Schur complement of C_SS.
    kept = result.kept
    dropped = torch.tensor([i for i in range(D_INT) if i not in kept.tolist()])
    cross = moment[dropped][:, kept]
    schur = moment[dropped][:, dropped] - cross @ torch.linalg.pinv(moment[kept][:, kept]) @ cross.T
    discarded = torch.trace(down[:, dropped] @ schur @ down[:, dropped].T)
    total = torch.trace(down @ moment @ down.T)
    assert discarded > 0
    assert result.error**2 == pytest.approx((discarded / total).item(), rel=1e-9)
    assert result.error == pytest.approx(measured_error(z, down, result), rel=1e-9)


@properties
@given(seeds, ranks)
def test_error_obeys_the_bound_of_theorem_1(seed, rank):
    z, moment, down = problem(seed)
    result = nystrom(moment, down, rank)
    S = torch.eye(D_INT, dtype=torch.float64)[:, result.kept]
    nys = (moment - moment @ S @ torch.linalg.pinv(S.T @ moment @ S) @ S.T @ moment).norm()
    spectral = torch.linalg.matrix_norm(down, 2)
    bound = spectral**2 * torch.linalg.matrix_norm(torch.linalg.inv(moment), 2) * nys**2
    # At full rank both sides are rounding error, hence the floor.
    assert (result.error * (z @ down.T).norm().item()) ** 2 <= bound.item() * (1 + 1e-9) + ERROR_FLOOR**2


@pytest.mark.parametrize("n_tokens", [3, 6 * D_INT])
def test_full_rank_returns_the_weights_to_the_bit(n_tokens):
    _, moment, down = problem(1, n_tokens)
    result = nystrom(moment, down, D_INT)
    assert result.kept.tolist() == list(range(D_INT))
    assert torch.equal(result.weight, down)
    assert result.weight.data_ptr() != down.data_ptr()
    assert result.error == 0


@properties
@given(seeds, ranks)
def test_permuting_neurons_permutes_the_choice(seed, rank):
    _, moment, down = problem(seed)
    order = torch.randperm(D_INT, generator=torch.Generator().manual_seed(seed + 2))
    plain = nystrom(moment, down, rank)
    permuted = nystrom(moment[order][:, order], down[:, order], rank)
    original = order[permuted.kept]
    assert torch.equal(original.sort().values, plain.kept)
    torch.testing.assert_close(permuted.weight[:, original.argsort()], plain.weight, **GAUSSIAN_TOLERANCE)
    assert permuted.error == pytest.approx(plain.error, rel=1e-9, abs=ERROR_FLOOR)


def test_turning_the_output_turns_the_weights():
    _, moment, down = problem(2)
    turn = torch.linalg.qr(normal(9, D_MODEL, D_MODEL)).Q
    plain, turned = nystrom(moment, down, 4), nystrom(moment, turn @ down, 4)
    assert torch.equal(turned.kept, plain.kept)
    torch.testing.assert_close(turned.weight, turn @ plain.weight, **ROUNDING)


@pytest.mark.parametrize("n_tokens", [3, 48])
def test_inputs_are_not_mutated(n_tokens):
    _, moment, down = problem(3, n_tokens)
    before = moment.clone(), down.clone()
    for rank in (1, 4, D_INT):
        nystrom(moment, down, rank)
    assert torch.equal(moment, before[0])
    assert torch.equal(down, before[1])


def test_selection_sees_differences_that_round_away_in_the_scores():
    # Every score 1 - 1/(C_ii + 1) rounds to exactly 1 in float64; the complements still differ.
    moment = torch.diag(torch.tensor([2e17, 4e17, 1e17, 3e17], dtype=torch.float64))
    assert bool((ridge_leverage_scores(moment) == 1).all())
    assert nystrom(moment, torch.ones(2, 4, dtype=torch.float64), 2).kept.tolist() == [1, 3]


def test_dead_neurons_go_first_and_ties_to_the_lower_index():
    z, _, down = problem(4)
    z[:, [1, 5]] = 0
    moment = z.T @ z
    alive = nystrom(moment, down, 6)
    assert alive.kept.tolist() == [0, 2, 3, 4, 6, 7]
    assert alive.error == pytest.approx(0, abs=ERROR_FLOOR)
    torch.testing.assert_close(alive.weight, down[:, alive.kept], **ROUNDING)
    one_dead = nystrom(moment, down, 7)
    assert one_dead.kept.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert one_dead.deficiency == 1
    torch.testing.assert_close(one_dead.weight, down[:, one_dead.kept], **ROUNDING)


def test_all_neurons_dead():
    _, _, down = problem(5)
    result = nystrom(torch.zeros(D_INT, D_INT, dtype=torch.float64), down, 3)
    assert result.kept.tolist() == [0, 1, 2]
    assert torch.equal(result.weight, down[:, :3])
    assert (result.error, result.deficiency) == (0.0, 3)


def test_zero_weights_are_no_error():
    _, moment, down = problem(5)
    result = nystrom(moment, torch.zeros_like(down), 3)
    assert not result.weight.any()
    assert result.error == 0


@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_the_survivor_of_a_duplicate_takes_over_its_weight(factor):
    z, _, down = problem(6)
    z[:, 6] = factor * z[:, 2]
    kept = torch.tensor([0, 1, 2, 3, 4, 5, 7])
    weight, error, deficiency = refit(z.T @ z, down, kept)
    expected = down.clone()
    expected[:, 2] += factor * down[:, 6]
    torch.testing.assert_close(weight, expected[:, kept], **GAUSSIAN_TOLERANCE)
    assert error == pytest.approx(0, abs=ERROR_FLOOR)
    assert deficiency == 0


def test_duplicates_that_both_stay_share_the_load():
    z, _, down = problem(7)
    z[:, 6] = z[:, 2]
    kept = torch.tensor([0, 2, 4, 6])
    weight, error, deficiency = refit(z.T @ z, down, kept)
    assert deficiency == 1
    torch.testing.assert_close(weight[:, 1] - down[:, 2], weight[:, 3] - down[:, 6], **GAUSSIAN_TOLERANCE)
    best = torch.linalg.lstsq(z[:, kept], z @ down.T, driver="gelsd").solution
    torch.testing.assert_close(z[:, kept] @ weight.T, z[:, kept] @ best, rtol=1e-9, atol=1e-8)  # outputs are near 10
    assert error > 0.1


@properties
@given(seeds)
def test_float32s_rounding_of_a_moment_does_not_tell_duplicates_apart(seed):
    z, _, down = problem(seed)
    z[:, 6] = 3 * z[:, 2]  # 3 is no power of two: the products of the one are rounded otherwise than those of the other
    kept, moment = torch.tensor([0, 2, 4, 6]), z.T @ z
    weight, _error, deficiency = refit(moment.float().double(), down, kept)
    assert deficiency == 1
    # 6e-8 of each product, times the condition number of what is left, below 100. Solved for, what the rounding says
    # of the two would move weights by their own size.
    torch.testing.assert_close(weight, refit(moment, down, kept)[0], rtol=0, atol=1e-5)


@properties
@given(seeds, st.integers(1, D_INT - 1), st.integers(1, D_INT - 1))
def test_fewer_tokens_than_neurons(seed, rank, n_tokens):
    z, moment, down = problem(seed, n_tokens)
    result = nystrom(moment, down, rank)
    best = torch.linalg.lstsq(z[:, result.kept], z @ down.T, driver="gelsd").solution
    left = ((z @ down.T - z[:, result.kept] @ best).norm() / (z @ down.T).norm()).item()
    # A nearly square Gaussian matrix may square to a condition of 1e8: weights lose eps · 1e8, and so do outputs.
    assert result.error == pytest.approx(left, abs=1e-5)
    assert measured_error(z, down, result) == pytest.approx(left, abs=1e-5)
    assert result.deficiency == max(0, rank - n_tokens)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["moment", "down"])
@pytest.mark.parametrize("rank", [3, D_INT])
def test_what_is_not_finite_is_refused(which, bad, rank):
    _, moment, down = problem(8)
    (moment if which == "moment" else down)[1, 1] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        nystrom(moment, down, rank)


def test_an_indefinite_moment_is_refused():
    _, moment, down = problem(9)
    with pytest.raises(NotPositiveDefiniteError, match="negative direction"):
        nystrom(moment - 20 * torch.eye(D_INT, dtype=torch.float64), down, 3)


def test_jitter_is_reported():
    _, moment, down = problem(10)
    assert nystrom(moment, down, 3).jitter == 0
    # A rank-one moment so large that the ridge of 1 is lost in rounding beside it.
    row = normal(11, 1, D_INT) * 1e12
    result = nystrom(row.T @ row, down, 3)
    assert 0 < result.jitter < 1e-12  # two or three tenfold steps above n·eps = 1.8e-15 at most
    assert result.deficiency == 2
    assert bool(torch.isfinite(result.weight).all())
