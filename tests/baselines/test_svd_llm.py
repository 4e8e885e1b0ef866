"""SVD-LLM: each matrix is the nearest of its rank in what it puts out."""

import pytest
import torch
from test_layers import llama, quiet, windows

from modegpt.baselines import BASELINES
from modegpt.baselines.svd_llm import truncated


def case(rows: int, columns: int, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(tokens, columns, dtype=torch.float64) @ torch.randn(columns, columns, dtype=torch.float64)
    return torch.randn(rows, columns, dtype=torch.float64), inputs.mT @ inputs


@pytest.mark.parametrize(("rows", "columns"), [(12, 20), (20, 12)])
def test_it_is_the_paper_s_whitened_svd(rows: int, columns: int):
    weight, moment = case(rows, columns)
    lower = torch.linalg.cholesky(moment)
    left, values, right = torch.linalg.svd(weight @ lower, full_matrices=False)
    for rank in (1, 5, 12):
        cut = left[:, :rank] * values[:rank] @ right[:rank] @ torch.linalg.inv(lower)
        found = truncated(weight, moment, rank)
        # Both are of condition up to 1e4 in float64, squared in the moment.
        torch.testing.assert_close(found, cut, rtol=1e-7, atol=1e-7)
        assert torch.linalg.matrix_rank(found) == rank
        lost = (weight - found) @ moment @ (weight - found).mT
        torch.testing.assert_close(lost.trace(), values[rank:].square().sum(), rtol=1e-7, atol=1e-6)


def test_inputs_that_span_little_leave_no_infinity():
    weight, moment = case(12, 20, tokens=6)
    found = truncated(weight, moment, 6)
    assert torch.isfinite(found).all()
    lost = (weight - found) @ moment @ (weight - found).mT
    assert lost.trace() <= 1e-12 * (weight @ moment @ weight.mT).trace()


def test_every_matrix_of_the_blocks_has_the_rank_that_fits():
    dense = llama(2)
    made = BASELINES["svd-llm"].start(dense, windows(4, 40), quiet)(0.3)
    removed = 0
    for block, own in zip(dense.model.layers, made.model.model.layers, strict=True):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            before, after = block.get_submodule(name).weight, own.get_submodule(name).weight
            rank = int(torch.linalg.matrix_rank(after.double(), rtol=1e-5))
            assert rank < min(before.shape)
            assert 0.68 * before.numel() - sum(before.shape) < rank * sum(before.shape) <= 0.7 * before.numel()
            twice = 1 if name.endswith(("q_proj", "o_proj", "down_proj")) else 2  # value and gate are of these sizes
            removed += twice * (before.numel() - rank * sum(before.shape))
    assert made.removed == removed
