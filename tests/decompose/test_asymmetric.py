import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GAUSSIAN_TOLERANCE, normal, properties, seeds, states

from modegpt.decompose import NotPositiveDefiniteError
from modegpt.decompose.asymmetric import asymmetric_refit

RANK, D_MODEL = 8, 5
ridges = st.sampled_from([1e-9, 0.3, 1.0])


def problem(seed):
    z = states(seed, 6 * RANK, RANK)
    return z, normal(seed + 1, len(z), D_MODEL), normal(seed + 2, D_MODEL, RANK)


def refit(z, y, down, ridge):
    return asymmetric_refit(z.T @ z, z.T @ y, y.square().sum(), down, ridge)


@properties
@given(seeds, ridges)
def test_it_is_ridge_regression_of_the_change(seed, ridge):
    z, y, down = problem(seed)
    result = refit(z, y, down, ridge)
    # The ridge as further rows of the regression: sqrt(λ C_ii) of each neuron, whose target is the weight as it is.
    damping = (ridge * z.square().sum(0)).sqrt().diag()
    rows, targets = torch.cat((z, damping)), torch.cat((y, damping @ down.T))
    torch.testing.assert_close(result.weight.T, torch.linalg.lstsq(rows, targets).solution, **GAUSSIAN_TOLERANCE)
    error = (y - z @ result.weight.T).norm() / y.norm()
    assert result.error == pytest.approx(error.item(), rel=1e-9)  # no cancellation: Gaussian targets are hardly met
    assert error <= (y - z @ down.T).norm() / y.norm()
    assert result.kept.tolist() == list(range(RANK))
    assert result.deficiency == 0


@properties
@given(seeds, st.sampled_from([0.1, 1.0]))
def test_the_ridge_bounds_what_float32_loses(seed, ridge):
    z, y, down = problem(seed)
    z[0] *= 1e4  # one token rules the moment, whose condition without a ridge is 1e8
    exact = refit(z, y, down, ridge)
    moment, target, energy = (each.float() for each in (z.T @ z, z.T @ y, y.square().sum()))
    found = asymmetric_refit(moment, target, energy, down.float(), ridge)
    # The condition of the scaled moment times the error of a factor and of the two terms of the right-hand side.
    change = moment.diagonal().sqrt() * (found.weight.double() - exact.weight)
    size = (moment.diagonal().sqrt() * down).norm()
    assert change.norm() / size < 3 * RANK * torch.finfo(torch.float32).eps * (RANK + ridge) / ridge
    # A sum of terms a thousand times as large, each rounded at 1e-7.
    assert found.error == pytest.approx(exact.error, rel=1e-3)


@properties
@given(seeds)
def test_a_target_that_the_weights_meet_leaves_them_alone(seed):
    z, _y, down = problem(seed)
    result = refit(z, z @ down.T, down, 1.0)
    torch.testing.assert_close(result.weight, down, **GAUSSIAN_TOLERANCE)
    # Here the error is a difference of equal terms, each rounded at 2^-52 in some hundred sums; its root is seen.
    assert result.error < 1e-6


def test_a_dead_neuron_keeps_its_weight_and_no_target_has_no_error():
    z, y, down = problem(3)
    z[:, 2] = 0
    result = refit(z, y, down, 0.3)
    assert torch.equal(result.weight[:, 2], down[:, 2])
    assert result.deficiency == 1
    assert refit(z, torch.zeros_like(y), down, 0.3).error == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["moment", "target", "down"])
def test_what_is_not_finite_is_refused_and_inputs_are_left_alone(which, bad):
    z, y, down = problem(4)
    given_ = {"moment": z.T @ z, "target": z.T @ y, "down": down}
    before = {name: tensor.clone() for name, tensor in given_.items()}
    asymmetric_refit(**given_, energy=y.square().sum(), ridge=1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given_.items())
    given_[which][1, 1] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinity"):
        asymmetric_refit(**given_, energy=y.square().sum(), ridge=1.0)
