"""The dense model's pass: the last blocks measured together, on the way to the logits, are as measured one by one."""

from functools import partial

import pytest
import torch
from torch import Tensor

import modegpt
from conformance.families import FAMILIES, Family, among_covering, tokens
from modegpt.blocks import advance
from modegpt.hidden_states import HiddenStates
from modegpt.report import Stopwatch
from modegpt.running import dense_pass, fisher
from modegpt.running.distributed import Team, join_team
from modegpt.running.source import open_source

CPU = torch.device("cpu")
BESIDE = [
    family
    for family in FAMILIES
    if family.architecture.adds_mlp and not family.dims.n_experts and "mlp" not in family.whole_in(0)
]
ROOM, NO_ROOM = 2**31, 0


def measured(family: Family, monkeypatch, room: int, **settings) -> tuple[dict[str, Tensor], list[int]]:
    """The compressed tensors, and the layers that the dense model ran, in order."""
    passed: list[int] = []

    def counted(block, index, calibration, device):
        passed.append(index)
        advance(block, index, calibration, device)

    monkeypatch.setattr(dense_pass, "AHEAD_BYTES", room)
    for module in (dense_pass, fisher):
        monkeypatch.setattr(module, "advance", counted)
    config = modegpt.CompressionConfig(
        solver="best", coverage=0, allocation="plan", plan=tuple(family.ranks()), **settings
    )
    return modegpt.compress(family.dense(), tokens(rows=6, length=24), config).state_dict(), passed


@pytest.mark.parametrize(
    ("family", "depth"),
    [*((family, 2) for family in BESIDE), (BESIDE[0], 4)],
    ids=[*(family.name for family in BESIDE), f"{BESIDE[0].name}, all blocks"],
)
def test_what_is_measured_together_is_what_is_measured_one_by_one(family: Family, depth: int, monkeypatch):
    monkeypatch.setattr(fisher, "DEPTH", depth)
    together, once = measured(family, monkeypatch, ROOM)
    apart, more = measured(family, monkeypatch, NO_ROOM)
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[name], apart[name]) for name in together)
    assert sorted(once) == list(range(family.dims.n_layers))  # each once
    pairs = zip(family.ranks(), family.full_ranks(), strict=True)
    cut = [rank["mlp"] < full["mlp"] for rank, full in pairs]
    assert (len(more) > len(once)) == any(cut[-depth:])  # else there is nothing to probe


def test_where_memory_is_short_nothing_is_held(monkeypatch):
    _, passed = measured(BESIDE[0], monkeypatch, ROOM, max_host_memory=10**9)
    assert len(passed) > BESIDE[0].dims.n_layers


def test_where_memory_of_another_process_is_short_nothing_is_held(monkeypatch):
    """All processes sum their moments together, so they must measure the same blocks at once."""
    asked: list[object] = []

    def other(_team: Team, value: object) -> object:
        asked.append(value)
        return False if value is True else value

    monkeypatch.setattr(Team, "agree", other)
    _, passed = measured(BESIDE[0], monkeypatch, ROOM)
    assert True in asked
    assert len(passed) > BESIDE[0].dims.n_layers


@pytest.mark.parametrize("family", among_covering(BESIDE), ids=lambda family: family.name)
def test_what_is_held_is_counted(family: Family):
    source = open_source(family.dense(), CPU)
    dims = family.dims
    ranks = [rank if layer in family.whole_mlps else {**rank, "mlp": 8} for layer, rank in enumerate(family.ranks())]
    dense = source.blocks.embed(tokens(rows=6, length=24), 6, HiddenStates())
    peek = partial(source.blocks.peek, device=CPU)
    probe = fisher.FisherProbe(source.blocks, peek, dims.n_layers, torch.arange(6), CPU, seed=0)
    config = modegpt.CompressionConfig(solver="best")
    taken = dense_pass.DensePass(source, config, CPU, join_team(CPU), Stopwatch(CPU), probe, ranks)
    taken.over(peek(0), 0, dense, ranks[0], drifted=True)

    held, counted = 0, 0
    for ahead, hidden in taken.ahead.values():
        sums = [*ahead.attention.sums.values(), *ahead.neurons.sums.values()]
        kept = [*sums, *hidden, *(ahead.normed.states if ahead.normed else [])]
        held += sum(each.nbytes for each in kept)
        counted += dense_pass.held_bytes(source, sum(each.nbytes for each in sums), 6 * 24, fisher.EVERY, 4)
    waiting = -(-6 * 24 // fisher.EVERY) * source.block_dims(dims.n_layers - 1).d_int * 4
    assert len(taken.ahead) == dims.n_layers - 1
    assert held + waiting < counted < 2 * held
