import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ERROR_FLOOR, GAUSSIAN_TOLERANCE, ROUNDING, normal, properties, seeds, states
from selections import assert_highest_are_kept_and_refitted

from modegpt.decompose import NotPositiveDefiniteError
from modegpt.decompose.energy import energy_scores
from modegpt.decompose.nystrom import NystromResult, highest, keep_highest, ridge_leverage_scores
from modegpt.decompose.saliency import saliencies

D_INT, D_MODEL = 8, 5
ranks = st.integers(1, D_INT)
ridges = st.sampled_from([0.03, 0.3, 1.0])


def problem(seed):
    # Neurons that tell the same in part, so that the others can make up for one.
    mixed = states(seed, 6 * D_INT, D_INT) @ (torch.eye(D_INT) + 0.5 * normal(seed + 2, D_INT, D_INT))
    return mixed, mixed.T @ mixed, normal(seed + 1, D_MODEL, D_INT)


def saliency(moment, down, rank, ridge, refit_ridge) -> NystromResult:
    return keep_highest(moment, down, saliencies(moment, down, ridge), rank, refit_ridge)


@properties
@given(seeds, ridges)
def test_a_saliency_is_the_damped_loss_of_the_best_refit_without_the_neuron(seed, ridge):
    z, moment, down = problem(seed)
    # The ridge as more tokens: one for each neuron, on which it alone is active. Then plain least squares.
    tokens = torch.cat((z, (ridge * moment.diagonal()).sqrt().diag()))
    lost = []
    for i in range(D_INT):
        kept = [j for j in range(D_INT) if j != i]
        x = torch.linalg.lstsq(tokens[:, kept], tokens @ down.T).solution
        lost.append((tokens[:, kept] @ x - tokens @ down.T).square().sum())
    torch.testing.assert_close(saliencies(moment, down, ridge), torch.stack(lost), **GAUSSIAN_TOLERANCE)


@properties
@given(seeds)
def test_between_energy_and_leverage(seed):
    _, moment, down = problem(seed)
    # At a large ridge 1/[(C + λ diag C)⁻¹]_ii is (1 + λ)C_ii, but for a share of order d_int/λ².
    torch.testing.assert_close(saliencies(moment, down, 1e8) / (1 + 1e8), energy_scores(moment, down), **ROUNDING)
    # At a small one it is λ/(1 − s_i), with the leverage score s_i: both order by [C⁻¹]_ii. Neurons of one size, so
    # that the two ridges are one.
    scale = moment.diagonal().sqrt()
    moment = moment / scale / scale[:, None]
    turn = torch.linalg.qr(normal(seed, D_INT, D_INT)).Q
    expected = 1e-6 / (1 - ridge_leverage_scores(moment, 1e-6))
    # 1 − s_i is about 1e-6, so its rounding is 1e-10.
    torch.testing.assert_close(saliencies(moment, turn, 1e-6), expected, rtol=1e-8, atol=0)


@properties
@given(seeds, ridges)
def test_the_ridge_bounds_what_float32_loses(seed, ridge):
    z, _moment, down = problem(seed)
    # Neurons of very different sizes, all but ruled by one token: without a ridge nothing would be left of the digits.
    z[0] *= 1e6
    z *= 10.0 ** torch.arange(D_INT)
    moment = z.T @ z
    exact, found = saliencies(moment, down, ridge), saliencies(moment.float(), down.float(), ridge)
    # The condition of the scaled matrix times the backward error of a Cholesky factor, both at their bounds.
    bound = D_INT * torch.finfo(torch.float32).eps * (D_INT + ridge) / ridge
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=0)


@properties
@given(seeds, ranks, ridges)
def test_keeps_the_largest_and_refits_to_them(seed, rank, ridge):
    z, moment, down = problem(seed)
    result, scores = saliency(moment, down, rank, ridge, ridge), saliencies(moment, down, ridge)
    assert_highest_are_kept_and_refitted(result, scores, moment, down, rank, ridge)
    lost = z @ down.T - z[:, result.kept] @ result.weight.T
    assert result.error == pytest.approx((lost.norm() / (z @ down.T).norm()).item(), rel=1e-9, abs=ERROR_FLOOR)


@properties
@given(seeds, ranks, ridges)
def test_neither_the_order_nor_the_scale_of_neurons_counts(seed, rank, ridge):
    _, moment, down = problem(seed)
    plain = saliency(moment, down, rank, ridge, ridge)
    order = torch.randperm(D_INT, generator=torch.Generator().manual_seed(seed + 3))
    permuted = saliency(moment[order][:, order], down[:, order], rank, ridge, ridge)
    original = order[permuted.kept]
    assert torch.equal(original.sort().values, plain.kept)
    torch.testing.assert_close(permuted.weight[:, original.argsort()], plain.weight, **GAUSSIAN_TOLERANCE)
    # Powers of two keep every product exact.
    scale = 2.0 ** torch.randint(-8, 9, (D_INT,), generator=torch.Generator().manual_seed(seed)).double()
    scaled = saliency(moment / scale / scale[:, None], down * scale, rank, ridge, ridge)
    assert torch.equal(scaled.kept, plain.kept)
    torch.testing.assert_close(scaled.weight / scale[plain.kept], plain.weight, **GAUSSIAN_TOLERANCE)


def test_it_drops_what_another_tells_where_energy_drops_the_quietest():
    z = torch.linalg.qr(normal(3, 40, D_INT)).Q
    z[:, 1:], down = 3 * z[:, 1:], normal(4, D_MODEL, D_INT)
    down /= down.norm(dim=0)
    z[:, 7] = z[:, 6] + 0.1 * z[:, 7]
    moment = z.T @ z
    assert 0 not in highest(energy_scores(moment, down), D_INT - 1)
    kept = saliency(moment, down, D_INT - 1, 0.01, 0.01).kept
    assert 0 in kept
    assert len({6, 7} & set(kept.tolist())) == 1


def test_full_rank_returns_the_weights_to_the_bit():
    _, moment, down = problem(1)
    result = saliency(moment, down, D_INT, 0.3, 0.3)
    assert result.kept.tolist() == list(range(D_INT))
    assert torch.equal(result.weight, down)
    assert result.error == 0


def test_silent_neurons_go_first_and_ties_to_the_lower_index():
    z, _, down = problem(4)
    z[:, 1] = 0  # never active
    down[:, 5] = 0  # never heard
    moment = z.T @ z
    assert saliency(moment, down, 6, 0.3, 0.3).kept.tolist() == [0, 2, 3, 4, 6, 7]
    assert saliency(moment, down, 7, 0.3, 0.3).kept.tolist() == [0, 1, 2, 3, 4, 6, 7]
    dead = saliency(torch.zeros_like(moment), down, 3, 0.3, 0.3)
    assert dead.kept.tolist() == [0, 1, 2]
    assert torch.equal(dead.weight, down[:, :3])


def test_inputs_are_not_mutated():
    _, moment, down = problem(6)
    before = moment.clone(), down.clone()
    for rank in (1, 4, D_INT):
        saliency(moment, down, rank, 0.3, 0.3)
    assert torch.equal(moment, before[0])
    assert torch.equal(down, before[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["moment", "down"])
def test_what_is_not_finite_is_refused(which, bad):
    _, moment, down = problem(7)
    (moment if which == "moment" else down)[1, 1] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        saliency(moment, down, 3, 0.3, 0.3)
