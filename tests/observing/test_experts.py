"""Experts of a mixture: what each reads, its moment, and the narrow weights that it gets."""

import copy
import weakref
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from transformers import (
    Cohere2MoeConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
)

from conformance.families import EXPERTS, FAMILIES, GROUPED, GROUPED_EXPERTS, LATENT, LLAMA_4, SIZES, Family, tokens
from decompose.selections import by_loss
from modegpt import compress
from modegpt.architectures import Architecture, Dimensions, architecture_of
from modegpt.architectures.access import Affine, Expert, Layout
from modegpt.checks.tiny import random_model, tiny_config
from modegpt.config import CompressionConfig
from modegpt.decompose.energy import energy_scores
from modegpt.decompose.nystrom import keep_highest, nystrom
from modegpt.formats.checkpoint_files import find_tensors
from modegpt.hidden_states import HiddenStates
from modegpt.importance import outlier_ratio
from modegpt.loading.shards import ShardBlocks, skeleton
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import BlockMoments, record_moments
from modegpt.observing.at_rest import at_rest
from modegpt.observing.experts import combined, routed, told, watched
from modegpt.observing.in_turn import in_turn
from modegpt.observing.inputs import inputs_of
from modegpt.running import expert_refit
from modegpt.running.distributed import Team
from modegpt.running.expert_refit import ExpertRefit
from modegpt.running.scoring import OutlierScorer
from modegpt.running.sizes import EXPERT_STEP
from modegpt.solvers import SOLVERS
from modegpt.solvers.experts import decide, unseen
from modegpt.solvers.mlp import RIDGE, TARGET_RIDGE
from modegpt.sums.token_weights import weighed_by_norm

RANK = 24
N_EXPERTS = 3
WINDOWS = tokens(rows=6, length=16, seed=3)
WITH_EXPERTS = [family for family in FAMILIES if family.dims.n_experts]
WITH_SHARES_BEHIND = [family for family in WITH_EXPERTS if not family.name.startswith("llama4")]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(MixtralConfig(**SIZES, **GROUPED, num_local_experts=N_EXPERTS, num_experts_per_tok=2))


def sizes_of(model: Any) -> tuple[Architecture, Dimensions]:
    architecture = architecture_of(model.config)
    return architecture, architecture.dimensions(model.config)


def recorded(
    model: Any, index: int = 0, weights: torch.Tensor | None = None, dense: Any = None
) -> tuple[BlockMoments, list[Any]]:
    """Return the moments of one block's experts, and all that the experts were called with.

    Of a compressed model, `dense` is what it came from.
    """
    architecture, dims = sizes_of(dense or model)
    block = decoder_layers(model, architecture.describe())[index]
    moments, calls = BlockMoments.zeros(dims, ["experts"]), []
    handle = architecture.mixture(block).register_forward_pre_hook(lambda _module, inputs: calls.append(inputs))
    batches = None if weights is None else weights.split(3)
    with torch.no_grad(), record_moments(block, architecture, dims, moments, batches):
        for batch in WINDOWS.split(3):
            model(batch)
    handle.remove()
    return moments, calls


def activations(experts: Any, states: torch.Tensor, number: int) -> torch.Tensor:
    gate, up = functional.linear(states, experts.gate_up_proj[number]).chunk(2, dim=-1)
    return functional.silu(gate) * up


