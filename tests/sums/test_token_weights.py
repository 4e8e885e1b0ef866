"""How much each calibration token counts."""

import torch

from conformance.families import FAMILIES, tokens
from modegpt.compress import prepare
from modegpt.config import CompressionConfig
from modegpt.sums.token_weights import bounded_astray, token_weights, weighed_by_norm


def test_a_token_counts_by_a_power_of_its_occurrences():
    windows = torch.tensor([[7, 7, 7, 7], [0, 7, 3, 3]])  # 7 five times, 3 twice, 0 once
    weights = token_weights(windows, 0.5)
    assert weights is not None
    assert weights.dtype == torch.float64
    raw = torch.tensor([[5.0, 5, 5, 5], [1, 5, 2, 2]], dtype=torch.float64).rsqrt()
    torch.testing.assert_close(weights, raw * 8 / raw.sum(), rtol=1e-14, atol=0)


def test_at_exponent_1_every_type_counts_alike_and_at_0_every_token():
    windows = tokens(rows=6, length=40)
    weights = token_weights(windows, 1.0)
    assert weights is not None
    by_type = torch.zeros(int(windows.max()) + 1, dtype=torch.float64).index_add(
        0, windows.flatten(), weights.flatten()
    )
    present = by_type[windows.unique()]
    torch.testing.assert_close(present, present[:1].expand_as(present), rtol=1e-12, atol=0)
    assert token_weights(windows, 0.0) is None


def test_best_weights_tokens_and_paper_does_not():
    def weights(**settings):
        config = CompressionConfig(sparsity=0.25, device="cpu", coverage=0, **settings)
        state, _report = prepare(FAMILIES[0].dense(), tokens(rows=8, length=32), config, None, None).in_memory()
        return torch.cat([tensor.flatten() for _name, tensor in sorted(state.items()) if tensor.is_floating_point()])

    assert torch.equal(weights(solver="best"), weights(solver="best", rarity=0.25))
    assert not torch.equal(weights(solver="best"), weights(solver="best", rarity=0.0))
    assert torch.equal(weights(solver="paper"), weights(solver="paper", rarity=0.0))
    assert CompressionConfig(solver="best").rarity_exponent == 0.25
    assert CompressionConfig(solver="paper").rarity_exponent == 0


def test_a_token_counts_by_its_hidden_state_too():
    states = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[0.0, -2.0], [6.0, 8.0]]])
    weights = torch.tensor([[2.0, 1.0], [1.0, 5.0]], dtype=torch.float64)
    assert torch.equal(weighed_by_norm(weights, states), torch.tensor([[0.4, 0.0], [0.5, 0.5]]))
    assert torch.equal(weighed_by_norm(None, states), torch.tensor([[0.2, 0.0], [0.5, 0.1]]))


def test_a_token_that_is_far_off_is_bounded_and_others_are_left_alone():
    states = torch.tensor([[[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]])
    output = torch.tensor([[[3.0, -46.0], [3.0, 1004.0], [0.0, 0.0], [1.0, 0.0]]])  # 50, 1000, 0 and 1 away
    weights = torch.tensor([[0.3, 2.0, 0.0, 0.0]])
    bounded = bounded_astray(weights, states, output)
    assert torch.equal(bounded[0, [0, 2, 3]], weights[0, [0, 2, 3]])
    torch.testing.assert_close(bounded[0, 1].item(), 2.0 / 400, rtol=1e-6, atol=0)  # float32
