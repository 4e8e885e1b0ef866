"""The rule `error`: the damages it measures, and the ranks it chooses."""

import itertools
import math
import operator
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import modegpt
from modegpt import CompressionConfig
from modegpt.allocation import allocate
from modegpt.comparing.scored import Scored
from modegpt.compress import prepare
from modegpt.config import MODULES
from modegpt.errors import InputError, NumericalError
from modegpt.ranks.filling import fill_exponential
from modegpt.ranks.units import kept_by_half, module_units
from modegpt.ranks.whole import LayerSizes, open_slots, trial_rank
from modegpt.running import run as runs
from modegpt.running.damage import COMPARED, LOGIT_COST, SEEN_COST, divergence, hold_out, work


def sizes(n_layers: int) -> list[LayerSizes]:
    full, cost = {"mlp": 1536, "qk": 64, "vo": 64}, {"mlp": 1728, "qk": 6912, "vo": 6912}
    total = sum(full[module] * cost[module] for module in MODULES)
    return [LayerSizes(full, cost, {"mlp": 1, "qk": 2, "vo": 1}, total) for _ in range(n_layers)]


@given(
    damages=st.lists(st.lists(st.floats(1e-5, 1.0), min_size=3, max_size=3), min_size=1, max_size=6),
    sparsity=st.floats(0.05, 0.6),
    bound=st.floats(0.7, 0.95),
    seed=st.integers(0, 2**32),
)
@example(damages=[[1.0, 1e-05, 0.03125]], sparsity=0.5, bound=0.701171875, seed=0)  # the bound between two ranks
@settings(max_examples=50, deadline=None)
def test_the_sum_of_square_damages_is_least(damages, sparsity, bound, seed):
    layers = sizes(len(damages))
    budget = sparsity * sum(size.total for size in layers)
    slots, _ = open_slots(layers, MODULES, 1)
    units = kept_by_half(module_units(layers, slots, damages, bound), budget)
    shares, weights = fill_exponential(1.0, units, budget), [unit.weight for unit in units]
    assert math.fsum(map(operator.mul, shares, weights)) == pytest.approx(budget, rel=1e-9)
    factors = []
    for slot in slots:
        trial = 1 - trial_rank(slot.full, slot.grain) / slot.full
        factors.append(damages[slot.layer][MODULES.index(slot.module)] / trial**2)

    def cost(shares):
        return math.fsum(factor * share**2 for factor, share in zip(factors, shares, strict=True))

    generator = random.Random(seed)
    for _ in range(40):
        giver, taker = generator.sample(range(len(slots)), 2)
        spare = max(0.0, shares[giver] - units[giver].low) * weights[giver]
        moved = min(spare, max(0.0, units[taker].high - shares[taker]) * weights[taker]) * generator.random()
        rival = list(shares)
        rival[giver] -= moved / weights[giver]
        rival[taker] += moved / weights[taker]
        # The level is found to 1e-12 or so, and near the optimum the cost is flat.
        assert cost(rival) >= cost(shares) * (1 - 1e-9)

    # Whole ranks: each is off by less than a step of its own and what the steps of all others leave to it.
    result = allocate("error", layers, sparsity, scores=torch.tensor(damages).double(), max_sparsity=bound)
    step = math.fsum(slot.grain * slot.cost for slot in slots)
    for slot, share in zip(slots, shares, strict=True):
        removed = (slot.full - result.ranks[slot.layer][slot.module]) * slot.cost
        assert abs(removed - share * slot.full * slot.cost) <= step
    removed = sum(size.removed(ranks) for size, ranks in zip(layers, result.ranks, strict=True))
    assert abs(removed - budget) <= max(1e-3 * budget, 2 * 6912)  # one step of query-key


def test_shares_go_with_the_inverse_of_the_damage():
    damages = [[0.12, 0.02, 0.01], [0.06, 0.02, 0.02]]  # an MLP has six times the parameters of the others
    result = allocate("error", sizes(2), 0.2, scores=damages)
    share = {m: [1 - ranks[m] / sizes(1)[0].full[m] for ranks in result.ranks] for m in MODULES}
    # A coordinate is 1/64 of its module, and may be off by half. The MLP takes over what the others' rounding leaves,
    # 1.5 coordinates of 6912 parameters: 0.004 of it, on shares of 0.15 and 0.3.
    assert share["mlp"][1] / share["mlp"][0] == pytest.approx(2, rel=0.04)
    assert share["vo"][0] / share["vo"][1] == pytest.approx(2, rel=0.2)


