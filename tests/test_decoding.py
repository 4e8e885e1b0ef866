"""Decoding one token: cosines gathered once for all layers, and a cache that is read in place."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from modegpt.architectures import architecture_of
from modegpt.cache_name import CACHE
from modegpt.checkpoint import build, compressed_config
from modegpt.modeling_modegpt import _attend_once, decoder_layers, shrink_block

SHAPES = [
    {"rope_pairs": 3, "qk_plain": 0, "value_dim": 7, "mlp_width": 27},
    {"rope_pairs": 2, "qk_plain": 0, "value_dim": 3, "mlp_width": 31},
    {"rope_pairs": 4, "qk_plain": 0, "value_dim": 8, "mlp_width": 40},
]
ROUNDING = {"rtol": 0, "atol": 1e-12}
"""Of float64 numbers of size 1 to 10."""


@pytest.fixture(params=[SHAPES, SHAPES[:1] * 3], ids=["shapes differ", "one shape"])
def model(request: pytest.FixtureRequest):
    """A compressed Llama, each key head with pairs of its own, in float64."""
    torch.manual_seed(0)
    shapes = request.param
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=len(shapes),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    dense = LlamaForCausalLM(config)
    architecture = architecture_of(config)
    narrow = compressed_config(config, architecture, shapes)
    for block, shape in zip(decoder_layers(dense, architecture.describe()), shapes, strict=True):
        shrink_block(block, architecture.describe(), shape, config)
    small: LlamaForCausalLM = build(narrow, dense.state_dict()).double()  # pyright: ignore
    draw_pairs(small, seed=1)
    return small


def draw_pairs(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        index = layer.self_attn.rope_index
        pairs = [torch.randperm(4, generator=generator)[: index.shape[1]].sort()[0] for _ in index]
        index.copy_(torch.stack(pairs))


def ids(length: int, rows: int = 2) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def test_a_step_gathers_for_all_layers_at_once(model, monkeypatch: pytest.MonkeyPatch):
    """The shared tables hold what each layer would gather, whatever its pairs, and stay right when these change."""
    hidden = torch.zeros(2, 1, 32, dtype=torch.float64)
    positions = torch.tensor([[5], [9]])
    for seed in (1, 3):
        draw_pairs(model, seed)
        cos, sin, shared = model.model.rotary_emb(hidden, positions)
        for layer in model.model.layers:
            own = layer.self_attn._tables(cos, sin)
            for ours, theirs in zip(layer.self_attn._tables(cos, sin, shared), own, strict=True):
                assert torch.equal(*torch.broadcast_tensors(ours, theirs))
    assert len(model.model.rotary_emb(hidden.repeat(1, 2, 1), positions.repeat(1, 2))) == 2, "a prompt shares nothing"
    index = model.model.layers[1].self_attn.rope_index
    model.model.layers[1].self_attn.rope_index = index.to("meta")
    assert len(model.model.rotary_emb(hidden, positions)) == 2, "layers on several devices share nothing"
    model.model.layers[1].self_attn.rope_index = index
    calls, select = [], Tensor.index_select
    monkeypatch.setattr(Tensor, "index_select", lambda *arguments: calls.append(1) or select(*arguments))
    model(ids(1))
    assert len(calls) == 2


@torch.no_grad()
def test_steps_equal_one_pass_in_copies_and_after_loading_other_pairs(model):
    other = copy.deepcopy(model)
    draw_pairs(other, seed=7)
    model.load_state_dict(other.state_dict())
    for network in (model, other):
        cache = DynamicCache(config=network.config)
        steps = [network(token, **{CACHE: cache}).logits for token in ids(9).split(1, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), other(ids(9)).logits, **ROUNDING)


@torch.no_grad()
def test_no_step_copies_the_cache(model):
    """What a step allocates at once is less than the keys of one layer, in a cache that is long enough to tell."""
    cache = StaticCache(config=model.config, max_cache_len=8000)
    model(ids(3), **{CACHE: cache})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(ids(1), **{CACHE: cache})
    largest = max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")  # pyright: ignore
    # The scores of all heads against all positions are inevitable: 4 heads to 2 key heads of 4 coordinates at least.
    scores = 2 * 4 * 8000 * 8
    assert scores <= largest < min(layer.keys.nbytes for layer in cache.layers)  # pyright: ignore


@pytest.mark.parametrize("kind", ["none", "bool", "additive", "by head"])
def test_attending_once_is_attention(kind: str):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, t, d, generator=generator) for n, t, d in ((6, 1, 5), (2, 9, 5), (2, 9, 3)))
    mask = None if kind == "none" else torch.rand(2, 1, 1, 9, generator=generator) > 0.4
    if kind == "additive":
        assert mask is not None
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    if kind == "by head":
        mask = torch.randn(2, 6, 1, 9, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), attn_mask=mask, scale=0.3
    )
    # Float32 rounding of sums of ten products of size 1.
    torch.testing.assert_close(_attend_once(query, key, value, mask, 0.3), expected.transpose(1, 2), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_step_compiles_once_for_all_positions(model):
    """One graph, without breaks, for every step; no layer of it repeats the keys of a group, equal dims included."""
    torch._dynamo.reset()
    text, cache, graphs = ids(9), StaticCache(config=model.config, max_cache_len=12), []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(model.__call__, fullgraph=True, dynamic=False, backend=count)
    model(text[:, :5], **{CACHE: cache})
    logits = [step(text[:, place : place + 1], **{CACHE: cache}).logits for place in range(5, 9)]
    assert len(graphs) == 1
    torch.testing.assert_close(torch.cat(logits, dim=1), model(text).logits[:, 5:], **ROUNDING)
    targets = {node.target.__name__ for node in graphs[0].graph.nodes if callable(node.target)}
    assert "scaled_dot_product_attention" not in targets


def test_one_token_in_training_is_subject_to_dropout():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=50, num_hidden_layers=3, attention_dropout=0.5)
    dense, architecture, shapes = LlamaForCausalLM(config), architecture_of(config), SHAPES[:1] * 3
    for block, shape in zip(decoder_layers(dense, architecture.describe()), shapes, strict=True):
        shrink_block(block, architecture.describe(), shape, config)
    model = build(compressed_config(config, architecture, shapes), dense.state_dict()).train()
    drawn = [model(ids(1)).logits for _ in range(4)]
    assert not all(torch.equal(drawn[0], each) for each in drawn[1:])
