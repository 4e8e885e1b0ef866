import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ERROR_FLOOR, GAUSSIAN_TOLERANCE, ROUNDING, normal, properties, seeds, states
from selections import assert_highest_are_kept_and_refitted

from modegpt.decompose import NotPositiveDefiniteError
from modegpt.decompose.energy import energy_scores
from modegpt.decompose.nystrom import NystromResult, keep_highest, nystrom

D_INT, D_MODEL = 8, 5
ranks = st.integers(1, D_INT)
ridges = st.sampled_from([0.0, 0.03, 1.0])


def problem(seed, n_tokens=6 * D_INT):
    z = states(seed, n_tokens, D_INT)
    return z, z.T @ z, normal(seed + 1, D_MODEL, D_INT)


def energy(moment, down, rank, ridge=0.0) -> NystromResult:
    return keep_highest(moment, down, energy_scores(moment, down), rank, ridge)


@properties
@given(seeds)
def test_a_score_is_the_energy_that_a_neuron_writes(seed):
    z, moment, down = problem(seed)
    written = torch.stack([torch.outer(z[:, i], down[:, i]).square().sum() for i in range(D_INT)])
    torch.testing.assert_close(energy_scores(moment, down), written, **ROUNDING)


@properties
@given(seeds, ranks, ridges)
def test_keeps_the_largest_scores_and_refits_to_them(seed, rank, ridge):
    _, moment, down = problem(seed)
    result = energy(moment, down, rank, ridge)
    scores = energy_scores(moment, down)
    assert_highest_are_kept_and_refitted(result, scores, moment, down, rank, ridge)


@properties
@given(seeds, ranks, ridges)
def test_the_error_is_the_one_on_the_tokens(seed, rank, ridge):
    z, moment, down = problem(seed)
    result = energy(moment, down, rank, ridge)
    lost = z @ down.T - z[:, result.kept] @ result.weight.T
    assert result.error == pytest.approx((lost.norm() / (z @ down.T).norm()).item(), rel=1e-9, abs=ERROR_FLOOR)


@properties
@given(seeds, ranks, ridges)
def test_permuting_neurons_permutes_the_choice(seed, rank, ridge):
    _, moment, down = problem(seed)
    order = torch.randperm(D_INT, generator=torch.Generator().manual_seed(seed + 2))
    plain = energy(moment, down, rank, ridge)
    permuted = energy(moment[order][:, order], down[:, order], rank, ridge)
    original = order[permuted.kept]
    assert torch.equal(original.sort().values, plain.kept)
    torch.testing.assert_close(permuted.weight[:, original.argsort()], plain.weight, **GAUSSIAN_TOLERANCE)


@properties
@given(seeds, ranks)
def test_the_scale_of_a_neuron_does_not_count(seed, rank):
    # Dividing an activation and multiplying its weights changes no output: unlike the leverage scores, it may change
    # no choice. Powers of two keep every product exact.
    _, moment, down = problem(seed)
    scale = 2.0 ** torch.randint(-8, 9, (D_INT,), generator=torch.Generator().manual_seed(seed)).double()
    plain = energy(moment, down, rank)
    scaled = energy(moment / scale / scale[:, None], down * scale, rank)
    assert torch.equal(scaled.kept, plain.kept)
    torch.testing.assert_close(scaled.weight / scale[plain.kept], plain.weight, **GAUSSIAN_TOLERANCE)


def test_it_keeps_what_leverage_drops():
    # Neuron 0 is loud and nearly a copy of neuron 1: leverage calls it redundant, energy does not.
    z, _, down = problem(3)
    z[:, 0] = 100 * z[:, 1] + 0.01 * z[:, 0]
    moment = z.T @ z
    assert 0 in energy(moment, down, 1).kept
    assert 1 not in nystrom(moment, down, D_INT - 1).kept


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_full_rank_returns_the_weights_to_the_bit(ridge):
    _, moment, down = problem(1)
    result = energy(moment, down, D_INT, ridge)
    assert result.kept.tolist() == list(range(D_INT))
    assert torch.equal(result.weight, down)
    assert result.weight.data_ptr() != down.data_ptr()
    assert result.error == 0


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_silent_neurons_go_first_and_ties_to_the_lower_index(ridge):
    z, _, down = problem(4)
    z[:, 1] = 0  # never active
    down[:, 5] = 0  # never heard
    moment = z.T @ z
    heard = energy(moment, down, 6, ridge)
    assert heard.kept.tolist() == [0, 2, 3, 4, 6, 7]
    assert heard.error == pytest.approx(0, abs=ERROR_FLOOR)
    torch.testing.assert_close(heard.weight, down[:, heard.kept], **ROUNDING)
    one_silent = energy(moment, down, 7, ridge)
    assert one_silent.kept.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert one_silent.deficiency == 1
    torch.testing.assert_close(one_silent.weight, down[:, one_silent.kept], **ROUNDING)


def test_all_neurons_dead():
    _, moment, down = problem(5)
    result = energy(torch.zeros_like(moment), down, 3, 0.3)
    assert result.kept.tolist() == [0, 1, 2]
    assert torch.equal(result.weight, down[:, :3])
    assert (result.error, result.deficiency) == (0.0, 3)


@pytest.mark.parametrize("n_tokens", [3, 48])
def test_inputs_are_not_mutated(n_tokens):
    _, moment, down = problem(6, n_tokens)
    before = moment.clone(), down.clone()
    for rank in (1, 4, D_INT):
        energy(moment, down, rank, 0.3)
    assert torch.equal(moment, before[0])
    assert torch.equal(down, before[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["moment", "down"])
@pytest.mark.parametrize("rank", [3, D_INT])
def test_what_is_not_finite_is_refused(which, bad, rank):
    _, moment, down = problem(7)
    (moment if which == "moment" else down)[1, 1] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        energy(moment, down, rank)
