"""Rival methods take every family that they do not refuse by name, remove what is asked, and leave the dense model."""

from dataclasses import replace

import pytest
import torch

from modegpt.architectures.access import Affine, Layout
from modegpt.baselines import BASELINES
from modegpt.baselines.walk import blocks_of, layer_parameters
from modegpt.running.lending import lent

from .conftest import Pair
from .families import tokens

SHARE = 0.34


def quiet(_stage: str, _done: int, _total: int) -> None:
    pass


def finest(pair: Pair, method: str) -> float:
    """The largest share that a method may remove beyond what was asked: one of its units."""
    family = pair.family
    sizes = layer_parameters(pair.dense)
    if method in ("shortgpt", "sleb"):  # layers of experts and others differ in size
        return max(sizes) / sum(sizes)
    dims = family.dims
    wide = dims.d_model + 1
    units = {
        "flap": 2 * (dims.n_heads + 1) // dims.n_kv_heads * 2 * dims.d_head * wide,
        "wanda-sp": len(sizes) * 4 * wide,
        # One rank of each matrix, of which there are up to 7.
        "svd-llm": len(sizes) * 7 * (dims.d_model + max(dims.d_int, dims.n_heads * dims.d_head * 3)),
        # One direction: of each matrix a row or a column, and of the rotations two rows and columns.
        "slicegpt": len(sizes) * (2 * dims.d_int + 4 * dims.n_heads * dims.d_head + dims.d_int + 4 * wide),
    }
    return units[method] / sum(sizes)


@pytest.mark.parametrize("method", BASELINES)
def test_a_method_removes_what_is_asked_or_refuses_the_family(pair: Pair, method: str):
    baseline, architecture = BASELINES[method], pair.family.architecture
    plain = not (architecture.experts or architecture.whole_attention)
    sums = not architecture.parallel and architecture.adds_mlp and not architecture.mlp_norm
    flat = architecture.query_norm and architecture.norm_input == "flat"
    takes = not architecture.reads_back if method in ("shortgpt", "sleb") else plain
    takes &= method != "slicegpt" or (sums and architecture.mlp_factor == 1)
    takes &= method not in ("flap", "wanda-sp") or not flat
    assert (baseline.refuses(architecture) is None) == bool(takes)
    if not takes:
        return
    before = {name: tensor.clone() for name, tensor in pair.dense.state_dict().items()}
    ids = tokens(4, 20)
    with lent(pair.dense):
        made = baseline.start(pair.dense, ids, quiet)(SHARE)
        with torch.no_grad():
            logits, dense = made.model(ids, use_cache=False).logits, pair.dense(ids, use_cache=False).logits
    assert made.share >= SHARE
    assert made.share <= SHARE + finest(pair, method)
    assert made.removed == round(made.share * sum(layer_parameters(pair.dense)))
    assert torch.isfinite(logits).all()
    assert not torch.allclose(logits, dense, atol=1e-3)
    after = pair.dense.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("method", ["flap", "wanda-sp"])
def test_what_is_counted_as_removed_decides_nothing(pair: Pair, method: str):
    """Weights of heads and neurons that are gone may be anything: the model computes the same."""
    architecture, dims = pair.family.architecture, pair.family.dims
    if BASELINES[method].refuses(architecture) is not None:
        pytest.skip("refused")
    ids, counted = tokens(4, 20), 0
    with lent(pair.dense):
        made = BASELINES[method].start(pair.dense, ids, quiet)(0.6)
    with torch.no_grad():
        before = made.model(ids, use_cache=False).logits
    for block in blocks_of(made.model):
        layout = Layout.dense(architecture, architecture.block_dims(block, dims))
        weights, generator = layout.read(block), torch.Generator().manual_seed(0)
        assert weights.down is not None
        neurons = (weights.down.weight == 0).all(0)
        heads = (weights.output.weight == 0).all(0).view(dims.n_heads, -1).all(1)
        groups = heads.view(dims.n_kv_heads, -1).all(1)
        if dims.n_kv_heads == 1:  # query heads go alone, and the key head stays
            groups = torch.zeros_like(groups)
        else:
            assert torch.equal(heads, groups.repeat_interleave(dims.n_heads // dims.n_kv_heads))
        gone = {"query": heads, "key": groups, "value": groups}
        new = {role: scramble(getattr(weights, role), part, dims.d_head, generator) for role, part in gone.items()}
        ups = tuple(scramble(up, neurons, 1, generator) for up in weights.ups)
        layout.write(block, replace(weights, **new, ups=ups))
        counted += sum(int(part.sum()) * dims.d_head * inputs(getattr(weights, role)) for role, part in gone.items())
        counted += int(heads.sum()) * dims.d_head * dims.d_model
        counted += int(neurons.sum()) * (dims.d_model + sum(inputs(up) for up in weights.ups))
    with torch.no_grad():
        assert torch.equal(made.model(ids, use_cache=False).logits, before)
    biases = sum(p.numel() for p in made.model.parameters()) - sum(p.numel() for p in pair.dense.parameters())
    assert made.removed == counted - biases


def inputs(matrix: Affine) -> int:
    return matrix.weight.shape[1] + (matrix.bias is not None)


def scramble(matrix: Affine, gone: torch.Tensor, width: int, generator: torch.Generator) -> Affine:
    rows = gone.repeat_interleave(width)
    weight = torch.where(rows[:, None], torch.randn(matrix.weight.shape, generator=generator), matrix.weight)
    if matrix.bias is None:
        return Affine(weight, None)
    return Affine(weight, torch.where(rows, torch.randn(len(rows), generator=generator), matrix.bias))