def test_a_module_that_costs_nothing_goes_first():
    result = allocate("error", sizes(2), 0.2, scores=[[0.0, 0.1, 0.1], [0.1, 0.1, 0.1]], max_sparsity=0.5)
    # At the bound, but for what the rounding of the others leaves: 1.5 coordinates of 6912 parameters, or 6 neurons.
    assert result.ranks[0]["mlp"] == pytest.approx(768, abs=6)
    assert allocate("error", sizes(2), 0.2, scores=[[0.0] * 3] * 2).sparsities == pytest.approx([0.2, 0.2])


def test_every_module_keeps_half_of_what_all_would_keep_alike():
    free = [[0.0, 0.1, 0.1], [0.1, 0.1, 0.1]]
    for sparsity in (0.3, 0.5):
        ranks = allocate("error", sizes(2), sparsity, scores=free).ranks
        # As above; the two layers have 1536 neurons each.
        assert ranks[0]["mlp"] == pytest.approx((1 - sparsity) / 2 * 1536, abs=6), sparsity
    # Close to all that two modules can lose, the bound leaves room for it: no budget becomes impossible.
    result = allocate("error", sizes(2), 0.235, ["qk", "vo"], scores=free)
    assert result.sparsities == pytest.approx([0.235] * 2, rel=0.02)


@pytest.mark.parametrize("bad", [None, [[0.1] * 3], [[0.1] * 2] * 2, [0.1, 0.1]])
def test_scores_of_another_shape_are_refused(bad):
    with pytest.raises(InputError, match="the rule 'error' needs scores"):
        allocate("error", sizes(2), 0.3, scores=bad)


def test_a_damage_that_is_no_number_names_the_layer():
    damages = torch.full((2, 3), 0.1)
    damages[1, 2] = math.nan
    with pytest.raises(NumericalError, match="layer 1: the importance score is NaN or infinite"):
        allocate("error", sizes(2), 0.3, scores=damages)


@pytest.mark.parametrize("solver", ["paper", "best"])
def test_damages_are_divergences_on_windows_that_the_solver_has_not_seen(solver):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    dense = LlamaForCausalLM(config).eval()
    windows = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(1))
    settings = {"batch_size": 4, "solver": solver, "feedback": False, "coverage": 0.0}
    run = prepare(dense, windows, CompressionConfig(sparsity=0.3, allocation="error", **settings), None, None)
    scores = run.scores()
    seen, held = hold_out(windows, 1)
    held = torch.cat((held, run._written(3, 16, seed=1)))
    full = {"mlp": 48, "qk": 8, "vo": 8}

    def log_probabilities(model):
        with torch.no_grad():
            return model(held).logits[:, ::3].double().log_softmax(-1)

    before = log_probabilities(dense)
    for layer, module in itertools.product(range(3), MODULES):
        plan = [dict(full) for _ in range(3)]
        plan[layer][module] = trial_rank(full[module], 2 if module == "qk" else 1)
        alone = CompressionConfig(allocation="plan", plan=tuple(plan), **settings)
        after = log_probabilities(modegpt.compress(dense, seen, alone))
        expected = (before.exp() * (before - after)).sum(-1).mean().item()
        # The divergence is a sum of 64 differences that cancel to second order: in float32 of logits of size 1, some
        # 1e-6 of it where it is 0.001 and more.
        assert scores[layer, MODULES.index(module)].item() == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert expected > 1e-3


def test_damages_are_read_at_the_ranks_at_which_they_were_measured(monkeypatch: pytest.MonkeyPatch):
    """Widths in 16 bits go in steps of 8, so the trial keeps 728 of 1032 neurons and not 723."""
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=1032, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    )
    windows = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
    seen = []

    def spy(name: str):
        call = getattr(runs, name)

        def spied(*arguments, **named):
            seen.append((name, [size.step for size in arguments[1]]))
            return call(*arguments, **named)

        monkeypatch.setattr(runs, name, spied)

    spy("measure_damages")
    settings = CompressionConfig(dtype="bfloat16", sparsity=0.3, allocation="error", solver="paper", modules=("mlp",))
    run = prepare(dense, windows, settings, None, None)
    scores = run.scores()
    spy("allocate")
    run.allocate(scores)
    assert [name for name, _steps in seen] == ["measure_damages", "allocate"]
    assert seen[0][1] == seen[1][1]
    assert trial_rank(1032, seen[0][1][0]["mlp"]) == 728


