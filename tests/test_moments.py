"""Moments: exact sums, exact merges, and a hook set that sees every token once."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from modegpt.architectures import Dimensions, architecture_of
from modegpt.blocks import ModelBlocks, run_block
from modegpt.errors import NumericalError
from modegpt.hidden_states import HiddenStates
from modegpt.moments import BlockMoments, record_moments

DIMS = Dimensions(n_layers=1, d_model=8, d_int=6, d_head=4, n_heads=4, n_kv_heads=2, rotary_dim=4)


def moments_of(*batches: torch.Tensor) -> BlockMoments:
    result = BlockMoments.zeros(DIMS)
    for batch in batches:
        result.update_mlp(batch[..., :6])
        result.update_query(batch[..., :16])
        result.update_key(batch[..., 16:24])
        result.update_value(batch[..., 24:32])
    return result


def test_moments_are_the_sums_the_docstrings_state():
    torch.manual_seed(0)
    batch = torch.randn(3, 5, 32)
    moments = moments_of(batch)
    tokens = batch.double().reshape(15, 32)
    # Products are float32: each of 15 terms carries a relative rounding of 2^-24.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(moments.mlp, tokens[:, :6].T @ tokens[:, :6], **close)
    torch.testing.assert_close(moments.query, tokens[:, :16].reshape(15, 4, 4).square().sum(0), **close)
    torch.testing.assert_close(moments.key, tokens[:, 16:24].reshape(15, 2, 4).square().sum(0), **close)
    value = tokens[:, 24:].reshape(15, 2, 4)
    torch.testing.assert_close(moments.value, torch.einsum("tgi,tgj->gij", value, value), **close)
    assert moments.n_tokens == 15


def test_split_batches_merge_to_the_same_bits():
    torch.manual_seed(1)
    first, second = torch.randn(2, 5, 32), torch.randn(4, 5, 32)
    together = moments_of(first, second)
    merged = moments_of(first)
    merged.merge(moments_of(second))
    for name in ("mlp", "query", "key", "value", "n_tokens"):
        left, right = getattr(together, name), getattr(merged, name)
        assert left == right if isinstance(left, int) else torch.equal(left, right)


def test_a_nan_names_layer_and_matrix():
    batch = torch.randn(1, 5, 32)
    batch[0, 2, 18] = float("nan")
    moments = BlockMoments.zeros(DIMS)
    moments.update_key(batch[..., 16:24])
    with pytest.raises(NumericalError, match=r"layer 7: NaN or infinity in the key states"):
        moments.check_finite(7)


def test_hooks_see_every_token_once_and_leave_nothing_behind():
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=32, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    architecture = architecture_of(config)
    blocks = ModelBlocks(model, architecture, consume=False)
    calibration = blocks.embed(torch.randint(50, (5, 8)), 2, HiddenStates())
    assert [len(batch) for batch in calibration.hidden] == [2, 2, 1]
    dims = Dimensions.of(architecture, config)
    moments = BlockMoments.zeros(dims)
    block = blocks.take(0, torch.device("cpu"))
    with record_moments(block, architecture, dims, moments):
        outputs = list(run_block(block, 0, calibration, torch.device("cpu")))
    assert moments.n_tokens == 5 * 8
    list(run_block(block, 0, calibration, torch.device("cpu")))
    assert moments.n_tokens == 5 * 8
    # The states that were recorded are those of the model itself.
    hidden = torch.cat(list(calibration.hidden)).flatten(0, 1)
    attention = model.model.layers[0].self_attn
    normed = model.model.layers[0].input_layernorm(hidden)
    expected = attention.k_proj(normed).double().reshape(-1, 2, 4).square().sum(0)
    # float32 states: relative rounding of 2^-24 a product, summed over 40 tokens.
    torch.testing.assert_close(moments.key, expected, rtol=1e-5, atol=1e-6)
    assert len(outputs) == 3
