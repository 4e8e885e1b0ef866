"""Moments: exact sums, exact merges, and a hook set that sees every token once."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modegpt.architectures import Architecture, Dimensions, architecture_of
from modegpt.blocks import Calibration, ModelBlocks, run_block
from modegpt.config import CompressionConfig
from modegpt.errors import NumericalError
from modegpt.hidden_states import HiddenStates
from modegpt.moments import GATES_EVERY, SHAPES, BlockMoments, record_moments
from modegpt.observing.experts import Routed
from modegpt.running.surgery import needed_moments
from modegpt.sums.triangle import PANEL

DIMS = Dimensions(n_layers=1, d_model=8, d_int=6, d_head=4, n_heads=4, n_kv_heads=2, rotary_dim=4)
COLUMNS = {
    "mlp": slice(0, 6),
    "query": slice(6, 22),
    "key": slice(22, 30),
    "value": slice(30, 38),
    "context": slice(38, 54),
}
TARGETS = ("mlp_target", "target_sum", "target_energy")
SUMS = [name for name in SHAPES if name not in ("logits", "gate", "fisher", "experts", *TARGETS)]
"""What `update` takes."""
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Products are float32: each of a few dozen terms carries a relative rounding of 2^-24."""


def first_block(model: PreTrainedModel) -> tuple[nn.Module, Architecture, Dimensions, Calibration]:
    """The block, its family and sizes, and the hidden states before it of three windows of 8 tokens, two at a time."""
    architecture = architecture_of(model.config)
    blocks = ModelBlocks(model, architecture, consume=False)
    calibration = blocks.embed(torch.randint(50, (3, 8)), 2, HiddenStates())
    dims = architecture.dimensions(model.config)
    return blocks.peek(0, torch.device("cpu")), architecture, dims, calibration


def moments_of(*batches: torch.Tensor) -> BlockMoments:
    result = BlockMoments.zeros(DIMS, SUMS)
    for batch in batches:
        for source, columns in COLUMNS.items():
            result.update(source, batch[..., columns])
    return result


