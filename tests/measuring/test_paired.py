"""Differences on the same samples: against the variance of a difference as textbooks write it, and by hand."""

import math

import pytest
import torch

from modegpt.measuring.paired import compare, paired


def test_the_error_leaves_out_what_both_models_share():
    generator = torch.Generator().manual_seed(0)
    ease = torch.rand(200, generator=generator)
    one, other = ((ease + 0.4 * torch.rand(200, generator=generator) > 0.6).double() for _ in range(2))
    value, error, flips = paired(one.tolist(), other.tolist())
    covariance = torch.cov(torch.stack((one, other)))
    # Var(a − b) = Var(a) + Var(b) − 2 Cov(a, b); 1e-12 is above float64's rounding of 200 terms.
    expected = (covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / 200
    assert value == pytest.approx((one.mean() - other.mean()).item(), abs=1e-12)
    assert error == pytest.approx(math.sqrt(expected), rel=1e-12)
    assert flips == pytest.approx((one != other).double().mean().item(), abs=1e-12)
    assert error < 0.8 * math.sqrt((covariance[0, 0] + covariance[1, 1]) / 200)


def test_means_over_tasks_by_hand():
    one = {"a": {"acc": [1.0, 1.0, 0.0], "acc_norm": [1.0, 0.0, 0.0]}, "b": {"acc": [1.0, 0.0]}}
    other = {"a": {"acc": [0.0, 1.0, 0.0], "acc_norm": [1.0, 1.0, 0.0]}, "b": {"acc": [0.0, 0.0]}}
    found = compare(one, other)
    # Differences 1, 0, 0: mean 1/3, variance 1/3; 0, −1, 0 likewise; 1, 0: mean 1/2, variance 1/2.
    assert found.tasks["a"] == pytest.approx((1 / 3, 1 / 3, -1 / 3, 1 / 3, 1 / 3, 1 / 3))
    assert found.tasks["b"] == (0.5, 0.5, None, None, 0.5, None)
    both = math.hypot(1 / 3, 1 / 2) / 2
    assert found.mean == pytest.approx((5 / 12, both, 1 / 12, both, 5 / 12, 5 / 12))


def test_what_is_forgotten_and_what_is_won_cancel_in_the_accuracy_and_not_in_the_flips():
    assert paired([1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0])[::2] == (0, 0.5)


def test_a_single_sample_has_no_error():
    assert paired([1.0], [0.0]) == (1, None, 1)
    assert compare({"a": {"acc": [1.0]}}, {"a": {"acc": [0.0]}}).mean == (1, None, 1, None, 1, 1)


def test_samples_must_pair():
    with pytest.raises(ValueError, match=r"longer|shorter"):
        paired([1.0, 0.0], [1.0])
