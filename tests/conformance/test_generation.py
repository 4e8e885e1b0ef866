"""Every way of generating gives the tokens of repeated full forward passes without a cache."""

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modegpt.cache_name import CACHE

from .conftest import Pair
from .families import PAD, tokens
from .helpers import densify, greedy, in_float64

NEW = 10
PROMPT = tokens(rows=3, length=9)
"""Longer than the sliding window, so that windows move during prefill and during decoding."""

STATIC = {"cache_implementation": "static"}
CACHES = {
    "offloaded": {"cache_implementation": "offloaded"},
    "chunked prefill": {"prefill_chunk_size": 4},
    "chunked prefill, static": {"prefill_chunk_size": 4, **STATIC},
}


def generate(model, ids, **options):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


@functools.cache
def continued(model: Any) -> torch.Tensor:
    """Return the prompt as full forward passes continue it."""
    expected = greedy(model, PROMPT, NEW)
    assert (expected[:, -NEW:].diff() != 0).any(), "a constant continuation would hide a broken cache"
    return expected


def skip_what_stock_lacks(pair: Pair) -> None:
    if not pair.family.static:
        pytest.skip("the stock model masks a static cache wrongly, or fails with one")


def test_generate_equals_the_full_forward(pair: Pair):
    for options in ({}, {"use_cache": False}):
        assert torch.equal(generate(pair.compressed, PROMPT, **options), continued(pair.compressed)), options


def test_a_static_cache(attending: Pair):
    skip_what_stock_lacks(attending)
    assert torch.equal(generate(attending.compressed, PROMPT, **STATIC), continued(attending.compressed))


@pytest.mark.parametrize("way", CACHES)
def test_other_caches(one_attending: Pair, way: str):
    if way == "offloaded" and not torch.cuda.is_available():
        pytest.skip("the offloaded cache needs a GPU")
    if "static" in way:
        skip_what_stock_lacks(one_attending)
    assert torch.equal(generate(one_attending.compressed, PROMPT, **CACHES[way]), continued(one_attending.compressed))


def padded_on_the_left(pair: Pair, **options: Any) -> None:
    lengths = (9, 6, 3)
    ids, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    for row, length in enumerate(lengths):
        ids[row, : 9 - length] = PAD
        mask[row, : 9 - length] = 0
    together = generate(pair.compressed, ids, attention_mask=mask, **options)
    assert torch.equal(together, greedy(pair.compressed, ids, NEW, mask))
    for row, length in enumerate(lengths):
        alone = generate(pair.compressed, ids[row : row + 1, 9 - length :])
        assert torch.equal(together[row, 9 - length :], alone[0])


def test_left_padded_batches(one_attending: Pair):
    padded_on_the_left(one_attending)


@pytest.mark.parametrize("options", [STATIC, CACHES["chunked prefill, static"]], ids=["static", "chunked prefill"])
def test_left_padded_batches_in_a_static_cache(one_attending: Pair, options: dict[str, Any]):
    skip_what_stock_lacks(one_attending)
    padded_on_the_left(one_attending, **options)


def test_beam_search(one_attending: Pair):
    family, dense, compressed = one_attending.family, one_attending.dense, one_attending.compressed
    beams = {"num_beams": 3, "length_penalty": 0.0}
    expected = generate(densify(family, compressed, dense), PROMPT, **beams)
    for cache in ({}, {"use_cache": False}, *([STATIC] if family.static else [])):
        assert torch.equal(generate(compressed, PROMPT, **beams, **cache), expected)


def test_the_cache_is_as_narrow_as_the_layers(attending: Pair):
    cache, dims = DynamicCache(config=attending.compressed.config), attending.family.dims
    with torch.no_grad():
        attending.compressed(tokens(rows=1, length=5), **{CACHE: cache})
    for layer, rank in zip(cache.layers, attending.family.ranks(), strict=True):
        assert layer.keys.shape[1::2] == (dims.n_kv_heads, rank["qk"])
        assert layer.values.shape[1::2] == (dims.n_kv_heads, rank["vo"])


def test_a_cache_by_another_name_is_refused(pairs: dict[str, Pair]):
    """A model that lets it pass reads nothing of what came before, and says nothing."""
    model = pairs["llama-grouped"].compressed
    with pytest.raises(TypeError, match="hands the cache over as 'memory', which this code does not know"):
        model(tokens(rows=1, length=5), memory=DynamicCache(config=model.config))


def test_padding_to_one_head_dim_is_for_prefill_alone(attending: Pair, monkeypatch: pytest.MonkeyPatch):
    """SDPA has no fused kernel for unequal dims; when decoding, padding would copy the cache at every token."""
    if not attending.dense._supports_sdpa:
        pytest.skip("the family does not run on SDPA")
    seen: list[bool] = []

    def record(module, query, key, value, mask, **options):
        seen.append(key.shape[-1] == value.shape[-1])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", record)
    generate(attending.compressed, PROMPT[:, :5])
    n_layers = attending.family.dims.n_layers
    prefill, decode = seen[:n_layers], seen[n_layers:]
    assert len(prefill) == n_layers
    assert all(prefill)
    assert not decode, "SDPA would copy the cache, padded or not"


def test_decoding_step_by_step_gives_the_logits_of_one_pass(pair: Pair):
    model, ids = in_float64(pair.compressed), tokens(rows=2, length=14)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids).logits
        pieces = [model(piece, **{CACHE: cache}).logits for piece in ids.split([1, 5, 1, 4, 3], dim=1)]
    # The pieces take SDPA's other path for single tokens.
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=pair.family.stepwise)


def test_sampling_and_assisted_decoding(one_attending: Pair):
    """A seed draws the same tokens with and without a cache; assisting, which crops the cache, changes no token."""
    model, drawn = one_attending.compressed, []
    for use_cache in (True, False):
        torch.manual_seed(0)
        drawn.append(model.generate(PROMPT, max_new_tokens=NEW, do_sample=True, use_cache=use_cache))
    assert torch.equal(*drawn)
    if one_attending.dense._is_stateful:
        pytest.skip("transformers assists no model with a state that cannot go back")
    assisted = generate(model, PROMPT[:1], assistant_model=one_attending.dense)
    assert torch.equal(assisted, continued(model)[:1])
