"""The solvers on explicit states: what they fold into the weights is what the mathematics decided."""

from dataclasses import replace

import pytest
import torch

from decompose.oracles import features
from modegpt.architectures import Dimensions
from modegpt.architectures.access import Affine, BlockWeights
from modegpt.config import PRESETS, CompressionConfig
from modegpt.config import SOLVERS as NAMES
from modegpt.decompose.energy import energy_scores
from modegpt.decompose.fold import folded_up
from modegpt.decompose.logits import gram, logit_selection
from modegpt.decompose.nystrom import highest, refit_weight
from modegpt.decompose.saliency import saliencies
from modegpt.moments import SHAPES, BlockMoments
from modegpt.solvers import SOLVERS, split_rank
from modegpt.solvers.bias import centred
from modegpt.solvers.mlp import FOLD_RIDGE, RIDGE, SALIENCY_RIDGE, as_used, chosen_scores
from modegpt.solvers.query_key import RIDGE as LOGITS_RIDGE

ROUNDING = {"rtol": 1e-9, "atol": 1e-9}
"""float64 through solves with a condition number below 1e6."""
TOKENS = 200
CONFIG = CompressionConfig()


def dims_of(rotary_dim: int = 4) -> Dimensions:
    return Dimensions(n_layers=1, d_model=10, d_int=12, d_head=6, n_heads=4, n_kv_heads=2, rotary_dim=rotary_dim)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weights_of(dims: Dimensions, bias: bool = True) -> BlockWeights:
    def affine(out: int, width: int) -> Affine:
        return Affine(normal(out, width), normal(out) if bias else None)

    queries, keys = dims.n_heads * dims.d_head, dims.n_kv_heads * dims.d_head
    return BlockWeights(
        query=affine(queries, dims.d_model),
        key=affine(keys, dims.d_model),
        value=affine(keys, dims.d_model),
        output=affine(dims.d_model, queries),
        ups=(affine(dims.d_int, dims.d_model), affine(dims.d_int, dims.d_model)),
        down=affine(dims.d_model, dims.d_int),
    )


def apply(affine: Affine, x: torch.Tensor) -> torch.Tensor:
    y = x @ affine.weight.double().T
    return y if affine.bias is None else y + affine.bias


def moments_of(dims: Dimensions, **states: torch.Tensor) -> BlockMoments:
    """All sums of some states, in float64 (the streaming ones round products to float32)."""
    sums = {}
    for source, x in states.items():
        heads = x.unflatten(-1, (-1, dims.d_head)).transpose(0, 1) if source in ("query", "key", "value") else x
        moment = heads.mT @ heads
        sums |= {source: moment, f"{source}_moment": moment, f"{source}_sum": x.sum(0)}
        if source in ("query", "key"):
            sums |= {source: heads.square().sum(1), f"{source}_sum": heads.sum(1)}
    for name, total in sums.items():
        assert name not in SHAPES or total.shape == SHAPES[name](dims)
    return BlockMoments(sums, len(next(iter(states.values()))))


def heads_of(states: torch.Tensor, n_heads: int) -> torch.Tensor:
    return states.unflatten(-1, (n_heads, -1)).transpose(0, 1)


