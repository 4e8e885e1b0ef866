"""Half of a second moment is summed, and the other half copied."""

import pytest
import torch

from modegpt.sums.triangle import PANEL, add_lower, fill_upper

WIDTH = PANEL["cpu"]


@pytest.mark.parametrize("width", [1, WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_batches_give_the_whole_product(width: int, dtype: torch.dtype):
    x, y = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(width, width, dtype=dtype)
    add_lower(total, x, None)
    add_lower(total, y, None)
    fill_upper(total)
    assert torch.equal(total, total.mT)
    expected = x.double().mT @ x.double() + y.double().mT @ y.double()
    # Of each batch 7 products of size one are rounded to float32, 6e-8 each, and so is their sum.
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=1e-5)


def test_what_stands_above_the_diagonal_is_not_read():
    total = torch.arange(9.0).view(3, 3)
    fill_upper(total)
    assert total.tolist() == [[0, 3, 6], [3, 4, 7], [6, 7, 8]]
