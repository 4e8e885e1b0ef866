"""ShortGPT and SLEB: which layers go."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from modegpt.baselines import BASELINES
from modegpt.baselines.layers import without
from modegpt.checks.tiny import random_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


def llama(n_layers: int = 5) -> PreTrainedModel:
    return random_model(LlamaConfig(**SIZES, num_hidden_layers=n_layers), seed=3)


def windows(rows: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(0))


def loss(model: Any, ids: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()))


@pytest.mark.parametrize("method", ["shortgpt", "sleb"])
def test_a_layer_that_adds_nothing_goes_first(method: str):
    dense = llama()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        nn.init.zeros_(dense.model.layers[3].get_submodule(name).weight)
    ids = windows()
    made = BASELINES[method].start(dense, ids, quiet)(0.2)
    assert made.share == pytest.approx(0.2, rel=1e-12)
    if method == "shortgpt":  # a layer may even be worse than none, which only the loss tells
        assert not list(made.model.model.layers[3].parameters())
        with torch.no_grad():
            assert torch.equal(made.model(ids).logits, dense(ids).logits)
    else:
        assert loss(made.model, ids) <= loss(dense, ids) + 1e-6  # float32, of losses near 10


def test_sleb_takes_the_layer_of_the_least_loss_each_time():
    dense, ids = llama(), windows()
    at = BASELINES["sleb"].start(dense, ids, quiet)
    expected: list[int] = []
    for share in (0.2, 0.4):
        left = [index for index in range(5) if index not in expected][1:-1]
        losses = {index: loss(without(dense, [*expected, index]).model, ids) for index in left}
        expected.append(min(losses, key=lambda index: losses[index]))
        layers = at(share).model.model.layers
        assert [index for index in range(5) if not list(layers[index].parameters())] == sorted(expected)


def test_sleb_keeps_the_first_and_the_last_layer_even_where_they_add_nothing():
    """On a text that the model writes itself, where every other layer is missed."""
    dense = llama()
    for index, name in itertools.product((0, 4), ("self_attn.o_proj", "mlp.down_proj")):
        nn.init.zeros_(dense.model.layers[index].get_submodule(name).weight)
    ids = windows(length=1)
    with torch.no_grad():
        for _ in range(15):
            ids = torch.cat((ids, dense(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    alone = [loss(without(dense, [index]).model, ids) for index in range(5)]
    assert alone[0] == alone[4] < min(alone[1:4])
    layers = BASELINES["sleb"].start(dense, ids, quiet)(0.2).model.model.layers
    out = [index for index in range(5) if not list(layers[index].parameters())]
    assert out == [min((1, 2, 3), key=lambda index: alone[index])]


def test_a_smaller_sparsity_after_a_larger_one_is_what_it_is_alone():
    dense, ids = llama(), windows()
    at = BASELINES["sleb"].start(dense, ids, quiet)
    at(0.6)
    again, alone = at(0.2), BASELINES["sleb"].start(dense, ids, quiet)(0.2)
    assert again.removed == alone.removed
    assert loss(again.model, ids) == loss(alone.model, ids)


def test_layers_that_are_passed_by_are_as_if_they_were_not_there(tmp_path: Path):
    """A stock model of fewer layers, with the weights of those that stay, computes the same."""
    dense, ids = llama(), windows()
    made = without(dense, [1, 3])
    fewer = llama(3)
    for target, source in zip(fewer.model.layers, (dense.model.layers[index] for index in (0, 2, 4)), strict=True):
        target.load_state_dict(source.state_dict())
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        fewer.get_submodule(name).load_state_dict(dense.get_submodule(name).state_dict())
    fewer.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(made.model(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits)
