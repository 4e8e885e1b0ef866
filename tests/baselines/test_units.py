"""FLAP and Wanda-sp: which heads and neurons go, and what is put in their place."""

import gc

import pytest
import torch
from test_layers import SIZES, llama, quiet, windows
from torch import nn
from transformers import GPT2Config, LlamaConfig

from modegpt.baselines import BASELINES
from modegpt.baselines.flap import Spread
from modegpt.checks.tiny import random_model
from modegpt.hidden_states import HiddenStates


def test_spread_is_mean_and_variance():
    torch.manual_seed(0)
    # Far from zero, where a sum of squares in one go would lose the variance.
    rows = torch.randn(400, 7, dtype=torch.float64) * torch.logspace(-3, 3, 7, dtype=torch.float64) + 1e4
    spread = Spread(2)
    for part in rows.split(150):
        spread.add(1, part)
        spread.add(0, part[:, :3])
    for own, width in zip(range(2), (3, 7), strict=True):
        torch.testing.assert_close(spread.means()[own], rows[:, :width].mean(0), rtol=1e-13, atol=0)
        # The smallest variance is 1e-6 at 1e4: rounding of the rows themselves, eps·1e4 over 1e-3, is 2e-9.
        torch.testing.assert_close(spread.variances()[own], rows[:, :width].var(0), rtol=1e-8, atol=0)


def test_flap_removes_constant_neurons_without_a_loss():
    """A neuron that does not vary goes first, and the bias of the down projection takes over what it put out."""
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=1, n_positions=64, **ends)
    dense, ids = random_model(config, seed=1), windows()
    constant = 16
    (block,) = dense.transformer.h
    nn.init.zeros_(block.mlp.c_fc.weight[:, :constant].data)
    size = sum(parameter.numel() for parameter in dense.transformer.h.parameters())
    share = constant * (2 * 32 + 1) / size
    made = BASELINES["flap"].start(dense, ids, quiet)(share)
    assert made.share == pytest.approx(share, rel=1e-12)
    (own,) = made.model.transformer.h
    assert (own.mlp.c_proj.weight[:constant] == 0).all()
    assert not torch.equal(own.mlp.c_proj.bias, block.mlp.c_proj.bias)
    with torch.no_grad():
        # Float32: the bias is rounded once more than the neurons' outputs, of logits near 10.
        torch.testing.assert_close(made.model(ids).logits, dense(ids).logits, rtol=0, atol=1e-4)


def test_flap_counts_the_biases_that_it_adds():
    dense, ids = llama(), windows()
    made = BASELINES["flap"].start(dense, ids, quiet)(0.3)
    removed, d_model = 0, SIZES["hidden_size"]
    for block in made.model.model.layers:
        gone = int((block.mlp.down_proj.weight == 0).all(0).sum())
        removed += 3 * d_model * gone - (d_model if gone else 0)
        # Two queries and one key head go together: 4 heads' worth of query, key, value and output for each group.
        width = d_model // SIZES["num_attention_heads"]
        groups = block.self_attn.o_proj.weight.view(d_model, 2, -1).abs().sum((0, 2)) == 0
        removed += int(groups.sum()) * (2 + 1 + 1 + 2) * width * d_model - (d_model if groups.any() else 0)
        assert (block.mlp.down_proj.bias is not None) == (gone > 0)
        assert (block.self_attn.o_proj.bias is not None) == bool(groups.any())
    assert made.removed == removed
    smallest = 3 * d_model
    total = round(made.removed / made.share)
    assert 0.3 * total <= made.removed < 0.3 * total + (2 + 1 + 1 + 2) * 8 * d_model + smallest


