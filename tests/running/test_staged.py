"""One block in two stages: the MLP's moments behind the compressed attention, and what the logits are measured with."""

import math
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

import modegpt
from conformance.families import FAMILIES, Family, among_covering, tokens
from decompose.selections import by_loss
from modegpt.architectures.access import Layout
from modegpt.blocks import run_block
from modegpt.config import CompressionConfig
from modegpt.decompose.asymmetric import asymmetric_refit
from modegpt.decompose.fold import folded_up, own_share
from modegpt.decompose.nystrom import refit
from modegpt.hidden_states import HiddenStates
from modegpt.modeling_modegpt import decoder_layers
from modegpt.moments import GATES_EVERY, BlockMoments, record_moments
from modegpt.observing import attention_logits
from modegpt.observing.at_rest import at_rest
from modegpt.observing.attention_logits import FIRST, QUERIES, record_logits
from modegpt.observing.in_turn import run_in_turn
from modegpt.report import Stopwatch
from modegpt.running import staged
from modegpt.running.dense_pass import EVERY, DensePass
from modegpt.running.distributed import join_team
from modegpt.running.fisher import FisherProbe
from modegpt.running.source import open_source
from modegpt.running.staged import BlockCompressor
from modegpt.running.surgery import compress_block, needed_moments, rounded_tensors, stages
from modegpt.solvers.mlp import FIRST_RIDGE, FOLD_RIDGE, GATE_RIDGE, RIDGE, TARGET_RIDGE
from modegpt.sums.token_weights import token_weights

CPU = torch.device("cpu")
BY_NAME = {family.name: family for family in FAMILIES}
WITH_MLP = [family for family in FAMILIES if "mlp" not in family.whole_in(0)]
ADDING = [family for family in WITH_MLP if family.architecture.makes_up]
OF_ONE_MLP = [family for family in ADDING if not family.dims.n_experts]
WITH_BOTH = [family for family in WITH_MLP if not family.architecture.whole_attention]
SEQUENTIAL = [family for family in WITH_BOTH if not family.architecture.parallel]
LOGITS = [family for family in FAMILIES if "qk" not in family.whole and family.dims.rotary_dim]


def by_name(families: list[Family]):
    return pytest.mark.parametrize("family", among_covering(families), ids=lambda family: family.name)


@lru_cache(maxsize=1)  # a test's cases come by family
def opened(family: Family):
    """The family's source and its calibration, in two batches of unequal size, its tokens weighted. Change neither."""
    source = open_source(family.dense(), CPU)
    run_in_turn(source.blocks.model)
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
            with at_rest(block, idle(source.architecture, block)):
                list(run_block(block, 0, calibration, CPU))
        else:
            list(run_block(block, 0, calibration, CPU))
    return moments


def idle(architecture, block) -> list[str]:
    """All that the moments of the attention do not need."""
    attention = f"{architecture.attention}.{architecture.output}"
    return [*architecture.mlp_outputs(block), *architecture.up, attention]


def compressed(source, calibration, ranks, config, dense=None, drifted=True, probe=None):
    block, _middle, _on, outcome = halfway(source, calibration, ranks, config, dense, drifted, probe)
    return block, outcome


def halfway(source, calibration, ranks, config, dense=None, drifted=True, probe=None):
    """The compressed block, whether its second half alone is to run, what hands it on, and what was done."""
    block, calibration = source.blocks.take(0, CPU), calibration.copy()
    shared = (source, config, CPU, join_team(CPU), Stopwatch(CPU))
    compressor = BlockCompressor(*shared, DensePass(*shared, probe))
    outcome, middle = compressor.compress(block, 0, calibration, ranks, dense, drifted)

    def hand_on():
        compressor.hand_on(block, 0, calibration, middle)
        return list(calibration.hidden)

    return block, middle, hand_on, outcome


def probe_of(source):
    peek = partial(source.blocks.peek, device=CPU)
    return FisherProbe(source.blocks, peek, source.dims.n_layers, torch.arange(5), CPU, seed=0)


