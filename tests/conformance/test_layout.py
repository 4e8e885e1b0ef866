"""The canonical layout: what is read computes what the stored projections do, and writing it back changes nothing."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modegpt.architectures.access import HEADS, Affine, BlockWeights, Layout
from modegpt.modeling_modegpt import ATTENTION_DEFAULTS, decoder_layers

from .conftest import Pair


def first_block(pair: Pair):
    """Return a copy of the first block, but for those whose MLP has no rank."""
    return copy.deepcopy(decoder_layers(pair.dense, pair.family.architecture.describe())[pair.family.first_cut])


def flat(weights: BlockWeights) -> list[torch.Tensor]:
    affines = [weights.query, weights.key, weights.value, weights.output, *weights.ups]
    affines += [] if weights.down is None else [weights.down]
    affines += [affine for expert in weights.experts for affine in (*expert.ups, expert.down)]
    return [tensor for affine in affines for tensor in affine if tensor is not None] + list(weights.norms)


def test_the_states_are_those_of_the_canonical_weights(pair: Pair):
    architecture, dims = pair.family.architecture, pair.family.dims
    if architecture.whole_attention:
        pytest.skip("the attention stays as it is")
    layout, block = Layout.dense(architecture, dims), first_block(pair).double()
    weights, x = layout.read(block), torch.randn(2, 5, dims.d_model, dtype=torch.float64)
    for role in HEADS:
        affine = getattr(weights, role)
        with torch.no_grad():
            states = layout.states(role, architecture.projection(block, role)(x))
            expected = torch.nn.functional.linear(x, affine.weight, affine.bias)
        # float64 rounding of sums of 32 terms, in the order of the kernel's choice.
        torch.testing.assert_close(states, expected, rtol=0, atol=1e-12)


def test_what_is_read_can_be_written_back(pair: Pair):
    layout, block, zeroed = (
        Layout.dense(pair.family.architecture, pair.family.dims),
        first_block(pair),
        first_block(pair),
    )
    with torch.no_grad():
        for module in pair.family.architecture.narrowed(zeroed):
            for parameter in module.parameters():
                parameter.zero_()
    layout.write(zeroed, layout.read(block))
    assert all(torch.equal(tensor, block.state_dict()[name]) for name, tensor in zeroed.state_dict().items())


def test_every_stored_number_is_read_once(pair: Pair):
    layout, block = Layout.dense(pair.family.architecture, pair.family.dims), first_block(pair)
    read = torch.cat([tensor.flatten() for tensor in flat(layout.read(block))]).sort().values
    modules = pair.family.architecture.narrowed(block)
    modules += pair.family.architecture.norms(block) if pair.family.architecture.interleaved else []
    stored = torch.cat([parameter.flatten() for module in modules for parameter in module.parameters()]).sort().values
    assert torch.equal(read, stored)


def test_the_format_is_documented_to_the_last_key(pairs: dict[str, Pair]):
    text = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(\w+)`", text))
    for pair in pairs.values():
        assert pair.family.architecture.describe().keys() <= told
    assert set(ATTENTION_DEFAULTS) <= told


def test_biases_change_and_none_appears(pair: Pair):
    if pair.family.architecture.whole_attention:
        pytest.skip("the attention stays as it is")
    layout, block = Layout.dense(pair.family.architecture, pair.family.dims), first_block(pair)
    weights = layout.read(block)
    weight, bias = weights.output
    shifted = torch.ones(len(weight)) if bias is None else bias.detach() + 1.0
    changed = replace(weights, output=Affine(weight, shifted))
    if bias is None:
        with pytest.raises(AssertionError, match="not added or removed"):
            layout.write(block, changed)
    else:
        layout.write(block, changed)
        assert torch.equal(pair.family.architecture.projection(block, "output").bias, shifted)