@torch.no_grad()
def test_what_experts_are_sent_adds_up_to_what_the_mixture_gives(model: Any):
    architecture, _dims = sizes_of(model)
    experts = architecture.mixture(decoder_layers(model, architecture.describe())[1])
    states = torch.randn(40, model.config.hidden_size)
    chosen, shares = torch.randint(N_EXPERTS, (40, 2)), torch.rand(40, 2)
    chosen[chosen == 1] = 0  # one of them gets nothing; a token may even come twice
    total = torch.zeros_like(states)
    numbers = []
    for sent in routed(experts, states, chosen, shares):
        numbers.append(sent.number)
        given = functional.linear(sent.activations, experts.down_proj[sent.number])
        total.index_add_(0, sent.places, sent.shares * given)
    assert numbers == [0, 2]
    # float32, sums of 40 terms in another order.
    torch.testing.assert_close(total, experts(states, chosen, shares), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_moments_are_those_of_the_tokens_sent_by_their_shares(model: Any, weighted: bool):
    weights = torch.rand(WINDOWS.shape) if weighted else None
    moments, calls = recorded(model, weights=weights)
    experts = sizes_of(model)[0].mixture(decoder_layers(model, sizes_of(model)[0].describe())[0])
    expected = torch.zeros_like(moments["experts"])
    of_token = torch.ones(WINDOWS.shape) if weights is None else weights
    for (states, chosen, shares), weight in zip(calls, of_token.split(3), strict=True):
        for token, (numbers, own) in enumerate(zip(chosen.tolist(), shares, strict=True)):
            for number, share in zip(numbers, own, strict=True):
                z = share.double() * activations(experts, states[token], number).detach().double()
                expected[number] += weight.flatten()[token].double() * torch.outer(z, z)
    # Products of float32, added in float64.
    torch.testing.assert_close(moments["experts"], expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert moments.n_tokens == pytest.approx(of_token.sum().item())


SELECTIONS = {
    "leverage": lambda moment, down: nystrom(moment, down, RANK),
    "energy": lambda moment, down: keep_highest(moment, down, energy_scores(moment, down), RANK, RIDGE),
    "saliency": lambda moment, down: keep_highest(moment, down, by_loss(moment, down, RANK), RANK, RIDGE),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_each_expert_is_an_mlp_of_its_own(model: Any, name: str):
    architecture, dims = sizes_of(model)
    moments, _calls = recorded(model)
    block = decoder_layers(model, architecture.describe())[0]
    weights = Layout.dense(architecture, dims).read(block)
    solver = SOLVERS["mlp"][name]
    decision = decide(solver, weights, dims, moments, RANK, CompressionConfig(mlp_solver=name))
    lost = given = 0.0
    for number, (before, after) in enumerate(zip(weights.experts, decision.weights["experts"], strict=True)):
        moment, down = moments["experts"][number], before.down.weight.double()
        result = SELECTIONS[name](moment, down)
        assert torch.equal(after.ups[0].weight, before.ups[0].weight[result.kept])
        assert torch.equal(after.ups[1].weight, before.ups[1].weight[result.kept])
        torch.testing.assert_close(after.down.weight, result.weight.float(), rtol=0, atol=0)
        change = down.clone()
        change[:, result.kept] -= result.weight
        lost += ((change @ moment) * change).sum().item()
        given += ((down @ moment) * down).sum().item()
    assert decision.error == pytest.approx((lost / given) ** 0.5, rel=1e-6)  # the solvers add up the error otherwise
    assert decision.notes == []


def test_the_error_is_that_of_the_outputs_on_the_text(model: Any):
    """With tokens that one expert gets each, what experts lose adds up, and the error is the whole mixture's."""
    single = copy.deepcopy(model)
    for layer in single.model.layers:
        layer.mlp.gate.top_k = 1
    architecture, dims = sizes_of(single)
    moments, calls = recorded(single)
    block = decoder_layers(single, architecture.describe())[0]
    weights = Layout.dense(architecture, dims).read(block)
    decision = decide(SOLVERS["mlp"]["saliency"], weights, dims, moments, RANK, CompressionConfig(solver="best"))
    lost = given = 0.0
    for states, chosen, shares in calls:
        for token in range(len(states)):
            number, share = int(chosen[token, 0]), shares[token, 0]
            narrow = decision.weights["experts"][number]
            gate, up = (functional.linear(states[token], each.weight).detach() for each in narrow.ups)
            z = activations(architecture.mixture(block), states[token], number)
            expected = share * functional.linear(z, weights.experts[number].down.weight)
            found = share * functional.linear((functional.silu(gate) * up).double(), narrow.down.weight.double())
            lost += (expected.double() - found).square().sum().item()
            given += expected.double().square().sum().item()
    assert decision.error == pytest.approx((lost / given) ** 0.5, rel=1e-3)  # float32 states


def test_an_expert_that_gets_no_token_is_chosen_by_its_weights(model: Any):
    lonely = copy.deepcopy(model)
    with torch.no_grad():
        for layer in lonely.model.layers:
            layer.mlp.gate.weight[1] = 0
            layer.mlp.gate.weight[0], layer.mlp.gate.weight[2] = 1, -1  # the other two always have a higher score ...
    architecture, dims = sizes_of(lonely)
    block = decoder_layers(lonely, architecture.describe())[0]
    moments, _calls = recorded(lonely)
    moments.sums["experts"][1] = 0  # ... or nearly always
    weights = Layout.dense(architecture, dims).read(block)
    decision = decide(SOLVERS["mlp"]["saliency"], weights, dims, moments, RANK, CompressionConfig())
    expert, narrow = weights.experts[1], decision.weights["experts"][1]
    scores = unseen(expert).diagonal() * expert.down.weight.double().square().sum(0)
    kept = scores.argsort(descending=True)[:RANK].sort().values
    assert torch.equal(narrow.ups[0].weight, expert.ups[0].weight[kept])
    assert torch.equal(narrow.down.weight, expert.down.weight[:, kept])
    assert decision.notes == ["no token of the calibration text is sent to the experts 1"]


@pytest.mark.parametrize("n_ups", [1, 2])
def test_of_an_expert_that_no_token_reaches_the_rows_into_it_tell(n_ups: int):
    ups = torch.randn(n_ups, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = unseen(Expert(tuple(Affine(up, None) for up in ups), Affine(torch.ones(4, 6), None)))
    expected = torch.diag(torch.stack([(up @ up.mT).diagonal() for up in ups]).prod(0))
    torch.testing.assert_close(moment, expected)


def test_all_experts_of_a_layer_keep_one_width_that_grouped_products_take(model: Any):
    narrow = compress(model, WINDOWS, CompressionConfig(sparsity=0.3, batch_size=4, modules=("mlp",)))
    widths = {layer["mlp_width"] for layer in narrow.config.modegpt["layers"]}
    assert all(width % EXPERT_STEP == 0 and width < SIZES["intermediate_size"] for width in widths)
    for layer in narrow.model.layers:
        width = layer.mlp.experts.down_proj.shape[-1]
        assert layer.mlp.experts.gate_up_proj.shape == (N_EXPERTS, 2 * width, SIZES["hidden_size"])
        assert layer.mlp.experts.intermediate_dim == width
    expected = narrow(WINDOWS).logits
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        narrow.set_experts_implementation(implementation)
        # float32 rounding of logits near 30.
        torch.testing.assert_close(narrow(WINDOWS).logits, expected, rtol=0, atol=1e-3)


CONFIGS = {
    "beside attention": lambda: Cohere2MoeConfig(**SIZES, **GROUPED, **EXPERTS, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**SIZES, **GROUPED, num_local_experts=3, num_experts_per_tok=2),
    "shared expert": lambda: Qwen2MoeConfig(**SIZES, **GROUPED, **EXPERTS, shared_expert_intermediate_size=24),
    "first layers without": lambda: Glm4MoeConfig(**SIZES, **GROUPED, **GROUPED_EXPERTS, head_dim=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_alone_a_run_measures_experts_behind_the_compressed_attention(name: str):
    """What the first layer with experts becomes, told by its definition: the run goes on from the middle of blocks."""
    dense = random_model(CONFIGS[name]())
    architecture, dims = sizes_of(dense)
    config = CompressionConfig(sparsity=0.2, batch_size=3, coverage=0, rarity=0, feedback=False)
    narrow = compress(dense, WINDOWS, config)
    layers = decoder_layers(narrow, architecture.describe())
    ranks = narrow.modegpt_report["layers"]
    for index in range(dims.n_layers):
        if architecture.mixture(layers[index]) is None:
            continue
        # The compressed prefix, its own attention, and the dense experts of this layer.
        model = copy.deepcopy(narrow)
        own = decoder_layers(model, architecture.describe())[index]
        source = decoder_layers(dense, architecture.describe())[index]
        own.set_submodule(architecture.experts, copy.deepcopy(source.get_submodule(architecture.experts)))
        moments, _calls = recorded(model, index, dense=dense)
        weights = Layout.dense(architecture, dims).read(source)
        width = ranks[index]["ranks"]["mlp"]
        decision = decide(SOLVERS["mlp"]["saliency"], weights, dims, moments, width, config)
        found = Layout.dense(architecture, dims).narrowed(narrow.config.modegpt["layers"][index]).read(layers[index])
        for expected, expert in zip(decision.weights["experts"], found.experts, strict=True):
            assert torch.equal(expected.ups[1].weight, expert.ups[1].weight)
            # float32 states, through solves of a condition number that the ridge bounds.
            torch.testing.assert_close(expected.down.weight.float(), expert.down.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", WITH_EXPERTS, ids=lambda family: family.name)
@torch.no_grad()
def test_experts_one_after_another_give_the_stock_modules_bits(family: Family):
    model = family.dense()
    implementation = model.config._experts_implementation
    ids, seen = tokens(), []
    with in_turn(model):
        layers = decoder_layers(model, family.architecture.describe())
        mixtures = [each for each in map(family.architecture.mixture, layers) if each is not None]
        assert mixtures
        expected = model(ids).logits
        with ExitStack() as stack:
            for mixture in mixtures:
                stack.enter_context(watched(mixture, lambda *call: seen.append(call[-1])))
            assert torch.equal(model(ids).logits, expected)
        assert len(seen) == len(mixtures)
        with ExitStack() as stack:
            for mixture, sent in zip(mixtures, seen, strict=True):
                stack.enter_context(told(mixture, iter([sent])))
            assert torch.equal(model(ids).logits, expected)
    assert model.config._experts_implementation == implementation
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("per_token", [1, 2])
@torch.no_grad()
def test_experts_whose_shares_weigh_what_they_read_run_as_others_do(per_token: int):
    """Llama 4's, which its own class runs all on all tokens, on zeros where one is not sent."""
    config = Llama4TextConfig(**LLAMA_4, num_experts_per_tok=per_token)
    stock, ids = random_model(config).double(), tokens()
    model = copy.deepcopy(stock)
    expected, calls = model(ids).logits, []
    with in_turn(model), ExitStack() as stack:
        copied = copy.deepcopy(model)
        for layer in (0, 2):
            mixture = model.model.layers[layer].feed_forward.experts
            stack.enter_context(watched(mixture, lambda *call: calls.append(call)))
        # The rotary embedding is float32, and shares are: both see the same states but for the order of few sums.
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
        del model.model.layers[2]
        assert not torch.allclose(copied(ids).logits, model(ids).logits)
        torch.testing.assert_close(copied(ids).logits, expected, rtol=0, atol=1e-5)
        forgotten = weakref.ref(copied.model.layers[0].feed_forward.experts.down_proj)
        del copied
        assert forgotten() is None, "only the collector of cycles would free its gigabytes"
    for states, chosen, shares, sent in calls[:2]:
        assert chosen.shape == shares.shape == (len(states), per_token)
        assert sum(len(each.places) for each in sent) == chosen.numel()
        assert all((each.shares == 1).all() for each in sent)
    assert {type(each).__module__ for each in model.modules()} == {type(each).__module__ for each in stock.modules()}


@pytest.mark.parametrize("family", WITH_SHARES_BEHIND, ids=lambda family: family.name)
@torch.no_grad()
def test_in_half_precision_experts_give_the_stock_modules_bits(family: Family):
    """Experts without a gate add up in the dtype of the shares, which is float32, and are rounded at the end."""
    model, architecture = family.dense(), family.architecture
    layers = decoder_layers(model, architecture.describe())
    experts: Any = architecture.mixture(layers[family.first_cut])
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, family.dims.d_model, generator=generator).to(torch.bfloat16)
    chosen = torch.rand(40, family.dims.n_experts, generator=generator).argsort(1)[:, :2]
    for dtype in (torch.float32, torch.bfloat16):
        shares = torch.rand(40, 2, generator=generator).to(dtype)
        with in_turn(model):
            expected = experts.to(torch.bfloat16)(states, chosen, shares)
        assert torch.equal(combined(experts, list(routed(experts, states, chosen, shares)), states), expected)


def test_a_run_leaves_the_models_way_of_running_experts_alone(model: Any):
    before = model.config._experts_implementation
    narrow = compress(model, WINDOWS, CompressionConfig(sparsity=0.3, batch_size=4))
    assert model.config._experts_implementation == before
    assert narrow.config._experts_implementation == before


class Refitted(NamedTuple):
    """A mixture before and after, on inputs whose residual all of it is told of."""

    before: torch.Tensor
    after: torch.Tensor
    weights: torch.Tensor
    error: float
    passes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """What it was called with: states, numbers and shares."""
    wanted: torch.Tensor


def refitted(
    experts: Any,
    per_token: int,
    keep: bool = True,
    target: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    max_bytes: int | None = None,
) -> Refitted:
    """Refit to random targets, or to these; residuals are those of the mixture itself, not of the refit's own sums."""
    generator = torch.Generator().manual_seed(7)
    width = experts.down_proj.shape[1]
    batches = []
    for rows in (40, 24):
        states = torch.randn(rows, width, generator=generator)
        chosen = torch.stack([torch.randperm(len(experts.down_proj), generator=generator) for _ in range(rows)])
        batches.append((states, chosen[:, :per_token], torch.rand(rows, per_token, generator=generator)))
    wanted = [torch.randn(len(states), width, generator=generator) for states, *_ in batches]
    if target is not None:
        wanted = [target.expand(len(states), width) for states, *_ in batches]
    weights = [torch.rand(1, len(states), generator=generator) for states, *_ in batches]
    refit, before = ExpertRefit(experts, HiddenStates(max_bytes), keep), []
    with refit.record():
        for batch, own, weight in zip(batches, wanted, weights, strict=True):
            before.append(own - experts(*batch))
            refit.lacks(before[-1][None], weight)
    error = refit.run(Team(), dtype)
    after = [own - experts(*batch) for batch, own in zip(batches, wanted, strict=True)]
    energy = sum((weight[0, :, None] * own.square()).sum() for weight, own in zip(weights, wanted, strict=True))
    left = sum((weight[0, :, None] * own.square()).sum() for weight, own in zip(weights, after, strict=True))
    # float32 residuals, of sums in another order.
    assert error == pytest.approx(float((left / energy) ** 0.5), rel=1e-4)
    weight = torch.cat(weights, dim=1)[0]
    return Refitted(torch.cat(before), torch.cat(after), weight, error, batches, torch.cat(wanted))


def mixture_of(model: Any) -> Any:
    """Return a copy of one block's experts."""
    return copy.deepcopy(sizes_of(model)[0].mixture(decoder_layers(model, sizes_of(model)[0].describe())[0]))


def size(residual: torch.Tensor, weights: torch.Tensor) -> float:
    return (weights[:, None] * residual.square()).sum().item()


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_no_group_of_experts_raises_what_the_block_lacks(model: Any, groups: int, per_token: int, monkeypatch: Any):
    monkeypatch.setattr(expert_refit, "GROUPS", groups)
    found = refitted(mixture_of(model), per_token)
    assert size(found.after, found.weights) < size(found.before, found.weights)


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 8])
def test_equal_experts_of_a_token_do_not_overshoot(model: Any, groups: int, monkeypatch: Any):
    """Three experts alike, on the same tokens, each able to give all that lacks: they would give it thrice."""
    monkeypatch.setattr(expert_refit, "GROUPS", groups)
    monkeypatch.setattr(expert_refit, "TARGET_RIDGE", 1e-6)
    experts = mixture_of(model)
    for weights in (experts.gate_up_proj, experts.down_proj):
        weights[:] = weights[:1].clone()
    found = refitted(experts, per_token=3, target=torch.ones(experts.down_proj.shape[1]))
    assert size(found.after, found.weights) < size(found.before, found.weights)


@torch.no_grad()
def test_experts_with_tokens_of_their_own_get_their_least_squares(model: Any, monkeypatch: Any):
    """One expert a token: each solves its own ridge regression, whatever the groups."""
    weights = []
    for groups in (1, 8):
        monkeypatch.setattr(expert_refit, "GROUPS", groups)
        experts = mixture_of(model)
        before = experts.down_proj.clone()
        refit = ExpertRefit(experts, HiddenStates(), keep=True)
        generator = torch.Generator().manual_seed(7)
        states = torch.randn(90, before.shape[1], generator=generator)
        chosen, shares = torch.arange(90)[:, None] % 2, torch.rand(90, 1, generator=generator)  # none for the third
        residual, weight = torch.randn(90, before.shape[1], generator=generator), torch.rand(90, generator=generator)
        with refit.record():
            experts(states, chosen, shares)
        refit.lacks(residual[None], weight[None])
        refit.run(Team(), torch.float32)
        for number in (0, 1):
            own = chosen[:, 0] == number
            z = (shares[own] * activations(experts, states[own], number)).double()
            moment = z.mT @ (weight[own, None] * z)
            moment.diagonal().mul_(1 + TARGET_RIDGE)
            change = torch.linalg.solve(moment, z.mT @ (weight[own, None] * residual[own]).double()).mT
            # Products of float32, solved at a condition number that the ridge bounds; the weights are of size one.
            expected = (before[number].double() + change).float()
            torch.testing.assert_close(experts.down_proj[number], expected, rtol=0, atol=1e-4)
        assert torch.equal(experts.down_proj[2], before[2])
        weights.append(experts.down_proj.clone())
    assert torch.equal(*weights)


@torch.no_grad()
def test_what_is_kept_changes_no_bit(model: Any):
    kept, again, spilled = (mixture_of(model) for _ in range(3))
    error = refitted(kept, 2, keep=True).error
    assert refitted(again, 2, keep=False).error == error
    assert refitted(spilled, 2, keep=False, max_bytes=0).error == error
    assert torch.equal(kept.down_proj, again.down_proj)
    assert torch.equal(kept.down_proj, spilled.down_proj)


NORMED = {family.name: family.config for family in WITH_EXPERTS if family.architecture.mlp_norm}
"""Mixtures whose output a norm reads, alone or with that of an MLP beside them, and the next norm reads both."""


@pytest.mark.parametrize("name", [*CONFIGS, *NORMED])
def test_beside_the_dense_model_experts_are_chosen_by_it_and_lose_less(name: str):
    dense = random_model({**CONFIGS, **NORMED}[name]())
    architecture, dims = sizes_of(dense)
    narrow, alone = (
        compress(dense, WINDOWS, CompressionConfig(sparsity=0.2, batch_size=3, coverage=0, rarity=0, feedback=feedback))
        for feedback in (True, False)
    )
    first = next(i for i in range(dims.n_layers) if architecture.mixture(dense.model.layers[i]) is not None)
    # The tokens count by the norms of the dense model's states, and where a norm reads what experts give by what it
    # divides that by.
    states: list[torch.Tensor] = []
    layer = dense.model.layers[first]
    handle = layer.register_forward_hook(lambda _m, _i, output: states.append(output))
    with torch.no_grad(), ExitStack() as stack:
        into_norm = [
            stack.enter_context(inputs_of(model.model.layers[first].get_submodule(architecture.mlp_norm)))
            for model in ((dense, narrow) if architecture.mlp_norm else ())
        ]
        own: list[torch.Tensor] = []
        mixture = architecture.mixture(narrow.model.layers[first])
        stack.callback(mixture.register_forward_hook(lambda _m, _i, output: own.append(output)).remove)
        dense(WINDOWS)
        narrow(WINDOWS)
    handle.remove()
    rms = into_norm[0][0].square().mean(-1).sqrt() if into_norm else None
    counted = weighed_by_norm(None, states[0], rms)
    moments, _calls = recorded(dense, first, counted)
    weights = Layout.dense(architecture, dims).read(layer)
    width = narrow.modegpt_report["layers"][first]["ranks"]["mlp"]
    chosen = decide(SOLVERS["mlp"]["saliency"], weights, dims, moments, width, CompressionConfig()).weights["experts"]
    found = Layout.dense(architecture, dims).narrowed(narrow.config.modegpt["layers"][first])
    for expected, expert in zip(chosen, found.read(narrow.model.layers[first]).experts, strict=True):
        assert torch.equal(expected.ups[0].weight, expert.ups[0].weight)
        assert not torch.equal(expected.down.weight, expert.down.weight)

    if into_norm:  # the target is what the dense model gives the norm, whatever else stands in it
        wanted, given = (inputs[0] for inputs in into_norm)
        beside = given - own[0].view_as(given)
        left, all_of_it = (size(each.flatten(0, 1), counted.flatten()) for each in (wanted - given, wanted - beside))
        # float32, in sums of another order.
        assert narrow.modegpt_report["layers"][first]["error"]["mlp"] == pytest.approx(
            (left / all_of_it) ** 0.5, rel=1e-3
        )

    @torch.no_grad()
    def lost(model: Any) -> float:
        return (model.model(WINDOWS)[0] - dense.model(WINDOWS)[0]).norm().item()

    assert lost(narrow) < lost(alone)


@torch.no_grad()
def test_experts_at_rest_still_see_what_they_are_given(model: Any):
    architecture, _dims = sizes_of(model)
    block = decoder_layers(model, architecture.describe())[0]
    seen: list[Any] = []
    experts = architecture.mixture(block)
    handle = experts.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    states = torch.randn(1, 5, model.config.hidden_size)
    with at_rest(block, [architecture.experts]):
        resting = block.mlp(states)
    handle.remove()
    assert torch.equal(seen[0].view_as(states), states)
    assert not resting.any()
    assert block.mlp(states).any()


def test_only_what_stock_code_can_read_is_narrowed(model: Any):
    narrow = compress(model, WINDOWS, CompressionConfig(sparsity=0.3, batch_size=4))
    assert isinstance(narrow, MixtralForCausalLM)
    for before, after in zip(model.model.layers, narrow.model.layers, strict=True):
        assert torch.equal(before.mlp.gate.weight, after.mlp.gate.weight)


def test_a_layer_without_anything_to_cut_has_no_outliers():
    """DeepSeek's first layer: latent attention and an MLP among layers of experts, all of it whole."""
    dense = random_model(DeepseekV3Config(**SIZES, **LATENT))
    narrow = compress(dense, WINDOWS, CompressionConfig(sparsity=0.1, allocation="owl", batch_size=4))
    scores = narrow.modegpt_report["allocation"]["scores"]
    assert scores[0] == 0
    assert min(scores[1:]) > 0
    assert narrow.num_parameters() < dense.num_parameters()


def test_a_resumed_block_holds_what_was_read_in_float32(tmp_path: Any):
    dense = random_model(Glm4MoeConfig(**SIZES, **GROUPED, **GROUPED_EXPERTS, head_dim=16))
    dense.save_pretrained(tmp_path)
    empty = skeleton(dense.config)
    layers = decoder_layers(empty, architecture_of(dense.config).describe())
    device = torch.device("cpu")
    blocks = ShardBlocks(find_tensors(tmp_path), empty, layers, torch.bfloat16, device)
    taken, blank = blocks.take(1, device).state_dict(), blocks.blank(1, device).state_dict()
    assert {name: tensor.dtype for name, tensor in taken.items()} == {name: t.dtype for name, t in blank.items()}
    assert {name for name, tensor in taken.items() if tensor.dtype == torch.float32} == {
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
    }


def test_a_tiny_model_is_made_of_the_default_config_of_latent_attention():
    config = DeepseekV3Config()
    with torch.no_grad():
        logits = random_model(tiny_config(config, architecture_of(config)))(WINDOWS).logits
    assert torch.isfinite(logits).all()


@torch.no_grad()
@pytest.mark.parametrize("groups", [2, 3])
def test_groups_of_experts_take_turns_as_the_formula_says(model: Any, groups: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expert_refit, "GROUPS", groups)
    experts = mixture_of(model)
    before = experts.down_proj.double()
    found = refitted(experts, per_token=2)
    states, chosen, shares = (torch.cat(each) for each in zip(*found.passes, strict=True))
    residual, weights, per_group = found.before.double(), found.weights[:, None], -(-N_EXPERTS // groups)
    for start in range(0, N_EXPERTS, per_group):
        group = range(N_EXPERTS)[start : start + per_group]
        together = torch.stack([(chosen == number).sum(1) for number in group]).sum(0)[:, None]
        added = torch.zeros_like(residual)
        for number in group:
            share = (shares * (chosen == number)).sum(1)[:, None].double()
            z = share * activations(experts, states, number).double()
            moment = z.mT @ (weights * together * z)
            moment.diagonal().mul_(1 + TARGET_RIDGE)
            change = torch.linalg.solve(moment, z.mT @ (weights * residual)).mT
            # A float32 solve, of changes near 1.
            torch.testing.assert_close(experts.down_proj[number].double(), before[number] + change, rtol=0, atol=1e-4)
            added += z @ change.mT
        residual = residual - added


@torch.no_grad()
def test_the_error_of_refitted_experts_is_that_of_the_rounded_weights(model: Any):
    found = refitted(mixture_of(model), per_token=2, dtype=torch.bfloat16)
    expected = (size(found.after, found.weights) / size(found.wanted, found.weights)) ** 0.5
    assert found.error == pytest.approx(expected, rel=1e-6)


def test_outliers_of_experts_are_of_what_they_read(model: Any):
    model = copy.deepcopy(model)  # the hooks stay
    architecture, _dims = sizes_of(model)
    block = model.model.layers[0]
    scorer, mixture = OutlierScorer(architecture, 2.0, Team()), architecture.mixture(block)
    read: dict[Any, Any] = {}
    for module in (*architecture.linears(block), mixture):
        module.register_forward_pre_hook(lambda module, inputs: read.setdefault(module, inputs))
    with torch.no_grad(), scorer.watch(block, 0):
        model(WINDOWS)
    pairs = [(linear.weight, read[linear][0].flatten(0, -2)) for linear in architecture.linears(block)]
    states, chosen, _shares = read[mixture]
    for number in range(N_EXPERTS):
        own = states[(chosen == number).any(1)]
        pairs += [(mixture.gate_up_proj[number], own)]
        pairs += [(mixture.down_proj[number], activations(mixture, own, number).detach())]
    norms = [inputs.double().square().sum(0).sqrt() for _weight, inputs in pairs]
    expected = outlier_ratio([weight for weight, _inputs in pairs], norms, 2.0, 0)
    # One of some 20,000 weights may stand on the other side of the bound in float32.
    assert scorer.scores().item() == pytest.approx(expected, abs=1e-4)