def told_to_experts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What the refit of experts is told of each batch: residual and weights, and what the experts gave."""
    lacks, told = staged.ExpertRefit.lacks, []

    def tell(self: staged.ExpertRefit, residual: torch.Tensor, weights: torch.Tensor) -> None:
        assert self._given is not None
        told.append((residual, weights, self._given.clone()))
        lacks(self, residual, weights)

    monkeypatch.setattr(staged.ExpertRefit, "lacks", tell)
    return told


def shifted(calibration):
    """Hidden states that stand for the dense model's, beside those of a compressed one."""
    other = calibration.copy()
    for batch, states in enumerate(calibration.hidden):
        other.hidden[batch] = states + torch.linspace(-1, 1, states.shape[-1])
    return other


@by_name(WITH_BOTH)
def test_what_is_at_rest_leaves_the_attention_and_itself_as_they_were(family: Family):
    source, calibration = opened(family)
    block = source.blocks.peek(0, CPU)
    before = list(run_block(block, 0, calibration, CPU))
    names = ("context", "query", "value")
    awake = moments_of(source, block, calibration, names)
    asleep = moments_of(source, block, calibration, names, rest=True)
    assert asleep.n_tokens == awake.n_tokens == 5 * 20
    assert all(torch.equal(awake[name], asleep[name]) for name in names)
    with at_rest(block, idle(source.architecture, block)):
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
    block, outcome = compressed(source, calibration, ranks, config)

    # The same in two calls: a block whose attention alone is cut, then the MLP on what that block computes.
    by_hand, first = compressed(source, calibration, {**ranks, "mlp": full["mlp"]}, config)
    needed = needed_moments(("mlp",), by_hand, source.architecture, source.dims, config)
    moments = moments_of(source, by_hand, calibration, needed)
    second = compress_block(
        by_hand, source.architecture, source.dims, moments, ranks, config, source.config, 0, ("mlp",), first
    )  # fmt: skip
    assert second == outcome
    pairs = zip(block.state_dict().items(), by_hand.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for (_name, left), right in pairs)

    # And it is not what the dense block's moments give.
    alone, _ = compressed(source, calibration, {**full, "mlp": ranks["mlp"]}, config)
    layout = Layout.dense(source.architecture, source.dims).narrowed(outcome.layer)
    outs = [[each.down.weight for each in read.experts or [read]] for read in map(layout.read, (alone, block))]
    assert not any(torch.equal(left, right) for left, right in zip(*outs, strict=True))


@by_name([family for family in SEQUENTIAL if family in OF_ONE_MLP])
def test_the_attention_is_measured_on_the_dense_stream_as_it_passes(family: Family):
    source, calibration = opened(family)
    config, ranks = CompressionConfig(solver="best"), family.ranks()[0]
    dense = shifted(calibration)
    targets = list(run_block(source.blocks.peek(0, CPU), 0, dense, CPU))
    on_dense, _ = compressed(source, dense, ranks, config)
    on_compressed, _ = compressed(source, calibration, ranks, config)
    both, _ = compressed(source, calibration, ranks, config, dense)
    assert all(torch.equal(left, right) for left, right in zip(dense.hidden, targets, strict=True))
    output = f"{source.architecture.attention}.{source.architecture.output}.weight"
    weights = [each.get_parameter(output) for each in (both, on_dense, on_compressed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2], rtol=1e-3)
    # The MLP is measured on what the compressed blocks give.
    down = source.architecture.down
    assert not torch.equal(both.get_submodule(down).weight, on_dense.get_submodule(down).weight)


