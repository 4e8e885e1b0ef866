"""One block in two stages: the MLP's moments behind the compressed attention, and what the logits are measured with."""

import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from conformance.families import FAMILIES, Family, tokens
from modegpt import attention_logits
from modegpt.architectures.access import Layout
from modegpt.at_rest import at_rest, attention_at_rest
from modegpt.attention_logits import FIRST, QUERIES, record_logits
from modegpt.blocks import run_block
from modegpt.config import CompressionConfig
from modegpt.decompose.energy import take_back
from modegpt.distributed import join_team
from modegpt.hidden_states import HiddenStates
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import BlockMoments, record_moments
from modegpt.preparation import open_source
from modegpt.report import Stopwatch
from modegpt.solvers.mlp import DRIFT_RIDGE
from modegpt.staged import measure_and_compress
from modegpt.surgery import compress_block, needed_moments, rounded_tensors, stages
from modegpt.token_weights import token_weights

CPU = torch.device("cpu")
BY_NAME = {family.name: family for family in FAMILIES}
WITH_MLP = [family for family in FAMILIES if "mlp" not in family.whole]
PLAIN = [family for family in WITH_MLP if family.architecture.plain_mlp]
SEQUENTIAL = [family for family in WITH_MLP if not family.architecture.parallel]
LOGITS = [family for family in FAMILIES if "qk" not in family.whole and family.dims.rotary_dim]


def by_name(families: list[Family]):
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


def opened(family: Family):
    """The family's source and its calibration, in two batches of unequal size, its tokens weighted."""
    source = open_source(family.dense(), CPU)
    windows = tokens(rows=5, length=20)
    calibration = source.blocks.embed(windows, 3, HiddenStates())
    weights = token_weights(windows, 0.25)
    assert weights is not None
    calibration.weights = weights.split(3)
    return source, calibration


def moments_of(source, block, calibration, names, rest: bool = False) -> BlockMoments:
    moments = BlockMoments.zeros(source.dims, names)
    with record_moments(block, source.architecture, source.dims, moments, calibration.weights):
        if rest:
            with at_rest(block, idle(source.architecture)):
                list(run_block(block, 0, calibration, CPU))
        else:
            list(run_block(block, 0, calibration, CPU))
    return moments


def idle(architecture) -> list[str]:
    """All that the moments of the attention do not need."""
    return [*architecture.up, architecture.down, f"{architecture.attention}.{architecture.output}"]


def staged(source, calibration, ranks, config, dense=None):
    block, _calibration, outcome = halfway(source, calibration, ranks, config, dense)
    return block, outcome


def halfway(source, calibration, ranks, config, dense=None):
    """The compressed block, and the hidden states behind its attention, or None where the block must run whole."""
    block, calibration = source.blocks.take(0, CPU), calibration.copy()
    team, watch = join_team(CPU), Stopwatch(CPU)
    outcome, in_middle = measure_and_compress(block, 0, calibration, ranks, source, config, CPU, team, watch, dense)
    return block, calibration if in_middle else None, outcome


def shifted(calibration):
    """Hidden states that stand for the dense model's, beside those of a compressed one."""
    other = calibration.copy()
    for batch, states in enumerate(calibration.hidden):
        other.hidden[batch] = states + torch.linspace(-1, 1, states.shape[-1])
    return other


@by_name(WITH_MLP)
def test_what_is_at_rest_leaves_the_attention_and_itself_as_they_were(family: Family):
    source, calibration = opened(family)
    block = source.blocks.peek(0, CPU)
    before = list(run_block(block, 0, calibration, CPU))
    names = ("context", "query", "value")
    awake = moments_of(source, block, calibration, names)
    asleep = moments_of(source, block, calibration, names, rest=True)
    assert asleep.n_tokens == awake.n_tokens == 5 * 20
    assert all(torch.equal(awake[name], asleep[name]) for name in names)
    with at_rest(block, idle(source.architecture)):
        resting = list(run_block(block, 0, calibration, CPU))
    assert not any(torch.equal(left, right) for left, right in zip(before, resting, strict=True))
    after = list(run_block(block, 0, calibration, CPU))
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert not any("forward" in vars(module) for module in block.modules())


