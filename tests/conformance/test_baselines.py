"""Rival methods take every family that they do not refuse by name, remove what is asked, and leave the dense model."""

import pytest
import torch

from modegpt import InputError
from modegpt.baselines import BASELINES
from modegpt.baselines.walk import layer_parameters
from modegpt.compress import lent

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
    takes = method in ("shortgpt", "sleb") or plain
    if not takes or (method == "slicegpt" and not (sums and architecture.mlp_factor == 1)):
        with pytest.raises(InputError, match=f"{method} cannot be compared on '{architecture.model_type}'"):
            baseline.require(architecture, method)
        return
    baseline.require(architecture, method)
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