def rotate(states: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of `(heads, tokens, d)` by `(heads, pairs)` frequencies; the rest is left as it is."""
    n_pairs = frequencies.shape[1]
    angle = torch.arange(states.shape[1])[:, None] * frequencies[:, None]
    first, second, plain = states.split([n_pairs, n_pairs, states.shape[2] - 2 * n_pairs], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, plain), dim=-1)


def test_the_names_are_those_of_the_settings():
    assert {module: tuple(solvers) for module, solvers in SOLVERS.items()} == NAMES
    assert {preset: set(modules) for preset, modules in PRESETS.items()} == {"paper": set(NAMES), "best": set(NAMES)}
    assert [CompressionConfig(solver="paper").solver_of(module) for module in NAMES] == ["leverage", "cr", "svd"]
    mixed = CompressionConfig(solver="best", qk_solver="cr")
    assert [mixed.solver_of(module) for module in NAMES] == ["saliency", "cr", "context"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rotary_dim", [4, 6])
def test_corrections_folded_into_the_query_give_the_logits_that_were_decided(rotary_dim, bias):
    torch.manual_seed(1)
    dims, rank = dims_of(rotary_dim), 4
    weights = weights_of(dims, bias)
    x = normal(30, dims.d_model)
    half, per_group = rotary_dim // 2, dims.n_heads // dims.n_kv_heads
    table = 0.7 ** torch.arange(half)
    frequencies = table.expand(dims.n_heads, -1)
    q = rotate(heads_of(apply(weights.query, x), dims.n_heads), frequencies)
    k = rotate(heads_of(apply(weights.key, x), dims.n_kv_heads), frequencies[: dims.n_kv_heads])
    k = k.repeat_interleave(per_group, dim=0)
    moment = gram(q, k, (q @ k.mT / 10).softmax(-1), rotary_dim)

    decision = SOLVERS["qk"]["logits"].decide(weights, dims, BlockMoments({"logits": moment}), rank, CONFIG)
    n_pairs, n_plain = split_rank(rank, dims)
    chosen = logit_selection(moment, dims.n_kv_heads, n_pairs, n_plain, rotary_dim, LOGITS_RIDGE)
    assert decision.pairs is not None
    assert torch.equal(decision.pairs, chosen.pairs)
    assert decision.error == chosen.error > 0
    coefficients = torch.zeros(dims.n_heads, dims.d_head, dtype=torch.float64)
    for head in range(dims.n_heads):
        pairs, plain = chosen.pairs[head // per_group], chosen.plain[head // per_group]
        coefficients[head, pairs], coefficients[head, pairs + half] = chosen.turns[head].T
        coefficients[head, plain] = chosen.gains[head]
    wanted = (features(q, k, rotary_dim) @ coefficients[:, None, :, None]).squeeze(-1)

    narrow_q = heads_of(apply(decision.weights["query"], x), dims.n_heads)
    narrow_k = heads_of(apply(decision.weights["key"], x), dims.n_kv_heads)
    kept = table[decision.pairs]
    narrow_q = rotate(narrow_q, kept.repeat_interleave(per_group, dim=0))
    narrow_k = rotate(narrow_k, kept).repeat_interleave(per_group, dim=0)
    torch.testing.assert_close(narrow_q @ narrow_k.mT, wanted, **ROUNDING)
    assert (decision.weights["query"].bias is None) != bias


def products(dims, weights, x, shift=0.0):
    q, k = apply(weights.query, x), apply(weights.key, x) + shift
    return SOLVERS["qk"]["logits"].decide(weights, dims, moments_of(dims, query=q, key=k), 4, CONFIG)


def test_without_a_rotary_embedding_a_shift_of_all_keys_changes_nothing():
    torch.manual_seed(2)
    dims = dims_of(0)
    weights, x = weights_of(dims), normal(TOKENS, dims.d_model)
    plain, shifted = (products(dims, weights, x, shift) for shift in (0.0, 5 * normal(dims.n_kv_heads * dims.d_head)))
    for role in ("query", "key"):
        torch.testing.assert_close(shifted.weights[role].weight, plain.weights[role].weight, **ROUNDING)
        torch.testing.assert_close(shifted.weights[role].bias, plain.weights[role].bias, **ROUNDING)
    assert shifted.error == pytest.approx(plain.error, rel=1e-9)
    assert plain.pairs is None

    # The error is that of the logits, each query's mean over the keys apart.
    def logits(query, key):
        q, k = heads_of(query, dims.n_heads), heads_of(key, dims.n_kv_heads).repeat_interleave(2, dim=0)
        scores = q @ k.mT
        return scores - scores.mean(-1, keepdim=True)

    dense = logits(apply(weights.query, x), apply(weights.key, x))
    narrow = logits(apply(plain.weights["query"], x), apply(plain.weights["key"], x))
    assert plain.error == pytest.approx(((dense - narrow).norm() / dense.norm()).item(), rel=1e-9)
    assert 0 < plain.error < 1


@pytest.mark.parametrize("solver", ["energy", "saliency"])
def test_a_mean_that_a_bias_can_carry_is_kept_exactly(solver: str):
    torch.manual_seed(3)
    dims, config = dims_of(), CONFIG
    weights = weights_of(dims)
    assert weights.down is not None
    z, u = normal(TOKENS, dims.d_int) + 3, normal(TOKENS, dims.n_heads * dims.d_head) - 2
    moments = moments_of(dims, mlp=z, context=u, value=normal(TOKENS, dims.n_kv_heads * dims.d_head) - 2)

    mlp = SOLVERS["mlp"][solver].decide(weights, dims, moments, 7, config)
    kept = [(mlp.weights["ups"][0].weight[i] == weights.ups[0].weight).all(1).nonzero().item() for i in range(7)]
    torch.testing.assert_close(
        apply(mlp.weights["down"], z[:, kept]).mean(0), apply(weights.down, z).mean(0), **ROUNDING
    )
    assert torch.equal(mlp.weights["ups"][1].bias, weights.ups[1].bias[kept])
    papers = SOLVERS["mlp"]["leverage"].decide(weights, dims, moments, 7, config)
    assert torch.equal(papers.weights["down"].bias, weights.down.bias)

    vo = SOLVERS["vo"]["context"].decide(weights, dims, moments, 4, config)
    # The new value weights are Bᵀ of the old ones, and these have full row rank in a head: so B can be read off.
    values = weights.value.weight.unflatten(0, (dims.n_kv_heads, -1))
    narrow = vo.weights["value"].weight.unflatten(0, (dims.n_kv_heads, -1))
    basis = (narrow @ torch.linalg.pinv(values)).mT
    wide = torch.block_diag(*basis.repeat_interleave(2, dim=0))
    torch.testing.assert_close(
        apply(vo.weights["output"], u @ wide).mean(0), apply(weights.output, u).mean(0), **ROUNDING
    )
    old_bias = weights.value.bias.unflatten(0, (dims.n_kv_heads, 1, -1))
    torch.testing.assert_close(vo.weights["value"].bias, (old_bias @ basis).flatten(), **ROUNDING)
    assert torch.equal(
        SOLVERS["vo"]["svd"].decide(weights, dims, moments, 4, config).weights["output"].bias, weights.output.bias
    )


def test_states_that_hardly_vary_are_constants():
    """What float32 leaves of them would have negative directions, of which no solver could make anything."""
    torch.manual_seed(5)
    dims, count = dims_of(), 6
    z = normal(TOKENS, dims.d_int)
    z[:, :count] = 100 + 1e-2 * normal(TOKENS, count)  # variance over mean square: 1e-8
    moments = moments_of(dims, mlp=z)
    moments.sums["mlp"] = (z.float().mT @ z.float()).double()
    left = centred(moments, "mlp")
    assert not left[:count].any()
    assert not left[:, :count].any()
    rest = z[:, count:] - z[:, count:].mean(0)
    torch.testing.assert_close(left[count:, count:], rest.mT @ rest, rtol=1e-4, atol=1e-4 * TOKENS)


@pytest.mark.parametrize("solver", ["energy", "saliency"])
def test_with_a_bias_the_error_is_of_what_varies_and_without_one_of_everything(solver: str):
    torch.manual_seed(4)
    dims = dims_of()
    z = normal(TOKENS, dims.d_int) + 3
    weights = weights_of(dims)
    assert weights.down is not None
    moments = moments_of(dims, mlp=z)
    varying = z - z.mean(0)
    torch.testing.assert_close(centred(moments, "mlp"), varying.T @ varying, **ROUNDING)
    carried = SOLVERS["mlp"][solver].decide(weights, dims, moments, 7, CONFIG)
    kept = [(carried.weights["ups"][0].weight[i] == weights.ups[0].weight).all(1).nonzero().item() for i in range(7)]
    lost = apply(weights.down, z) - apply(carried.weights["down"], z[:, kept])
    dense = varying @ weights.down.weight.T
    assert carried.error == pytest.approx((lost.norm() / dense.norm()).item(), rel=1e-9)

    del moments.sums["mlp_sum"]
    torch.testing.assert_close(centred(moments, "mlp"), z.T @ z, **ROUNDING)
    plain = weights_of(dims, bias=False)
    result = SOLVERS["mlp"][solver].decide(plain, dims, moments, 7, CONFIG)
    assert result.weights["down"].bias is None


@pytest.mark.parametrize("solver", ["energy", "saliency"])
def test_what_is_silent_or_missing_is_noted(solver: str):
    torch.manual_seed(5)
    dims = dims_of()
    weights = weights_of(dims)
    z, u = normal(TOKENS, dims.d_int), normal(TOKENS, dims.n_heads * dims.d_head)
    z[:, :7], u[:, :12] = 0, 0
    moments = moments_of(dims, mlp=z, context=u)
    mlp = SOLVERS["mlp"][solver].decide(weights, dims, moments, 6, CONFIG)
    assert mlp.notes[0] == "7 neurons are zero on the whole calibration text"
    assert mlp.notes[1].startswith("the kept moment lacks 1 of 6 ranks")
    vo = SOLVERS["vo"]["context"].decide(weights, dims, moments, 3, CONFIG)
    assert vo.notes == ["the kept contexts lack 6 ranks; a pseudo-inverse was used"]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_moment_of_some_tokens_gets_the_energies_of_all(bias: bool):
    """The correlations stay; a neuron that only the other tokens use is told by no other."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(60, 5, generator=generator, dtype=torch.float64) + 0.5
    z[::3, 3], z[:, 4] = 0, 0
    some = z[::3]
    sums = {"mlp": some.T @ some, "mlp_energy": z.square().sum(0)}
    if bias:
        sums["mlp_sum"] = some.sum(0)
    found = as_used(BlockMoments(sums, n_tokens=20, every=3))
    assert found.dtype == torch.float32
    found = found.double()
    expected = some[:, :3].T.cov() if bias else some[:, :3].T @ some[:, :3]
    roots = found.diagonal()[:3].sqrt(), expected.diagonal().sqrt()
    correlations = (part / root[:, None] / root for part, root in zip((found[:3, :3], expected), roots, strict=True))
    rounding = {"rtol": 1e-6, "atol": 1e-6}  # float32, some ten operations
    torch.testing.assert_close(*correlations, **rounding)
    grown = sums["mlp_energy"][:3] / some[:, :3].square().sum(0)
    varies = (some - some.mean(0) if bias else some)[:, :3].square().sum(0)
    torch.testing.assert_close(found.diagonal()[:3], varies * grown, **rounding)
    assert found[3, 3] == sums["mlp_energy"][3].float() > 0
    assert not found[3, :3].any()
    assert not found[4].any()


@pytest.mark.parametrize("name", ["energy", "saliency"])
def test_neurons_count_by_what_the_norm_of_the_mlps_output_lets_through(name):
    torch.manual_seed(7)
    dims, rank = dims_of(), 5
    plain = weights_of(dims, bias=False)
    assert plain.down is not None
    gain = torch.logspace(-2, 2, dims.d_model, dtype=torch.float64)
    gain[3] = 0
    heard = replace(plain, down=Affine(gain.sqrt()[:, None] * plain.down.weight, None))
    z = normal(TOKENS, dims.d_int)
    moments = moments_of(dims, mlp=z)
    del moments.sums["mlp_sum"]  # without a bias the means are not taken
    with_norm, as_heard, as_it_is = (
        SOLVERS["mlp"][name].decide(weights, dims, moments, rank, CONFIG)
        for weights in (replace(plain, mlp_gain=gain), heard, plain)
    )
    rows = [decision.weights["ups"][0].weight for decision in (with_norm, as_heard, as_it_is)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    # Least squares go row by row, so the gain changes no row of the refit, and one that is 0 loses none.
    refitted = gain.sqrt()[:, None] * with_norm.weights["down"].weight
    torch.testing.assert_close(refitted, as_heard.weights["down"].weight, **ROUNDING)
    assert bool(with_norm.weights["down"].weight[3].any())
    # The error is that of what the MLP puts out, and the gain does not count in it.
    kept = [index for index, row in enumerate(plain.ups[0].weight) if (rows[0] == row).all(1).any()]
    y = apply(plain.down, z)
    lost = (y - apply(with_norm.weights["down"], z[:, kept])).norm() / y.norm()
    assert with_norm.error == pytest.approx(lost.item(), rel=1e-9)


def test_of_two_that_tell_the_same_the_saliency_drops_both_and_is_not_followed():
    """Three pairs of look-alikes, and four neurons of their own that write less: one of each pair can go, not both."""
    torch.manual_seed(0)
    pairs, others = normal(4000, 3), normal(4000, 4)
    z = torch.cat((pairs + 0.01 * normal(4000, 3), pairs + 0.01 * normal(4000, 3), others), dim=1)
    down = torch.linalg.qr(normal(10, 10)).Q * torch.tensor([3.0] * 6 + [1.5] * 4, dtype=torch.float64)
    moment = z.mT @ z
    alone, energies = saliencies(moment, down, SALIENCY_RIDGE), energy_scores(moment, down)
    assert set(highest(alone, 4).tolist()) == {6, 7, 8, 9}
    assert torch.equal(chosen_scores([alone, energies], moment, down, 4), energies)
    # Where no neuron tells of another the two orders are one, and the first stays.
    lone = torch.eye(10, dtype=torch.float64)
    alone, energies = saliencies(lone, down, SALIENCY_RIDGE), energy_scores(lone, down)
    assert chosen_scores([alone, energies], lone, down, 4) is alone
    assert chosen_scores([alone], moment, down, 4) is alone


def test_the_bias_of_an_up_row_is_folded_with_it():
    torch.manual_seed(1)
    dims = dims_of()
    weights, z, a = weights_of(dims), normal(TOKENS, dims.d_int), normal(TOKENS, dims.d_int)
    moments = moments_of(dims, mlp=z)
    moments.sums["gate"] = (a.T @ a).float()
    found = SOLVERS["mlp"]["energy"].ahead(weights, dims, moments, 7, CONFIG).weights["ups"]
    kept = torch.tensor([(weights.ups[0].weight == row).all(1).nonzero().item() for row in found[0].weight])
    moment, down = as_used(moments), weights.down.weight.float()
    up = torch.cat((weights.ups[1].weight, weights.ups[1].bias[:, None]), dim=1).float()
    rows = folded_up(moments["gate"], up, down, kept, refit_weight(moment, down, kept, RIDGE), FOLD_RIDGE)
    torch.testing.assert_close(found[1].weight, rows[:, :-1])
    torch.testing.assert_close(found[1].bias, rows[:, -1])


def test_a_neuron_that_only_uncounted_tokens_use_is_not_dead():
    torch.manual_seed(1)
    dims = dims_of()
    z = normal(60, dims.d_int)
    z[::3, 3], z[:, 4] = 0, 0
    some = z[::3]
    moments = BlockMoments({"mlp": some.T @ some, "mlp_energy": z.square().sum(0)}, 20, every=3)
    notes = SOLVERS["mlp"]["energy"].ahead(weights_of(dims, bias=False), dims, moments, 7, CONFIG).notes
    assert notes == ["1 neurons are zero on the whole calibration text"]


def test_contexts_are_fitted_to_what_varies():
    """With a bias, a mean of the contexts changes neither the output weights nor the error."""
    torch.manual_seed(4)
    dims = dims_of()
    weights, u = weights_of(dims), normal(TOKENS, dims.n_heads * dims.d_head)
    first, second = (
        SOLVERS["vo"]["context"].decide(weights, dims, moments_of(dims, context=u + shift), 4, CONFIG)
        for shift in (0, 5)
    )
    close = {"rtol": 1e-6, "atol": 1e-6}  # float32 weights
    torch.testing.assert_close(first.weights["output"].weight, second.weights["output"].weight, **close)
    assert first.error == pytest.approx(second.error, rel=1e-6)


@pytest.mark.parametrize("d_head", range(2, 24))
def test_a_rank_is_split_into_parts_that_the_head_has(d_head: int):
    """Of an even head with a rotary embedding only even ranks are asked for."""
    for rotary_dim in range(0, d_head + 1, 2):
        for rank in range(1, d_head + 1):
            if rotary_dim and d_head % 2 == 0 and rank % 2:
                continue
            pairs, plain = split_rank(rank, replace(dims_of(rotary_dim), d_head=d_head))
            assert 2 * pairs + plain == rank
            assert 0 <= 2 * pairs <= rotary_dim
            assert 0 <= plain <= d_head - rotary_dim


@pytest.mark.parametrize("solver", ["energy", "saliency"])
def test_neurons_that_hardly_vary_under_a_bias_can_be_chosen(solver: str):
    """What is left of them beside the mean is as much rounding error as variance."""
    torch.manual_seed(6)
    dims = replace(dims_of(), d_int=256)
    z = (3 + torch.rand(256)) * (1 + 0.01 * torch.randn(4096, 5) @ torch.randn(5, 256))
    moments = BlockMoments({"mlp": (z.T @ z).double(), "mlp_sum": z.double().sum(0)}, len(z))
    assert torch.linalg.eigvalsh(centred(moments, "mlp"))[0] < 0
    decision = SOLVERS["mlp"][solver].decide(weights_of(dims), dims, moments, 100, CONFIG)
    assert decision.weights["down"].weight.isfinite().all()
    assert decision.error < 1


def test_tokens_of_no_weight_have_a_mean():
    moments = BlockMoments({"mlp": torch.zeros(4, 4).double(), "mlp_sum": torch.zeros(4).double()}, 0.0)
    assert not moments.mean("mlp").any()
    assert not centred(moments, "mlp").any()