@by_name(SEQUENTIAL)
def test_the_mlp_is_measured_behind_the_compressed_attention(family: Family):
    source, calibration = opened(family)
    config, ranks = CompressionConfig(solver="best"), family.ranks()[0]
    full = {"qk": source.dims.d_head, "vo": source.dims.d_head, "mlp": source.dims.d_int}
    attention = tuple(module for module in ("qk", "vo") if ranks[module] < full[module])
    assert stages(ranks, source.architecture, source.dims, config) == [attention, ("mlp",)]
    block, outcome = staged(source, calibration, ranks, config)

    # The same in two calls: a block whose attention alone is cut, then the MLP on what that block computes.
    by_hand, first = staged(source, calibration, {**ranks, "mlp": full["mlp"]}, config)
    needed = needed_moments(("mlp",), by_hand, source.architecture, source.dims, config)
    moments = moments_of(source, by_hand, calibration, needed)
    second = compress_block(
        by_hand, source.architecture, source.dims, moments, ranks, config, source.config, 0, ("mlp",), first
    )  # fmt: skip
    assert second == outcome
    pairs = zip(block.state_dict().items(), by_hand.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for (_name, left), right in pairs)

    # And it is not what the dense block's moments give.
    alone, _ = staged(source, calibration, {**full, "mlp": ranks["mlp"]}, config)
    down = source.architecture.down
    assert not torch.equal(alone.get_submodule(down).weight, block.get_submodule(down).weight)


