"""Experts of a mixture: what each reads, its moment, and the narrow weights that it gets."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DeepseekV3Config, Glm4MoeConfig, MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig

from conformance.families import EXPERTS, GROUPED, GROUPED_EXPERTS, LATENT, SIZES, tokens
from modegpt import compress
from modegpt.architectures import Architecture, Dimensions, architecture_of
from modegpt.architectures.access import Layout
from modegpt.at_rest import at_rest
from modegpt.config import CompressionConfig
from modegpt.decompose.energy import energy
from modegpt.decompose.nystrom import nystrom
from modegpt.decompose.saliency import saliency
from modegpt.experts import routed
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import BlockMoments, record_moments
from modegpt.preparation import EXPERT_STEP
from modegpt.shards import ShardBlocks, find_tensors, skeleton
from modegpt.solvers import SOLVERS
from modegpt.solvers.experts import decide, unseen
from modegpt.solvers.mlp import RIDGE, SALIENCY_RIDGE
from modegpt.tiny import random_model, tiny_config

RANK = 24
N_EXPERTS = 3
WINDOWS = tokens(rows=6, length=16, seed=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(MixtralConfig(**SIZES, **GROUPED, num_local_experts=N_EXPERTS, num_experts_per_tok=2))


def sizes_of(model: Any) -> tuple[Architecture, Dimensions]:
    architecture = architecture_of(model.config)
    return architecture, Dimensions.of(architecture, model.config)


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
        assert torch.equal(sent.states, states[sent.places])
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
    "energy": lambda moment, down: energy(moment, down, RANK, RIDGE),
    "saliency": lambda moment, down: saliency(moment, down, RANK, SALIENCY_RIDGE, RIDGE),
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
    "mixtral": lambda: MixtralConfig(**SIZES, **GROUPED, num_local_experts=3, num_experts_per_tok=2),
    "shared expert": lambda: Qwen2MoeConfig(**SIZES, **GROUPED, **EXPERTS, shared_expert_intermediate_size=24),
    "first layers without": lambda: Glm4MoeConfig(**SIZES, **GROUPED, **GROUPED_EXPERTS, head_dim=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_measures_experts_behind_the_compressed_attention(name: str):
    """What the first layer with experts becomes, told by its definition: the run goes on from the middle of blocks."""
    dense = random_model(CONFIGS[name]())
    architecture, dims = sizes_of(dense)
    config = CompressionConfig(sparsity=0.2, batch_size=3, coverage=0, rarity=0)
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
    assert min(scores[1:]) >= 0
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
