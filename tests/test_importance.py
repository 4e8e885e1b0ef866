"""Block scores against direct computation from the whole text at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modegpt.errors import InputError, NumericalError
from modegpt.importance import InfluenceMeter, outlier_ratio


def states(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(cut=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_influence_is_the_mean_over_tokens_however_they_are_split(cut, seed):
    before, after = states(6, 5, 8, seed=seed), states(6, 5, 8, seed=seed + 1)
    whole, first, second = InfluenceMeter(2), InfluenceMeter(2), InfluenceMeter(2)
    for layer, (x, y) in enumerate(((before, after), (after, before + after))):
        whole.update(layer, x, y)
        first.update(layer, x[:cut], y[:cut])
        second.update(layer, x[cut:], y[cut:])
    first.merge(second)
    # 1e-14: float64 sums of thirty terms in another order.
    torch.testing.assert_close(first.scores(), whole.scores(), rtol=0, atol=1e-14)
    cosine = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
    assert whole.scores()[0].item() == pytest.approx(1 - cosine.mean().item(), abs=1e-14)
    assert whole.scores().shape == (2,)


def test_attention_and_mlp_are_scored_apart():
    x_in, x_mid, x_out = (states(4, 3, 8, seed=seed) for seed in range(3))
    apart, first, second = InfluenceMeter(1, parts=2), InfluenceMeter(1), InfluenceMeter(1)
    apart.update(0, x_in, x_mid, x_out)
    first.update(0, x_in, x_mid)
    second.update(0, x_mid, x_out)
    assert apart.scores().tolist() == [[first.scores().item(), second.scores().item()]]
    with pytest.raises(InputError, match="need 3"):
        apart.update(0, x_in, x_out)


def test_scale_does_not_count_and_direction_does():
    x = states(10, 16)
    meter = InfluenceMeter(3)
    for layer, y in enumerate((7 * x, -x, x.flip(0) * 0 + torch.stack((-x[:, 1], x[:, 0]), 1).repeat(1, 8))):
        meter.update(layer, x if layer < 2 else x[:, :2].repeat(1, 8), y)
    # 1e-15 and below: a few roundings of float64. Layer 2 turns every token by a right angle.
    assert meter.scores().tolist() == pytest.approx([0, 2, 1], abs=1e-14)
    assert (meter.scores() >= 0).all()


def test_rounding_makes_no_score_negative():
    # The cosine of parallel vectors rounds to above 1 now and then; one token a layer, so that none averages out.
    x, meter = states(200, 7), InfluenceMeter(200)
    for layer in range(200):
        meter.update(layer, x[layer : layer + 1], 3 * x[layer : layer + 1])
    assert (meter.scores() >= 0).all()


def test_a_small_influence_keeps_its_digits():
    # cos = 1 − θ²/2 with θ = 1e-5: the score, 5e-11, is far below float32's resolution at 1.
    theta = 1e-5
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    meter = InfluenceMeter(1)
    meter.update(0, x, torch.tensor([[1.0, theta]], dtype=torch.float64))
    assert meter.scores().item() == pytest.approx(theta**2 / 2, rel=1e-5)  # one unit of float64 at 1 is 4e-6 of it


def test_massive_activations_in_half_precision_do_not_overflow():
    x = torch.full((2, 64), 6e4, dtype=torch.float16)
    meter = InfluenceMeter(1)
    meter.update(0, x, x)
    assert meter.scores().item() == pytest.approx(0, abs=1e-15)


def test_a_token_without_direction():
    zero, some = torch.zeros(1, 4), torch.ones(1, 4)
    for x, y, expected in ((zero, zero, 0.0), (zero, some, 1.0), (some, zero, 1.0)):
        meter = InfluenceMeter(1)
        meter.update(0, x, y)
        assert meter.scores().item() == expected


def test_padding_does_not_count():
    x, y = states(2, 3, 4), states(2, 3, 4, seed=1)
    mask = torch.tensor([[True, True, False], [False, True, True]])
    padded, plain = InfluenceMeter(1), InfluenceMeter(1)
    y_bad = y.masked_fill(~mask[..., None], torch.nan)
    padded.update(0, x, y_bad, mask=mask)
    plain.update(0, x[mask], y[mask])
    assert padded.scores().equal(plain.scores())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_influence_of_what_is_not_finite_names_the_layer(bad):
    x = states(3, 4)
    y = x.clone()
    y[1, 2] = bad
    meter = InfluenceMeter(5)
    with pytest.raises(NumericalError, match="layer 3"):
        meter.update(3, x, y)
    assert not meter.totals.any()


def test_a_layer_that_was_not_measured_is_named():
    meter = InfluenceMeter(2)
    meter.update(0, states(3, 4), states(3, 4))
    with pytest.raises(InputError, match="layer 1"):
        meter.scores()


def test_outlier_ratio_counts_over_all_matrices_together():
    weights = [states(6, 4), states(3, 8, seed=1)]
    norms = [states(4, seed=2).abs(), states(8, seed=3).abs()]
    weights[0][1, 2], weights[1][0, 5] = 500.0, -400.0
    norms[0][2] = norms[1][5] = 1.0
    entries = torch.cat([(w.abs() * n).flatten() for w, n in zip(weights, norms, strict=True)])
    for threshold in (0.01, 0.05, 5.0):
        expected = (entries > threshold * entries.mean()).double().mean().item()
        assert outlier_ratio(weights, norms, threshold) == expected
    assert outlier_ratio(weights, norms) == 2 / 48
    # The scale of the norms is free: powers of two round nothing.
    assert outlier_ratio(weights, [64 * n for n in norms], 0.05) == outlier_ratio(weights, norms, 0.05)


def test_outlier_ratio_of_odd_layers():
    assert outlier_ratio([torch.zeros(2, 3)], [torch.ones(3)]) == 0.0
    weight = torch.ones(2, 3)
    weight[0, 0] = torch.nan
    with pytest.raises(NumericalError, match="layer 4"):
        outlier_ratio([weight], [torch.ones(3)], layer=4)
    with pytest.raises(NumericalError, match="layer 4"):
        outlier_ratio([torch.ones(2, 3)], [torch.tensor([1, 1, torch.inf])], layer=4)