@by_name([family for family in SEQUENTIAL if family.architecture.plain_mlp])
def test_the_attention_is_measured_on_the_dense_stream_as_it_passes(family: Family):
    source, calibration = opened(family)
    config, ranks = CompressionConfig(solver="best"), family.ranks()[0]
    dense = shifted(calibration)
    targets = list(run_block(source.blocks.peek(0, CPU), 0, dense, CPU))
    on_dense, _ = staged(source, dense, ranks, config)
    on_compressed, _ = staged(source, calibration, ranks, config)
    both, _ = staged(source, calibration, ranks, config, dense)
    assert all(torch.equal(left, right) for left, right in zip(dense.hidden, targets, strict=True))
    output = f"{source.architecture.attention}.{source.architecture.output}.weight"
    weights = [each.get_parameter(output) for each in (both, on_dense, on_compressed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2], rtol=1e-3)
    # The MLP is measured on what the compressed blocks give.
    down = source.architecture.down
    assert not torch.equal(both.get_submodule(down).weight, on_dense.get_submodule(down).weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@by_name(SEQUENTIAL)
def test_the_second_half_of_a_block_gives_what_the_whole_block_gives(family: Family, dtype: str):
    source, calibration = opened(family)
    config = CompressionConfig(solver="best", dtype=dtype)
    block, middle, _outcome = halfway(source, calibration, family.ranks()[0], config)
    assert (middle is not None) == source.architecture.plain_mlp
    rounded_tensors(block, getattr(torch, dtype))
    whole = list(run_block(block, 0, calibration, CPU))
    if middle is not None:
        with attention_at_rest(block, source.architecture):
            half = list(run_block(block, 0, middle, CPU))
        assert all(torch.equal(left, right) for left, right in zip(half, whole, strict=True))
    again = list(run_block(block, 0, calibration, CPU))
    assert all(torch.equal(left, right) for left, right in zip(again, whole, strict=True))
    assert not any("forward" in vars(module) for module in block.modules())


@by_name(PLAIN)
def test_with_the_down_projection_at_rest_the_target_is_the_drift_and_what_the_mlp_adds(family: Family):
    source, calibration = opened(family)
    dense = shifted(calibration)
    targets = list(run_block(source.blocks.peek(0, CPU), 0, dense, CPU))
    ranks = {**family.full_ranks()[0], "mlp": 10}
    fed, _ = staged(source, calibration, ranks, CompressionConfig(solver="best"), dense)
    assert all(torch.equal(left, right) for left, right in zip(dense.hidden, targets, strict=True))
    plain, outcome = staged(source, calibration, ranks, CompressionConfig(solver="best", feedback=0.0))

    # By hand, from whole passes: the states of the MLP, and what the block's output lacks.
    block, architecture = source.blocks.peek(0, CPU), source.architecture
    states: list[torch.Tensor] = []
    hook = block.get_submodule(architecture.down).register_forward_pre_hook(lambda _m, inputs: states.append(inputs[0]))
    outputs = list(run_block(block, 0, calibration, CPU))
    hook.remove()
    assert calibration.weights is not None
    roots = torch.cat([each.flatten() for each in calibration.weights])[:, None].sqrt()
    z = roots * torch.cat([each.flatten(0, -2) for each in states])
    lacking = (target - output for target, output in zip(targets, outputs, strict=True))
    r = roots * torch.cat([each.flatten(0, -2) for each in lacking])
    layout = Layout.dense(architecture, source.dims)
    down = layout.narrowed(outcome.layer).read(plain).down
    assert down is not None
    kept = kept_neurons(layout.read(block), layout.narrowed(outcome.layer).read(plain))
    expected = down.weight + 0.5 * take_back(z.T @ z, z.T @ r, kept, DRIFT_RIDGE)
    corrected = layout.narrowed(outcome.layer).read(fed).down
    assert corrected is not None
    assert not torch.equal(corrected.weight, down.weight)
    # float32 products of states and residuals of size ten, 100 tokens.
    torch.testing.assert_close(corrected.weight.double(), expected.double(), rtol=1e-4, atol=1e-5)


def kept_neurons(dense, narrow) -> torch.Tensor:
    """The places of the narrow rows of the first projection among the dense ones."""
    same = (narrow.ups[0].weight[:, None] == dense.ups[0].weight).all(-1)
    assert bool((same.sum(1) == 1).all())
    return same.int().argmax(1)


@pytest.mark.parametrize(
    ("settings", "parallel", "expected"),
    [
        ({"solver": "best"}, False, [("qk", "vo"), ("mlp",)]),
        ({"solver": "best"}, True, [("mlp", "qk", "vo")]),
        ({"solver": "paper"}, False, [("mlp", "qk", "vo")]),
        ({"solver": "paper", "mlp_solver": "energy"}, False, [("qk", "vo"), ("mlp",)]),
        ({"solver": "best", "mlp_solver": "leverage"}, False, [("mlp", "qk", "vo")]),
    ],
)
def test_stages_follow_the_solver_of_the_mlp_and_the_kind_of_block(settings, parallel, expected):
    family = BY_NAME["gpt_neox" if parallel else "gpt_neox-sequential"]
    config = CompressionConfig(**settings)
    ranks = family.ranks()[0]
    assert stages(ranks, family.architecture, family.dims, config) == expected
    full = family.full_ranks()[0]
    assert stages(full, family.architecture, family.dims, config) == []
    assert stages({**full, "mlp": 1}, family.architecture, family.dims, config) == [("mlp",)]
    assert stages({**full, "vo": 1}, family.architecture, family.dims, config) == [("vo",)]


@by_name(WITH_MLP)
def test_drift_is_taken_back_where_the_mlp_adds_to_the_residual_stream_as_it_is(family: Family):
    source, calibration = opened(family)
    block = source.blocks.peek(0, CPU)
    before = torch.cat(list(run_block(block, 0, calibration, CPU)))
    change = torch.randn(source.dims.d_model, generator=torch.Generator().manual_seed(5))
    hook = block.get_submodule(source.architecture.down).register_forward_hook(lambda _m, _i, output: output + change)
    after = torch.cat(list(run_block(block, 0, calibration, CPU)))
    hook.remove()
    # Residuals are of size ten, float32.
    assert torch.allclose(after - before, change.expand_as(after), atol=1e-4) == source.architecture.plain_mlp

    config, ranks = CompressionConfig(solver="best"), {**family.full_ranks()[0], "mlp": 10}
    plain, _ = staged(source, calibration, ranks, config)
    fed, _ = staged(source, calibration, ranks, config, shifted(calibration))
    down = [each.get_submodule(source.architecture.down).weight for each in (plain, fed)]
    assert torch.equal(*down) != source.architecture.plain_mlp


@by_name([BY_NAME["llama-grouped"], BY_NAME["falcon"]])
def test_a_block_left_whole_is_not_measured(family: Family):
    source, calibration = opened(family)
    block, outcome = staged(source, calibration, family.full_ranks()[0], CompressionConfig(solver="best"))
    assert outcome.error == {"mlp": 0.0, "qk": 0.0, "vo": 0.0}
    dense = source.blocks.peek(0, CPU)
    for left, right in zip(run_block(block, 0, calibration, CPU), run_block(dense, 0, calibration, CPU), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)  # one order of sums may differ, in float32


def hooks_of(block) -> list[int]:
    return [key for module in block.modules() for key in (*module._forward_hooks, *module._forward_pre_hooks)]


def with_attention(family: Family, implementation: str):
    model = AutoModelForCausalLM.from_config(
        family.config(), dtype=torch.float32, attn_implementation=implementation
    ).eval()
    model.load_state_dict(family.dense().state_dict())
    return model


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@by_name(LOGITS)
def test_logits_are_measured_with_the_models_own_attention(family: Family, implementation: str, monkeypatch):
    if family.architecture.softcap and implementation == "sdpa":
        pytest.skip("torch's kernel has no cap: transformers drops it")
    ids = tokens(rows=3, length=FIRST + QUERIES)  # every position after the first ones is measured
    expected = with_attention(family, "eager")(ids, output_attentions=True, use_cache=False).attentions
    model = with_attention(family, implementation)
    seen: list[torch.Tensor] = []
    plain = attention_logits.gram

    def gram(query, key, attention, rotary_dim):
        seen.append(attention)
        return plain(query, key, attention, rotary_dim)

    monkeypatch.setattr(attention_logits, "gram", gram)
    dims = family.dims
    layout = Layout.dense(family.architecture, dims)
    for index, block in enumerate(decoder_layers(model, family.architecture.describe())):
        seen.clear()
        hooks = hooks_of(block)
        total = torch.zeros(dims.n_heads, dims.d_head, dims.d_head, dtype=torch.float64)
        with torch.no_grad(), record_logits(block, layout, total):
            model(ids, use_cache=False)
        # Neighbouring queries come together, with the keys up to the last that one of them sees.
        padded = [functional.pad(part, (0, ids.shape[1] - part.shape[-1])) for part in seen]
        weights = torch.cat(padded, dim=1).unflatten(0, (3, dims.n_heads))
        own = expected[index][:, :, FIRST:]
        # float32 scores of size ten or so, in another order of sums.
        torch.testing.assert_close(weights, own, rtol=1e-3, atol=1e-5)
        if not family.architecture.softcap:
            # The shares add up to the logits: their variance is that of the log of the attention.
            logs = torch.where(own > 0, own.double().log(), 0)
            spread = (own * (logs - (own * logs).sum(-1, keepdim=True)).square()).sum((0, 2, 3))
            c = torch.ones(dims.d_head, dtype=torch.float64)
            c[dims.rotary_dim // 2 : dims.rotary_dim] = 0
            torch.testing.assert_close(total @ c @ c, spread.double(), rtol=1e-3, atol=1e-4)
        assert hooks_of(block) == hooks


def test_logits_of_short_and_long_sequences_are_measured_at_every_length():
    family = BY_NAME["llama-tied"]
    model = AutoModelForCausalLM.from_config(family.config())
    block = decoder_layers(model, family.architecture.describe())[0]
    for length in (1, 2, FIRST, FIRST + 1, 60):
        total = torch.zeros(4, 8, 8, dtype=torch.float64)
        with torch.no_grad(), record_logits(block, Layout.dense(family.architecture, family.dims), total):
            model(tokens(length=length))
        assert bool(torch.isfinite(total).all())
        # The only key of a first token has no spread.
        assert bool((total.diagonal(dim1=1, dim2=2) >= 0).all())
        assert (total.abs().max() > 0) == (length > 1)
        assert math.isclose((total - total.mT).abs().max().item(), 0, abs_tol=1e-6 * total.abs().max().item())