def test_flap_scores_are_standardised_within_a_projection():
    """Of two layers the scale of one's outputs decides nothing: which of its neurons vary does."""
    dense, ids = llama(2), windows()
    found = []
    for _ in range(2):
        made = BASELINES["flap"].start(dense, ids, quiet)(0.3)
        found.append([layer.mlp.down_proj.weight == 0 for layer in made.model.model.layers])
        with torch.no_grad():
            dense.model.layers[1].mlp.down_proj.weight *= 1024  # the last layer: no other sees what it puts out
    assert found[0][1].any()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_flap_takes_the_lowest_of_all_layers():
    """By the definition, written out: fluctuations times weights, squared for attention, standardised, of each head."""
    sizes = {**SIZES, "num_key_value_heads": 4}
    dense, ids = random_model(LlamaConfig(**sizes, num_hidden_layers=2), seed=5), windows(4, 24)
    names, seen = ("self_attn.o_proj", "mlp.down_proj"), {}
    for index, block in enumerate(dense.model.layers):
        for name in names:

            def note(_module: object, inputs: tuple[torch.Tensor], key: tuple[int, str] = (index, name)) -> None:
                seen[key] = inputs[0].flatten(0, 1).double()

            block.get_submodule(name).register_forward_pre_hook(note)
    with torch.no_grad():
        dense(ids)
    scores, sizes_of = [], {"self_attn.o_proj": 4 * 32 * 8, "mlp.down_proj": 3 * 32}
    for (index, name), rows in seen.items():
        weight = dense.model.layers[index].get_submodule(name).weight.double()
        metric = rows.var(0) * weight.square().sum(0)
        metric = metric.square() if name == "self_attn.o_proj" else metric
        metric = (metric - metric.mean()) / metric.std()
        metric = metric.view(4, 8).mean(1) if name == "self_attn.o_proj" else metric
        scores += [(value, index, name, unit) for unit, value in enumerate(metric.tolist())]
    made = BASELINES["flap"].start(dense, ids, quiet)(0.5)
    total, removed, gone = round(made.removed / made.share), 0, set()
    for _value, index, name, unit in sorted(scores):
        if removed >= 0.5 * total:
            break
        removed += sizes_of[name] - (32 if not any(found[:2] == (index, name) for found in gone) else 0)
        gone.add((index, name, unit))
    found = set()
    for index, block in enumerate(made.model.model.layers):
        for name in names:
            zero = (block.get_submodule(name).weight == 0).all(0)
            zero = zero.view(4, 8).all(1) if name == "self_attn.o_proj" else zero
            found |= {(index, name, unit) for unit in zero.nonzero().flatten().tolist()}
    assert {name for _index, name, _unit in gone} == set(names)
    assert found == gone


def test_wanda_takes_the_lowest_weight_times_input():
    dense, ids = random_model(LlamaConfig(**SIZES, num_hidden_layers=1), seed=3), windows()
    block, seen, read = dense.model.layers[0], [], []
    handles = [
        module.register_forward_pre_hook(lambda _m, inputs, into=into: into.append(inputs[0].flatten(0, 1)))
        for module, into in ((block.mlp.down_proj, seen), (block.self_attn.o_proj, read))
    ]
    with torch.no_grad():
        dense(ids)
    for handle in handles:
        handle.remove()
    scores = block.mlp.down_proj.weight.abs().mean(0) * seen[0].norm(dim=0)
    made = BASELINES["wanda-sp"].start(dense, ids, quiet)(0.25)
    own = made.model.model.layers[0]
    gone = (own.mlp.down_proj.weight == 0).all(0)
    # A quarter of two groups of heads is none, so the neurons carry all of it.
    assert not (own.self_attn.o_proj.weight == 0).any()
    assert set(gone.nonzero().flatten().tolist()) == set(scores.argsort()[: int(gone.sum())].tolist())
    assert made.removed == 3 * 32 * int(gone.sum())
    heads = (block.self_attn.o_proj.weight.abs().mean(0) * read[0].norm(dim=0)).view(2, -1).sum(1)
    half = BASELINES["wanda-sp"].start(dense, ids, quiet)(0.5).model.model.layers[0].self_attn.o_proj.weight
    assert (half.view(32, 2, -1) == 0).all(2).all(0).tolist() == [heads[0] < heads[1], heads[1] < heads[0]]


def kept_states() -> list[HiddenStates]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, HiddenStates) and len(found)]


def test_flap_keeps_no_hidden_states():
    before = kept_states()  # of other tests in this process
    at = BASELINES["flap"].start(llama(), windows(), quiet)
    assert all(any(found is known for known in before) for found in kept_states())
    assert at(0.2).share >= 0.2