@pytest.mark.parametrize("change", [1e-3, 0.03, 1.0, 40.0])
def test_a_divergence_in_float32_is_the_one_in_float64(change):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, COMPARED["cpu"] // 3, generator=generator)  # in parts of three rows
    changed = logits + change * torch.randn(logits.shape, generator=generator) + 5
    if change > 1:  # and a token that was impossible becomes likely
        logits[0, 0], changed[0, 0] = -300, 300
    p, q = (each.double().log_softmax(-1) for each in (logits, changed))
    expected = (p.exp() * (p - q)).sum().item()
    # Measured: 2e-6, most of it from the float32 sums of the softmax.
    assert divergence(logits.log_softmax(-1), changed) == pytest.approx(expected, rel=1e-5)


def test_a_divergence_from_itself_is_zero():
    logits = 3 * torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    assert divergence(logits.log_softmax(-1), logits) == 0


def test_progress_counts_the_trials_that_a_block_carries():
    # Two trials begin at each of three blocks. Held tokens pass each block, and seen ones cost SEEN_COST times as much.
    own = 1 + 4 * SEEN_COST
    assert work([2, 2, 2], ratio=4, head=0.5) == [own + 2, own + 4, own + 6, round(0.5 * 7)]
    told: list[tuple[str, int, int]] = []
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=64)
    )
    windows = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(1))
    settings = CompressionConfig(sparsity=0.3, allocation="error", solver="paper", modules=("mlp", "vo"))
    prepare(dense, windows, settings, None, lambda *call: told.append(call)).scores()
    done = [count for stage, count, _total in told if stage == "scores"]
    # 9 windows are seen; 3 are held, and 3 more that the model writes.
    head = 64 * (32 + LOGIT_COST) / (3 * sum(p.numel() for p in dense.model.layers[0].parameters()))
    *blocks, behind = work([2, 2, 2], 9 / 6, head)
    assert done[:4] == [0, *itertools.accumulate(blocks)]
    assert done[4:] == [sum(blocks) + behind * count // 6 for count in range(1, 7)]
    assert {total for stage, _count, total in told if stage == "scores"} == {sum(blocks) + behind}


def test_a_quarter_of_the_windows_at_most_is_held_out():
    windows = torch.arange(40)[:, None].expand(40, 512)
    seen, held = hold_out(windows, 1)
    assert held[:, 0].tolist() == [0, 20]  # 1024 tokens
    assert sorted(torch.cat((seen, held))[:, 0].tolist()) == list(range(40))
    short = windows[:, :8]
    assert hold_out(short, 1)[1][:, 0].tolist() == list(range(0, 40, 4))
    assert hold_out(torch.zeros(8, 4096), 1)[1].shape == (2, 512)
    for count in (1, 2):  # two processes need two windows to see
        seen, held = hold_out(windows[:count], 2)
        assert (len(seen), len(held)) == (count, 1)


def test_of_a_long_window_the_first_tokens_are_held_out():
    _seen, held = hold_out(torch.arange(8 * 4096).view(8, 4096), 1)
    assert held[:, 0].tolist() == [0, 4 * 4096]


def test_a_trial_is_below_full_rank_where_there_is_one_below():
    assert [trial_rank(2, 1), trial_rank(3, 1), trial_rank(4, 2), trial_rank(1, 1)] == [1, 2, 2, 1]


def test_scores_are_kept_by_solver():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, initializer_range=0.2)).eval()
    windows = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(1))
    configs = [CompressionConfig(sparsity=0.3, allocation="error", solver=solver) for solver in ("paper", "best")]
    scored = Scored(dense, windows)
    together = [scored.plan(config).config.plan for config in configs]
    assert together == [Scored(dense, windows).plan(config).config.plan for config in configs]
    assert together[0] != together[1]


def test_a_divergence_of_steep_distributions_is_a_number():
    """A log-probability that rises by more than 709 leaves float64 as a power of its own."""
    generator = torch.Generator().manual_seed(0)
    logits = 800 * torch.randn(8, 101, generator=generator)
    changed = logits + 400 * torch.randn(8, 101, generator=generator)
    p, q = (each.double().log_softmax(-1) for each in (logits, changed))
    assert (q - p).max() > 709
    assert divergence(logits.log_softmax(-1), changed) == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-6)
