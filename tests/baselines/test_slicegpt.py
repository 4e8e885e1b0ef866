"""SliceGPT: the projected model computes what the sliced one does, whose matrices are written out here."""

import copy
from typing import Any

import pytest
import torch
from test_layers import SIZES, llama, quiet, windows
from torch import Tensor, nn
from transformers import LlamaConfig, OPTConfig, Qwen3Config, StableLmConfig

from modegpt.baselines import BASELINES, slicegpt
from modegpt.baselines.walk import Decoder
from modegpt.checks.tiny import random_model

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def opt() -> Any:
    config = OPTConfig(
        vocab_size=61,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    )
    return random_model(config, seed=2)


def streams(model: Any, layers: Any, middle: str, ids: Tensor) -> list[Tensor]:
    """The residual stream before each attention and each MLP, `(tokens, d_model)`."""
    seen: list[Tensor] = []

    def note(_module: Any, inputs: Any) -> None:
        seen.append(inputs[0].flatten(0, -2))

    first = {"post_attention_layernorm": "input_layernorm", "final_layer_norm": "self_attn_layer_norm"}[middle]
    hooks = [layer.get_submodule(name).register_forward_pre_hook(note) for layer in layers for name in (first, middle)]
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_stream_has_as_many_directions_as_the_parameters_say(family: str):
    dense, middle = (llama(3), "post_attention_layernorm") if family == "llama" else (opt(), "final_layer_norm")
    made = BASELINES["slicegpt"].start(dense, windows(4, 24), quiet)(0.3)
    layers = made.model.base_model.layers if family == "llama" else made.model.model.decoder.layers
    ranks = set()
    for stream in streams(made.model, layers, middle, windows(4, 24)):
        centred = stream - stream.mean(-1, keepdim=True) if family == "opt" else stream
        # Float32: what is projected away is 1e-7 of the stream, and the least direction kept well above 1e-4.
        ranks.add(int(torch.linalg.matrix_rank(centred.double(), rtol=1e-5)))
    (rank,) = ranks
    removed = 0
    for index, block in enumerate(layers):
        behind = 32 if index == len(layers) - 1 else rank
        total = sum(parameter.numel() for parameter in block.parameters())
        kept = rank * rank + rank * behind
        if family == "llama":
            kept += rank * (32 + 16 + 16) + 32 * rank + rank * 2 * 48 + 48 * behind
        else:
            kept += 3 * 32 * (rank + 1) + 33 * rank + 64 * (rank + 1) + 65 * behind
        removed += total - kept
    assert made.removed == removed


def test_the_directions_are_those_of_the_largest_energy():
    """Of the first two streams, which are told from the dense model: what is cut off them is the least that can be."""
    dense, ids = llama(3).double(), windows(4, 24)
    made = BASELINES["slicegpt"].start(dense, ids, quiet)(0.25)
    after = streams(made.model, made.model.model.layers, "post_attention_layernorm", ids)
    before = streams(dense, dense.model.layers, "post_attention_layernorm", ids)[:1]
    known = copy.deepcopy(dense)
    rank = int(torch.linalg.matrix_rank(after[0], rtol=1e-9))
    values, vectors = torch.linalg.eigh(before[0].mT @ before[0])
    basis = vectors[:, -rank:]
    known.model.embed_tokens.weight = nn.Parameter(known.model.embed_tokens.weight @ basis @ basis.mT)
    before.append(streams(known, known.model.layers, "post_attention_layernorm", ids)[1])
    for cut, whole in zip(after, before, strict=False):
        values = torch.linalg.eigvalsh(whole.mT @ whole)
        # The norm of attention's input is taken in float32, so the second stream is known to 1e-7 of its size.
        torch.testing.assert_close((whole - cut).square().sum(), values[:-rank].sum(), rtol=1e-4, atol=0)
        assert values[:-rank].sum() < 0.5 * values[-rank:].sum()