@pytest.mark.parametrize(
    ("beside", "room", "limit"),
    [(False, 2**30, None), (True, 0, None), (True, 2**30, 10**9), (True, 2**30, None)],
    ids=["alone", "beside, no room", "beside, short of memory", "beside, kept"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@by_name(WITH_MLP)
def test_what_is_handed_on_is_what_the_whole_block_gives(family: Family, dtype: str, beside, room, limit, monkeypatch):
    source, calibration = opened(family)
    adds, parallel = source.architecture.adds_mlp, source.architecture.parallel
    if beside and family not in ADDING:
        pytest.skip("nothing runs beside such a block")
    monkeypatch.setattr(staged, "KEPT_BYTES", room)
    config = CompressionConfig(solver="best", dtype=dtype, max_host_memory=limit)
    dense = shifted(calibration) if beside else None
    block, middle, hand_on, _outcome = halfway(source, calibration, family.ranks()[0], config, dense)
    # Where attention stays whole, nothing is taken twice of a block that runs alone.
    assert (middle is not None) == (not parallel and (beside or (adds and not source.architecture.whole_attention)))
    kept = middle is not None and (middle.sent if family.dims.n_experts else middle.activations) is not None
    assert middle is None or kept == (beside and room > 0 and limit is None)
    rounded_tensors(block, source.architecture, getattr(torch, dtype))
    whole = list(run_block(block, 0, calibration, CPU))
    assert all(torch.equal(left, right) for left, right in zip(hand_on(), whole, strict=True))
    again = list(run_block(block, 0, calibration, CPU))
    assert all(torch.equal(left, right) for left, right in zip(again, whole, strict=True))
    assert not any("forward" in vars(module) for module in block.modules())
    assert not hooks_of(block)


@pytest.mark.parametrize("felt", [False, True], ids=["", "felt by the logits"])
@pytest.mark.parametrize("drifted", [True, False], ids=["drifted", "first"])
@by_name(OF_ONE_MLP)
def test_the_dense_model_chooses_and_the_compressed_one_is_refitted_to_it(family: Family, drifted: bool, felt: bool):
    source, calibration = opened(family)
    dense, architecture = shifted(calibration), source.architecture
    before = dense.copy()
    block, rank = source.blocks.peek(0, CPU), 10
    layout = Layout.dense(architecture, source.dims)
    fed, outcome = compressed(
        source, calibration, {**family.full_ranks()[0], "mlp": rank}, CompressionConfig(solver="best"), dense, drifted,
        probe_of(source) if felt else None,
    )  # fmt: skip
    assert calibration.weights is not None
    rarity = torch.cat([each.flatten() for each in calibration.weights])[:, None]
    weights = rarity / torch.cat([states.flatten(0, -2) for states in dense.hidden]).norm(dim=1, keepdim=True)
    norm = architecture.output_norm(block)
    if norm is not None:  # it divides what the MLP puts out, and an error of that
        y = Passed(block, architecture, before, weights).every(1)[0] @ layout.read(block).down.weight.double().T
        weights = weights / y.square().mean(1, keepdim=True).sqrt().float()
    every = EVERY if drifted else 1

    # By hand: of the dense model's states, some tokens of each batch; of these, every fourth for the gates.
    batches = Passed(block, architecture, before, weights)
    assert all(torch.equal(left, right) for left, right in zip(dense.hidden, batches.outputs, strict=True))
    dense_weights, narrow = layout.read(block), layout.narrowed(outcome.layer).read(fed)
    assert dense_weights.down is not None
    prior = dense_weights.down.weight.double()
    down = prior
    if norm is not None:  # what it multiplies a coordinate by is what the residual stream gets of it
        gain = norm(torch.ones(source.dims.d_model)).double()
        down = gain.abs().sqrt()[:, None] * prior
    z, some = batches.every(every)
    moment = (some * z).T @ z
    # What they tell of each other is theirs, how much each is used is that of all tokens.
    everything, weight = batches.every(1)
    counted, energy = moment.diagonal().clone(), (weight * everything.square()).sum(0)
    scale = torch.where(counted > 0, energy / counted, 0).sqrt()  # one that is zero on those tokens is told by no other
    if dense_weights.down.bias is not None:
        mean = (some * z).sum(0) / some.sum()
        moment = moment - some.sum() * torch.outer(mean, mean)
    moment = scale[:, None] * moment * scale + torch.where(counted > 0, 0, energy).diag()
    scores, gates = by_loss(moment, down, rank), None
    if len(narrow.ups) == 2:
        z, some = batches.every(every * GATES_EVERY)
        hidden, (module, rows) = [], layout.ups(block)[1]
        hook = module.register_forward_hook(lambda _m, _i, output: hidden.append(output[..., rows]))
        list(run_block(block, 0, before, CPU))
        hook.remove()
        u = torch.cat([each.flatten(0, -2)[:: every * GATES_EVERY] for each in hidden]).double()
        gates = (some * z / u).T @ (z / u)
        scores = scores * own_share(gates, GATE_RIDGE)
    if felt:
        sums, probe = torch.zeros(3, source.dims.d_int, dtype=torch.float64), probe_of(source)
        probe.take(block, 0, before)
        with probe.record(block, architecture, before, sums):
            list(run_block(block, 0, before, CPU))
        seen = sums[0]
        if dense_weights.down.bias is not None:
            seen = sums[0] - 2 * mean * sums[1] + mean.square() * sums[2]
        lost = seen * scores / (moment.diagonal() * down.square().sum(0))
        scores = scores / scores.mean() + lost / lost.mean()
    kept = scores.argsort(descending=True)[:rank].sort().values
    assert torch.equal(kept_neurons(dense_weights, narrow), kept)
    if gates is not None:
        refitted = refit(moment, down, kept, RIDGE)[0]
        up = dense_weights.ups[1].weight.double()
        expected = folded_up(gates, up, down, kept, refitted, FOLD_RIDGE)
        # float32 moments, and a float32 solve with a condition number of ten or so.
        torch.testing.assert_close(narrow.ups[1].weight.double(), expected, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(narrow.ups[1].weight.double(), up[kept], rtol=1e-3, atol=1e-5)

    # The target is all that the block's output lacks of the dense model's when its MLP adds nothing; where a norm
    # decides how much the MLP adds, what the dense one gives that norm.
    lazy = Passed(fed, architecture, calibration, weights, rest=[architecture.down])
    z, _ = lazy.every(1)
    pairs = zip(dense.hidden, lazy.outputs, strict=True)
    y = torch.cat([(target - output).flatten(0, -2) for target, output in pairs]).double() / architecture.mlp_factor
    if norm is not None:
        y = batches.every(1)[0] @ prior.T
    prior, bias = prior[:, kept], dense_weights.down.bias
    if bias is not None:
        means = (weights * z).sum(0) / weights.sum(), (weights * y).sum(0) / weights.sum()
        z, y = z - means[0], y - means[1]
    roots = weights.sqrt()
    energy, ridge = (weights * y.square()).sum(), TARGET_RIDGE if drifted else FIRST_RIDGE
    expected = asymmetric_refit((weights * z).T @ z, (weights * z).T @ y, energy, prior, ridge)
    assert narrow.down is not None
    # float32 products of states and residuals of size ten, 100 tokens.
    torch.testing.assert_close(narrow.down.weight.double(), expected.weight, rtol=1e-4, atol=1e-5)
    error = (roots * (y - z @ expected.weight.T)).norm() / (roots * y).norm()
    assert outcome.error["mlp"] == pytest.approx(error.item(), rel=1e-3)
    if bias is not None and narrow.down.bias is not None:
        torch.testing.assert_close(
            narrow.down.bias.double(), means[1] - expected.weight @ means[0], rtol=1e-3, atol=1e-3
        )


class Passed:
    """What a block gives, and what its down projection reads, of every batch."""

    def __init__(self, block, architecture, calibration, weights, rest=()) -> None:
        self.states: list[torch.Tensor] = []
        down = block.get_submodule(architecture.down)
        hook = down.register_forward_pre_hook(lambda _m, inputs: self.states.append(inputs[0].flatten(0, -2)))
        with at_rest(block, rest):
            self.outputs = list(run_block(block, 0, calibration, CPU))
        hook.remove()
        self.weights = weights.split([len(each) for each in self.states])

    def every(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The states and the weights of every so manieth token of each batch, in float64."""
        return tuple(torch.cat([x[::step] for x in each]).double() for each in (self.states, self.weights))


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


@by_name([family for family in WITH_MLP if family.architecture.adds_mlp])
def test_what_a_block_lacks_makes_it_put_out_what_is_wanted(family: Family):
    source, calibration = opened(family)
    # Where a norm follows, nothing asks what it must give; nor is it asked what stands behind the sum.
    architecture = replace(source.architecture, mlp_norm="", token_arguments=())
    block, stream = source.blocks.peek(0, CPU), next(iter(calibration.hidden)).double()
    wanted = stream.flip(1)
    lacking = architecture.lacking(block, wanted, stream)
    torch.testing.assert_close(architecture.put_out(block, stream, lacking, {}), wanted, rtol=1e-12, atol=1e-12)


@by_name(WITH_MLP)
def test_an_mlp_is_refitted_to_the_dense_model_where_the_block_gives_a_sum(family: Family):
    source, calibration = opened(family)
    block, architecture = source.blocks.peek(0, CPU), source.architecture
    outputs, streams = list[torch.Tensor](), list[torch.Tensor]()
    change = torch.randn(source.dims.d_model, generator=torch.Generator().manual_seed(5))

    def changed(_module, _inputs, output):
        outputs.append(output)
        return output + change

    middle = block if architecture.parallel else architecture.middle_module(block)
    hook = middle.register_forward_pre_hook(lambda _module, inputs: streams.append(inputs[0].clone()))
    before = torch.cat(list(run_block(block, 0, calibration, CPU)))
    hook.remove()
    hook = block.get_submodule(architecture.experts or architecture.down).register_forward_hook(changed)
    after = torch.cat(list(run_block(block, 0, calibration, CPU)))
    hook.remove()

    def put_out(change) -> torch.Tensor:
        parts = []
        for batch, states in enumerate(calibration.hidden):
            # What is a sum needs no stream to tell what a change adds.
            stream = streams[batch] if architecture.token_arguments else torch.zeros_like(states)
            arguments = calibration.arguments.of(batch, states, 0)
            parts.append(architecture.put_out(block, stream, outputs[batch].view_as(states) + change, arguments))
        return torch.cat(parts)

    added = put_out(change) - put_out(0)
    # Residuals are of size ten, float32. BLOOM can add the MLP to a norm of the stream: no sum with the stream itself.
    sums = architecture.adds_mlp or family.name == "bloom-normed"
    assert torch.allclose(after - before, added, atol=1e-4) == sums

    def weights(feedback: bool):
        config = CompressionConfig(sparsity=0.3, modules=("mlp",), feedback=feedback, coverage=0)
        return modegpt.compress(family.dense(), tokens(rows=5, length=20), config).state_dict()

    fed, plain = weights(feedback=True), weights(feedback=False)
    same = all(torch.equal(left, right) for left, right in zip(fed.values(), plain.values(), strict=True))
    assert same != (family in ADDING)


SUMLESS = [family for family in WITH_MLP if family.architecture.roles and not family.architecture.adds_mlp]


@by_name(SUMLESS)
def test_without_a_sum_too_the_mlp_is_measured_behind_what_is_written(family: Family, monkeypatch):
    seen, measure = [], BlockCompressor._measure

    def spy(self, block, index, calibration, modules, *rest):
        if "mlp" in modules:
            weight = family.architecture.projection(block, "output").weight
            seen.append(torch.equal(weight, weight.bfloat16().float()))
        return measure(self, block, index, calibration, modules, *rest)

    monkeypatch.setattr(BlockCompressor, "_measure", spy)
    config = CompressionConfig(dtype="bfloat16", coverage=0, feedback=False)
    modegpt.compress(family.dense(), tokens(rows=5, length=20), config)
    assert len(seen) == family.dims.n_layers
    assert all(seen)


@by_name([BY_NAME["llama-grouped"], BY_NAME["falcon"]])
def test_a_block_left_whole_is_not_measured(family: Family):
    source, calibration = opened(family)
    block, outcome = compressed(source, calibration, family.full_ranks()[0], CompressionConfig(solver="best"))
    assert outcome.error == {"mlp": 0.0, "qk": 0.0, "vo": 0.0}
    dense = source.blocks.peek(0, CPU)
    for left, right in zip(run_block(block, 0, calibration, CPU), run_block(dense, 0, calibration, CPU), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)  # one order of sums may differ, in float32


@pytest.mark.parametrize(("whole", "expected"), [(0, [False, True, True]), (1, [False, True])])
def test_the_first_block_that_is_cut_is_refitted_as_one_that_nothing_drifted_before(whole: int, expected, monkeypatch):
    family, seen, refit_one = BY_NAME["llama-grouped"], [], staged.refit_down

    def spy(*arguments):
        seen.append(arguments[-1])
        return refit_one(*arguments)

    monkeypatch.setattr(staged, "refit_down", spy)
    cut = {**family.full_ranks()[0], "mlp": 16}
    plan = ({},) * whole + (cut,) * (family.dims.n_layers - whole)
    modegpt.compress(
        family.dense(), tokens(rows=5, length=20), CompressionConfig(allocation="plan", plan=plan, coverage=0)
    )
    assert seen == expected


def hooks_of(block) -> list[int]:
    return [key for module in block.modules() for key in (*module._forward_hooks, *module._forward_pre_hooks)]


def with_attention(family: Family, implementation: str):
    model = AutoModelForCausalLM.from_config(
        family.config(), dtype=torch.float32, attn_implementation=implementation
    ).eval()
    model.load_state_dict(family.dense().state_dict())
    return model


@torch.no_grad()
def attentions_of(family: Family, ids: torch.Tensor) -> list[torch.Tensor]:
    """What the stock model's heads see of each key, by layer, less what a sink takes of it.

    Some stock code shows the weights as if there were no sink (Granite): by what the contexts are short of, then.
    """
    model, architecture, dims = with_attention(family, "eager"), family.architecture, family.dims
    held: list[dict[str, torch.Tensor]] = []
    for block in decoder_layers(model, architecture.describe()) if architecture.sinks else ():
        held.append({})
        architecture.projection(block, "value").register_forward_hook(
            lambda _module, _inputs, output, own=held[-1]: own.update(value=output)
        )
        architecture.projection(block, "output").register_forward_pre_hook(
            lambda _module, inputs, own=held[-1]: own.update(context=inputs[0])
        )
    shown = list(model(ids, output_attentions=True, use_cache=False).attentions)
    if not architecture.sinks or not torch.allclose(shown[0].sum(-1), torch.ones(())):
        return shown
    for index, own in enumerate(held):
        value, context = (own[name].unflatten(-1, (-1, dims.d_head)).transpose(1, 2) for name in ("value", "context"))
        whole = shown[index] @ value.repeat_interleave(dims.n_heads // dims.n_kv_heads, dim=1)
        shown[index] *= (context * whole).sum(-1, keepdim=True) / whole.square().sum(-1, keepdim=True)
    return shown


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@by_name(LOGITS)
def test_logits_are_measured_with_the_models_own_attention(family: Family, implementation: str, monkeypatch):
    if family.architecture.softcap and implementation == "sdpa":
        pytest.skip("torch's kernel has no cap: transformers drops it")
    if family.architecture.sinks and implementation == "sdpa":
        pytest.skip("torch's kernel has no sinks: transformers refuses it")
    ids = tokens(rows=3, length=FIRST + QUERIES)  # every position after the first ones is measured
    expected = attentions_of(family, ids)
    model = with_attention(family, implementation)
    seen: list[torch.Tensor] = []
    plain = attention_logits.gram

    def gram(query, key, attention, rotary_dim):
        seen.append(attention)
        return plain(query, key, attention, rotary_dim)

    monkeypatch.setattr(attention_logits, "gram", gram)
    dims = family.dims
    for index, block in enumerate(decoder_layers(model, family.architecture.describe())):
        layout = Layout.dense(family.architecture, family.architecture.block_dims(block, dims))
        seen.clear()
        hooks = hooks_of(block)
        total = torch.zeros(dims.n_heads, dims.d_head, dims.d_head, dtype=torch.float64)
        with torch.no_grad(), record_logits(block, layout, total):
            model(ids, use_cache=False)
        own, sinks = expected[index][:, :, FIRST:], None
        if family.architecture.sinks:
            # They come last, a key of features 0 with what the keys leave of the softmax.
            sinks = getattr(block.get_submodule(family.architecture.attention), family.architecture.sinks)
            sunk, seen = torch.cat([part[..., -1:] for part in seen], dim=2), [part[..., :-1] for part in seen]
            torch.testing.assert_close(sunk, 1 - own.sum(-1, keepdim=True), rtol=1e-3, atol=1e-5)
        # Neighbouring queries come together, with the keys up to the last that one of them sees.
        padded = [functional.pad(part, (0, ids.shape[1] - part.shape[-1])) for part in seen]
        weights = torch.cat(padded, dim=2)
        # float32 scores of size ten or so, in another order of sums.
        torch.testing.assert_close(weights, own, rtol=1e-3, atol=1e-5)
        if not family.architecture.softcap:
            # The shares add up to the logits: their variance is that of the log of the attention.
            logs = torch.where(own > 0, own.double().log(), 0)
            if sinks is not None:
                level = sunk.double().log() - sinks.detach().double()[:, None, None]  # less the log of the sum
                logs, own = functional.pad(torch.where(own > 0, logs - level, 0), (0, 1)), torch.cat((own, sunk), -1)
            spread = (own * (logs - (own * logs).sum(-1, keepdim=True)).square()).sum((0, 2, 3))
            c = torch.ones(dims.d_head, dtype=torch.float64)
            c[layout.dims.rotary_dim // 2 : layout.dims.rotary_dim] = 0
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
        assert (total.abs().max() > 0) == (length > 1)
        assert math.isclose((total - total.mT).abs().max().item(), 0, abs_tol=1e-6 * total.abs().max().item())


@pytest.mark.parametrize("name", ["granitemoe", "mixtral"])
def test_what_experts_lack_is_in_the_units_of_the_mixture(name: str, monkeypatch: pytest.MonkeyPatch):
    """Times the block's factor, and added to the stream behind attention, it is the dense model's."""
    family = BY_NAME[name]
    source, calibration = opened(family)
    dense, told = shifted(calibration), told_to_experts(monkeypatch)
    compressed(source, calibration, {**family.full_ranks()[0], "mlp": 16}, CompressionConfig(solver="best"), dense)
    block, middles = source.blocks.peek(0, CPU), []
    hook = source.architecture.middle_module(block).register_forward_pre_hook(
        lambda _module, inputs: middles.append(inputs[0].clone())
    )
    list(run_block(block, 0, calibration, CPU))
    hook.remove()
    factor = float(source.architecture.mlp_factor)
    assert (factor == 1) == (name == "mixtral")
    assert calibration.weights is not None
    for (residual, weights, given), target, rarity, middle in zip(
        told, dense.hidden, calibration.weights, middles, strict=True
    ):
        torch.testing.assert_close(weights, (rarity / target.norm(dim=-1)).float())
        added = factor * (residual + given.view_as(residual))
        torch.testing.assert_close(middle + added, target, rtol=1e-4, atol=1e-4)  # float32 sums of states near 10


def test_no_token_that_is_far_from_the_dense_one_rules_the_refit_of_experts(monkeypatch: pytest.MonkeyPatch):
    family = BY_NAME["mixtral"]
    source, calibration = opened(family)
    dense, told = shifted(calibration), told_to_experts(monkeypatch)
    monkeypatch.setattr("modegpt.sums.token_weights.ASTRAY", 0.85)  # between what the tokens of this model are off by
    compressed(source, calibration, {**family.full_ranks()[0], "mlp": 16}, CompressionConfig(solver="best"), dense)
    assert calibration.weights is not None
    off = torch.cat([residual.norm(dim=-1) for residual, _weights, _given in told]).flatten()
    weights = torch.cat([weights for _residual, weights, _given in told]).flatten()
    norms = torch.cat(list(dense.hidden)).norm(dim=-1).flatten()
    alike = torch.cat(list(calibration.weights)).flatten() / norms
    far = off > 0.85 * norms
    assert 0 < far.sum() < len(far)
    torch.testing.assert_close(weights[~far], alike[~far].float())
    torch.testing.assert_close((weights * off.square())[far], (alike * (0.85 * norms).square())[far].float())


def test_what_was_repaired_in_attention_is_still_told():
    family = BY_NAME["llama-grouped"]
    source, calibration = opened(family)
    config, ranks = CompressionConfig(solver="best"), family.ranks()[0]
    block, first = compressed(source, calibration, {**ranks, "mlp": source.dims.d_int}, config)
    first.repairs.append("told before")
    needed = needed_moments(("mlp",), block, source.architecture, source.dims, config)
    moments = moments_of(source, block, calibration, needed)
    found = compress_block(
        block, source.architecture, source.dims, moments, ranks, config, source.config, 0, ("mlp",), first
    )
    assert found.repairs[:1] == ["told before"]
