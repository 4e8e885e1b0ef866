import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import GAUSSIAN_TOLERANCE, normal, properties, seeds, states

from modegpt.decompose import NotPositiveDefiniteError
from modegpt.decompose.fold import folded_up, own_share

D_INT, D_MODEL, RANK = 7, 4, 5
KEPT = torch.tensor([0, 1, 3, 4, 6])
ridges = st.sampled_from([1e-9, 0.3, 3.0])


def problem(seed):
    """Gates of 40 tokens, up and down rows, and any new down projection of the kept."""
    up, down = normal(seed + 1, D_INT, D_MODEL), normal(seed + 2, D_MODEL, D_INT)
    return states(seed, 40, D_INT), up, down, down[:, KEPT] + 0.1 * normal(seed + 3, D_MODEL, RANK)


@properties
@given(seeds, ridges)
def test_with_gates_and_inputs_independent_it_is_ridge_regression(seed, ridge):
    a, up, down, refitted = problem(seed)
    # Every gate with every input, and inputs of moment C = I: then they are independent, and A ⊗ C is the moment.
    inputs = torch.eye(D_MODEL, dtype=torch.float64)
    lost = down.clone()
    lost[:, KEPT] -= refitted
    # Output = Σ_i v_i a_i (u_iᵀx) for all pairs of a gate vector and an input, and its derivative by the kept rows.
    wanted = torch.einsum("mi,ti,ix,nx->tnm", lost, a, up, inputs).flatten()
    slopes = torch.einsum("mj,tj,nx->tnmjx", refitted, a[:, KEPT], inputs).flatten(0, 2).flatten(1)
    damping = (ridge * slopes.square().sum(0)).sqrt().diag()
    rows, targets = torch.cat((slopes, damping)), torch.cat((wanted, torch.zeros(RANK * D_MODEL, dtype=torch.float64)))
    change = torch.linalg.lstsq(rows, targets[:, None]).solution.view(RANK, D_MODEL)
    # No row is changed by more than its own norm.
    expected = up[KEPT] + change * (up[KEPT].norm(dim=1) / change.norm(dim=1)).clamp_max(1)[:, None]
    # At a tiny ridge the 20 unknowns of 640 rows have a condition number of some hundreds, squared in the moments.
    tolerance = GAUSSIAN_TOLERANCE if ridge > 1e-9 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(folded_up(a.T @ a, up, down, KEPT, refitted, ridge), expected, **tolerance)


@properties
@given(seeds)
def test_where_nothing_is_lost_nothing_changes(seed):
    a, up, down, _ = problem(seed)
    every = torch.arange(D_INT)
    assert torch.equal(folded_up(a.T @ a, up, down, every, down, 3.0), up)
    silent = a.clone()
    silent[:, [2, 5]] = 0  # the two that go never open
    assert torch.equal(folded_up(silent.T @ silent, up, down, KEPT, down[:, KEPT], 3.0), up[KEPT])


def test_a_silent_neuron_keeps_its_row():
    a, up, down, refitted = problem(2)
    a[:, 3] = 0
    new = folded_up(a.T @ a, up, down, KEPT, refitted, 3.0)
    assert torch.equal(new[2], up[3])
    assert not torch.equal(new[0], up[0])


@properties
@given(seeds, ridges)
def test_a_gates_own_share_is_what_the_others_cannot_tell_of_it(seed, ridge):
    a, _, _, _ = problem(seed)
    # The ridge as more tokens, one for each gate, on which it alone opens. Then plain least squares.
    tokens = torch.cat((a, (ridge * a.square().sum(0)).sqrt().diag()))
    left = []
    for i in range(D_INT):
        others = tokens[:, [j for j in range(D_INT) if j != i]]
        x = torch.linalg.lstsq(others, tokens[:, i : i + 1]).solution
        left.append((tokens[:, i : i + 1] - others @ x).square().sum())
    expected = torch.stack(left) / tokens.square().sum(0)
    shares = own_share(a.T @ a, ridge)
    torch.testing.assert_close(shares, expected, **GAUSSIAN_TOLERANCE)
    assert (shares <= 1).all()
    # Cholesky's rounding is relative to each gate's own size, so float32 knows shares of this ridge or more to 1e-4:
    # some D_INT · 1.2e-7 over a pivot of 0.3 / 1.3, and less where the ridge is larger.
    if ridge > 1e-9:
        torch.testing.assert_close(own_share((a.T @ a).float(), ridge).double(), shares, rtol=1e-4, atol=0)


def test_a_gate_that_hardly_opens_changes_its_row_by_its_norm_at_most():
    a, up, down, refitted = problem(2)
    a[:, 3] *= 1e-6
    change = folded_up(a.T @ a, up, down, KEPT, refitted, 0.5) - up[KEPT]
    torch.testing.assert_close(change.norm(dim=1)[2], up[3].norm(), **GAUSSIAN_TOLERANCE)
    assert (change.norm(dim=1) <= up[KEPT].norm(dim=1) * (1 + 1e-12)).all()


def test_a_gate_that_none_resembles_is_its_own_and_so_is_one_that_was_never_seen_open():
    a = torch.linalg.qr(normal(8, 40, D_INT)).Q  # orthogonal columns
    a[:, 2] = a[:, 1]
    a[:, 5] = 0
    shares = own_share(a.T @ a, 0.3)
    torch.testing.assert_close(shares[[0, 3, 4, 5, 6]], torch.ones(5, dtype=torch.float64), **GAUSSIAN_TOLERANCE)
    # Of 1.3 the twin tells 1/1.3: the share of a twin is (1.3 − 1/1.3)/1.3 = 1 − 1/1.69.
    twins = torch.full((2,), 1 - 1 / 1.69, dtype=torch.float64)
    torch.testing.assert_close(shares[[1, 2]], twins, **GAUSSIAN_TOLERANCE)


def test_what_is_not_finite_is_refused_and_inputs_are_left_alone():
    a, up, down, refitted = problem(5)
    given_ = [a.T @ a, up, down, refitted]
    before = [each.clone() for each in given_]
    folded_up(given_[0], up, down, KEPT, refitted, 3.0)
    own_share(given_[0], 0.3)
    assert all(torch.equal(left, right) for left, right in zip(given_, before, strict=True))
    given_[0][2, 2] = float("nan")
    with pytest.raises(NotPositiveDefiniteError, match="the moment of the gates holds NaN or infinity"):
        folded_up(given_[0], up, down, KEPT, refitted, 3.0)
    with pytest.raises(NotPositiveDefiniteError, match="the moment of the gates holds NaN or infinity"):
        own_share(given_[0], 0.3)