def test_what_every_norm_takes_off_takes_no_direction():
    """A constant in all coordinates of the stream: a model whose norms are layer norms computes the same with it."""
    dense, ids = opt().double(), windows(4, 24)
    offset = copy.deepcopy(dense)
    offset.model.decoder.embed_positions.weight.data += 3
    plain, other = (BASELINES["slicegpt"].start(model, ids, quiet)(0.3).model for model in (dense, offset))
    with torch.no_grad():
        expected, found = plain(ids, use_cache=False).logits, other(ids, use_cache=False).logits
    # Float64's rounding of streams and logits near 10, some thousand times over; 5e-13 was found.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_it_computes_what_a_sliced_model_does():
    """With every weight cut and turned as the paper has it, a norm without gain, and a `Q` on each connection."""
    dense = random_model(LlamaConfig(**SIZES, num_hidden_layers=3), seed=3).double()
    ids = windows(4, 24)
    made = BASELINES["slicegpt"].start(dense, ids, quiet)(0.25)
    bases = []
    for stream in streams(made.model, made.model.model.layers, "post_attention_layernorm", ids):
        left, values, _ = torch.linalg.svd(stream.mT, full_matrices=False)
        bases.append(left[:, values > 1e-9 * values[0]])  # the span is all that matters
    assert len({basis.shape[1] for basis in bases}) == 1
    assert bases[0].shape[1] < 32
    bases.append(torch.eye(32, dtype=torch.float64))
    with torch.no_grad():
        got, expected = sliced_logits(dense, ids, bases), made.model(ids, use_cache=False).logits
    # transformers' norm computes in float32 whatever the dtype: six of them round at 1e-7, of logits near 10.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    assert (expected - dense(ids).logits).abs().max() > 1


def sliced_logits(dense: Any, ids: Tensor, bases: list[Tensor]) -> Tensor:
    """Run the sliced model: the stream is `(..., rank)` all the way."""
    model = copy.deepcopy(dense.model)
    positions = torch.arange(ids.shape[1])[None]
    tables = model.rotary_emb(dense.model.embed_tokens(ids), positions)
    mask = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
    stream = model.embed_tokens(ids) @ bases[0]
    for index, layer in enumerate(model.layers):
        first, middle, last = bases[2 * index : 2 * index + 3]
        attention, mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            turn(attention.get_submodule(name), layer.input_layernorm.weight, first)
        attention.o_proj.weight = nn.Parameter(middle.mT @ attention.o_proj.weight)
        for name in ("gate_proj", "up_proj"):
            turn(mlp.get_submodule(name), layer.post_attention_layernorm.weight, middle)
        mlp.down_proj.weight = nn.Parameter(last.mT @ mlp.down_proj.weight)
        added, _ = attention(normed(stream, 32), position_embeddings=tables, attention_mask=mask)
        stream = stream @ (first.mT @ middle) + added
        stream = stream @ (middle.mT @ last) + mlp(normed(stream, 32))
    return dense.lm_head(model.norm(stream))


def turn(linear: nn.Linear, gain: Tensor, basis: Tensor) -> None:
    linear.weight = nn.Parameter((linear.weight * gain) @ basis)


def normed(states: Tensor, d_model: int) -> Tensor:
    return states / (states.square().sum(-1, keepdim=True) / d_model + 1e-6).sqrt()


@pytest.mark.parametrize("family", ["qwen3", "stablelm"])
def test_what_cannot_be_folded_away_counts(family: str):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {"qwen3": Qwen3Config, "stablelm": StableLmConfig}
    model = random_model(kinds[family](vocab_size=61, num_key_value_heads=2, **sizes), seed=0)
    decoder = Decoder(model)
    block = decoder.layers[0]
    held = sum(parameter.numel() for parameter in block.parameters())
    norms = [block.input_layernorm, block.post_attention_layernorm]
    folded = sum(parameter.numel() for norm in norms for parameter in norm.parameters())
    # At full rank all but what is folded, the two rotations, and the biases that take over those of the norms.
    added = sum(linear.out_features for name, linear in block.named_modules() if name.endswith(READERS))
    biases = added if family == "stablelm" else 0
    assert slicegpt._sliced_parameters(decoder, 32) == 2 * (held - folded + 2 * 32**2 + biases)