@pytest.fixture(params=[384, 4], ids=["one panel", "several"])
def panels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large moments are summed in panels of rows, up to the diagonal: of these sizes in one, and in several."""
    monkeypatch.setitem(PANEL, "cpu", request.param)


@pytest.mark.usefixtures("panels")
def test_moments_are_the_sums_the_docstrings_state():
    torch.manual_seed(0)
    batch = torch.randn(3, 5, 54)
    moments = moments_of(batch)
    tokens = {source: batch.double().reshape(15, -1)[:, columns] for source, columns in COLUMNS.items()}
    z, u = tokens["mlp"], tokens["context"]
    q, k, v = (tokens[name].reshape(15, -1, 4) for name in ("query", "key", "value"))
    expected = {
        "mlp": z.T @ z,
        "mlp_sum": z.sum(0),
        "mlp_energy": z.square().sum(0),
        "query": q.square().sum(0),
        "key": k.square().sum(0),
        "query_moment": torch.einsum("tgi,tgj->gij", q, q),
        "key_moment": torch.einsum("tgi,tgj->gij", k, k),
        "key_sum": k.sum(0),
        "value": torch.einsum("tgi,tgj->gij", v, v),
        "context": u.T @ u,
        "context_sum": u.sum(0),
    }
    assert moments.sums.keys() == expected.keys()
    for name, sums in expected.items():
        assert moments[name].dtype == torch.float64
        torch.testing.assert_close(moments[name], sums, **CLOSE, msg=name)


def test_only_the_moments_that_were_asked_for_are_taken():
    batch = torch.ones(2, 3, 54)
    moments = BlockMoments.zeros(DIMS, ["key_sum", "mlp"])
    for source, columns in COLUMNS.items():
        moments.update(source, batch[..., columns])
    assert moments.sums.keys() == {"key_sum", "mlp"}
    assert bool((moments["key_sum"] == 6).all())
    assert bool((moments["mlp"] == 6).all())


@pytest.mark.parametrize("every", [1, 2])
def test_targets_are_paired_with_each_tokens_mlp_input(every):
    torch.manual_seed(3)
    moments = BlockMoments.zeros(DIMS, ["mlp", *TARGETS], every=every)
    inputs, wanted = torch.randn(2, 3, 5, 6), torch.randn(2, 3, 5, 8)
    for z, y in zip(inputs, wanted, strict=True):
        moments.update("mlp", z)
        moments.update_target(y)
    # Every so manieth token of each batch.
    z, y = (x.double().flatten(1, 2)[:, ::every].flatten(0, 1) for x in (inputs, wanted))
    expected = {"mlp": z.T @ z, "mlp_target": z.T @ y, "target_sum": y.sum(0), "target_energy": y.square().sum()}
    for name, total in expected.items():
        torch.testing.assert_close(moments[name], total, **CLOSE)


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
def test_energies_are_of_all_tokens_where_a_moment_is_of_some(weighted: bool):
    """They come from float32 squares of 24 tokens, some of which the moment does not count."""
    torch.manual_seed(3)
    block, architecture, dims, calibration = first_block(llama())
    weights = [torch.rand(2, 8).double(), torch.rand(1, 8).double()]
    taken = {every: BlockMoments.zeros(dims, ("mlp", "mlp_energy"), every=every) for every in (1, 3)}
    for moments in taken.values():
        with record_moments(block, architecture, dims, moments, weights if weighted else None):
            list(run_block(block, 0, calibration, torch.device("cpu")))
    torch.testing.assert_close(taken[3]["mlp_energy"], taken[1]["mlp"].diagonal(), **CLOSE)
    assert bool((taken[3]["mlp_energy"] > taken[3]["mlp"].diagonal()).all())


def test_gates_are_what_the_activations_hold_beside_the_up_projection():
    torch.manual_seed(4)
    moments = BlockMoments.zeros(DIMS, ["gate"], every=2)
    a, u = torch.randn(3, 7, 6), torch.randn(3, 7, 6)
    u[0, 0, 0] = 0  # then the gate cannot be told, and counts as closed
    moments.update_gates(a * u, u)
    a[0, 0, 0] = 0
    some = a.flatten(0, 1)[:: 2 * GATES_EVERY]
    assert moments["gate"].dtype == torch.float32
    torch.testing.assert_close(moments["gate"], some.T @ some, **CLOSE)


@pytest.mark.usefixtures("panels")
def test_a_sum_that_was_read_can_be_added_to():
    torch.manual_seed(1)
    first, second, third = torch.randn(3, 5, 54)
    together, moments, other = moments_of(first, second, third), moments_of(first), moments_of(third)
    for name in SUMS:
        moments[name]
    for source, columns in COLUMNS.items():
        moments.update(source, second[..., columns])
    for name in SUMS:
        moments[name]
    moments.merge(other)
    for name in SUMS:
        assert torch.equal(together[name], moments[name]), name


@pytest.mark.usefixtures("panels")
def test_split_batches_merge_to_the_same_bits():
    torch.manual_seed(1)
    first, second = torch.randn(2, 5, 54), torch.randn(4, 5, 54)
    together, merged, other = moments_of(first, second), moments_of(first), moments_of(second)
    merged.n_tokens, other.n_tokens = 10, 20
    merged.merge(other)
    assert merged.n_tokens == 30
    for name in SUMS:
        assert torch.equal(together[name], merged[name]), name


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("key", "key states"),
        ("key_moment", "key states"),
        ("mlp", "MLP activations"),
        ("mlp_sum", "MLP activations"),
        ("context", "contexts"),
        ("logits", "attention logits"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_names_layer_and_matrix(name, meaning, bad):
    moments = BlockMoments.zeros(DIMS, ["value", name])
    moments.check_finite(7)
    moments[name].view(-1)[3] = bad
    with pytest.raises(NumericalError, match=rf"layer 7: NaN or infinity in the {meaning} on"):
        moments.check_finite(7)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=32, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def opt() -> OPTForCausalLM:
    config = OPTConfig(
        hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=4, vocab_size=50,
        max_position_embeddings=32,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


@pytest.mark.parametrize("preset", ["paper", "best"])
def test_hooks_see_every_token_once_and_leave_nothing_behind(preset):
    torch.manual_seed(2)
    model = llama()
    architecture = architecture_of(model.config)
    blocks = ModelBlocks(model, architecture, consume=False)
    calibration = blocks.embed(torch.randint(50, (5, 8)), 2, HiddenStates())
    assert [len(batch) for batch in calibration.hidden] == [2, 2, 1]
    dims = architecture.dimensions(model.config)
    block = blocks.take(0, torch.device("cpu"))
    names = needed_moments(("mlp", "qk", "vo"), block, architecture, dims, CompressionConfig(solver=preset))
    moments = BlockMoments.zeros(dims, [*names, "key"])
    with record_moments(block, architecture, dims, moments):
        outputs = list(run_block(block, 0, calibration, torch.device("cpu")))
    assert moments.n_tokens == 5 * 8
    before = {name: total.clone() for name, total in moments.sums.items()}
    list(run_block(block, 0, calibration, torch.device("cpu")))
    assert moments.n_tokens == 5 * 8
    assert all(torch.equal(before[name], total) for name, total in moments.sums.items())
    assert all(bool(total.any()) for total in before.values())
    # The states that were recorded are those of the model itself.
    hidden = torch.cat(list(calibration.hidden)).flatten(0, 1)
    attention = model.model.layers[0].self_attn
    normed = model.model.layers[0].input_layernorm(hidden)
    expected = attention.k_proj(normed).double().reshape(-1, 2, 4).square().sum(0)
    torch.testing.assert_close(moments["key"], expected, **CLOSE)
    assert len(outputs) == 3


@pytest.mark.parametrize("make", [llama, opt])
def test_a_token_of_weight_n_counts_as_n_tokens(make):
    """Windows of weights 1, 2 and 3 are these windows once, twice and three times."""
    torch.manual_seed(3)
    model = make()
    architecture = architecture_of(model.config)
    blocks = ModelBlocks(model, architecture, consume=False)
    dims = architecture.dimensions(model.config)
    block = blocks.peek(0, torch.device("cpu"))
    windows, copies = torch.randint(50, (3, 8)), torch.tensor([1, 2, 3])
    weights = copies.double()[:, None].expand(3, 8)
    names = ("mlp", "mlp_sum", *TARGETS, "context", "context_sum", "logits" if make is llama else "query_moment")

    def taken(windows: torch.Tensor, weights: torch.Tensor | None) -> BlockMoments:
        calibration = blocks.embed(windows, 2, HiddenStates())
        calibration.weights = None if weights is None else weights.split(2)
        moments = BlockMoments.zeros(dims, names)
        with record_moments(block, architecture, dims, moments, calibration.weights):
            for output in run_block(block, 0, calibration, torch.device("cpu")):
                moments.update_target(output)
        return moments

    weighted, alike = taken(windows, weights), taken(windows, None)
    repeated = taken(windows.repeat_interleave(copies, dim=0), None)
    for name in names[:-1]:
        torch.testing.assert_close(weighted[name], repeated[name], **CLOSE)
    assert torch.equal(weighted[names[-1]], alike[names[-1]])  # query-key has no weights


@pytest.mark.parametrize(
    ("make", "preset", "expected"),
    [
        (llama, "paper", {"mlp", "query", "key", "value"}),
        (llama, "best", {"mlp", "logits", "context", "context_sum"}),
        (opt, "paper", {"mlp", "query", "key", "value"}),
        (opt, "best", {"mlp", "mlp_sum", "query_moment", "key_moment", "key_sum", "context", "context_sum"}),
    ],
)
def test_solvers_ask_for_sums_where_a_bias_can_carry_the_mean(make, preset, expected):
    model = make()
    architecture = architecture_of(model.config)
    dims = architecture.dimensions(model.config)
    block = ModelBlocks(model, architecture, consume=False).peek(0, torch.device("cpu"))
    names = needed_moments(("mlp", "qk", "vo"), block, architecture, dims, CompressionConfig(solver=preset))
    assert set(names) == expected
    assert len(names) == len(expected)


@pytest.mark.parametrize("make", [llama, opt])
def test_tokens_weighed_by_norm_are_those_of_the_weights_that_the_output_gives(make):
    """What is held back to the end of a block is what weights known beforehand would have counted."""
    torch.manual_seed(3)
    block, architecture, dims, calibration = first_block(make())
    weights = [torch.rand(2, 8).double(), torch.rand(1, 8).double()]
    names = ("mlp", "gate") if make is llama else ("mlp", "mlp_sum")
    taken = []
    for by_norm in (True, False):
        moments = BlockMoments.zeros(dims, names, every=3)
        outputs = list(run_block(block, 0, calibration, torch.device("cpu")))
        known = [weight / output.norm(dim=-1) for weight, output in zip(weights, outputs, strict=True)]
        with record_moments(block, architecture, dims, moments, weights if by_norm else known, by_norm):
            list(run_block(block, 0, calibration, torch.device("cpu")))
        taken.append(moments)
    assert taken[0].n_tokens == pytest.approx(taken[1].n_tokens, rel=1e-6)
    for name in names:
        torch.testing.assert_close(taken[0][name], taken[1][name], **CLOSE)
        assert taken[0][name].any()


def test_which_tokens_count_does_not_hang_on_how_windows_are_shared():
    """Windows of 7 tokens, of which every third counts: two processes see what one does."""
    torch.manual_seed(3)
    model = llama()
    architecture = architecture_of(model.config)
    blocks = ModelBlocks(model, architecture, consume=False)
    dims = architecture.dimensions(model.config)
    block, windows = blocks.peek(0, torch.device("cpu")), torch.randint(50, (5, 7))

    def taken(places: torch.Tensor, offsets: list[torch.Tensor] | None) -> BlockMoments:
        calibration = blocks.embed(windows[places], 3, HiddenStates())
        moments = BlockMoments.zeros(dims, ("mlp", "gate"), every=3)
        with record_moments(block, architecture, dims, moments, offsets=offsets):
            list(run_block(block, 0, calibration, torch.device("cpu")))
        return moments

    whole = taken(torch.arange(5), None)
    shared = None
    for rank in range(2):
        places = torch.arange(5)[rank::2]
        part = taken(places, list((places % 3 * 7).split(3)))
        if shared is None:
            shared = part
        else:
            shared.merge(part)
    assert shared is not None
    assert shared.n_tokens == whole.n_tokens == 7 + 5  # of 21 and of 14 tokens
    for name in ("mlp", "gate"):
        torch.testing.assert_close(shared[name], whole[name], **CLOSE)


def test_moments_of_an_expert_are_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PANEL, "cpu", 4)
    torch.manual_seed(0)
    moments = BlockMoments.zeros(replace(DIMS, n_experts=2), ["experts"])
    z, shares = torch.randn(9, DIMS.d_int), torch.rand(9, 1)
    moments.update_experts([Routed(1, torch.arange(9), shares, z)])
    expected = ((shares * z).T @ (shares * z)).double()
    torch.testing.assert_close(moments.expert(1)["mlp"], expected, **CLOSE)


def test_token_weights_are_for_what_a_refit_reads():
    torch.manual_seed(3)
    block, architecture, dims, calibration = first_block(llama())
    names, taken = ("query", "key", "value", "key_sum", "query_moment"), []
    for weights in (None, [torch.rand(2, 8).double(), torch.rand(1, 8).double()]):
        moments = BlockMoments.zeros(dims, names)
        with record_moments(block, architecture, dims, moments, weights):
            list(run_block(block, 0, calibration, torch.device("cpu")))
        taken.append(moments)
    assert all(torch.equal(taken[0][name], taken[1][name]) for name in names)


def test_the_bias_of_the_projection_that_is_refitted_decides():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    # Its values have biases, and its output projection has none that could hold a mean.
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=50))
    block, architecture, dims, _calibration = first_block(model)
    assert needed_moments(("vo",), block, architecture, dims, CompressionConfig()) == ("context",)
