"""Weighted products of states, in float32 and by bfloat16 products with float32 results."""

import pytest
import torch
from torch import Tensor

from modegpt.sums import exact_products
from modegpt.sums.exact_products import cross_product, left_factor, product, right_factors

TOKENS = 5 * exact_products.TOGETHER + 5


def states(width: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["float32", "bfloat16 products"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of the states; no CPU has the product that a GPU's tensor cores give, so float32 stands in for it."""
    if request.param == "float32":
        return torch.float32
    monkeypatch.setattr(exact_products, "_exact", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(exact_products, "_in_float32", lambda left, right: left.float().mT @ right.float())
    return torch.bfloat16


@pytest.mark.parametrize("held", [1, 3 * 28, exact_products.HELD], ids=["one by one", "some", "all"])
@pytest.mark.parametrize("n_tokens", [0, 5, exact_products.TOGETHER, TOKENS])
def test_parts_are_those_of_all_tokens(held: int, n_tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exact_products, "HELD", held)
    monkeypatch.setattr(exact_products, "_exact", lambda x: True)
    monkeypatch.setattr(exact_products, "_in_float32", lambda left, right: left.mT @ right)
    x, y = (states(width, torch.float64, seed)[:n_tokens] for width, seed in ((7, 0), (4, 1)))
    torch.testing.assert_close(product(x, [y]), x.mT @ y)


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("other", ["itself", "as exact", "float32"])
def test_the_factors_give_the_weighted_sum(dtype: torch.dtype, weighted: bool, other: str):
    x = states(7, dtype, 0)
    roots = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(2)) if weighted else None
    left = left_factor(x, roots)
    y = {"itself": left, "as exact": states(4, dtype, 1), "float32": states(4, torch.float32, 1)}[other]
    rights = right_factors(left, y, roots)
    assert {left.dtype, *(right.dtype for right in rights)} == {dtype}
    found = product(left, rights)
    known = (x if other == "itself" else y).double()
    weights = torch.ones(TOKENS, 1).double() if roots is None else roots.double().square()
    expected = x.double().mT @ (weights * known)
    size = (x.double().square() * weights).sum(0).sqrt()[:, None] * (known.square() * weights).sum(0).sqrt()
    # Float32 sums of 2053 products round by √2053·2^-24 = 3e-6, at random. What two bfloat16 numbers leave of a factor,
    # 2^-17 of each product, is a tenth of that in such a sum; what one leaves, 2^-9, is ten times as much.
    assert found.dtype == torch.float32
    assert ((found - expected) / size).abs().max() < 4e-6


def test_weights_of_a_cross_product_may_be_of_any_sign(dtype: torch.dtype):
    x, y = states(7, dtype, 0), states(4, torch.float32, 1)
    weights = torch.randn(TOKENS, 1, generator=torch.Generator().manual_seed(2))
    found = cross_product(x, y, weights)
    expected = x.double().mT @ (weights * y.double())
    size = x.double().square().sum(0).sqrt()[:, None] * (weights * y.double()).square().sum(0).sqrt()
    assert ((found - expected) / size).abs().max() < 4e-6  # as above


def test_states_of_a_cpu_are_multiplied_in_float32():
    x = states(3, torch.bfloat16, 0)
    left = left_factor(x, None)
    assert torch.equal(left, x.float())
    assert right_factors(left, left, None) == [left]
