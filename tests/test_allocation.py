"""Sparsity allocation against the paper's formulas, its published tables, and the parameter budget."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modegpt import CompressionConfig
from modegpt.allocation import alike, allocate
from modegpt.errors import InputError, NumericalError
from modegpt.ranks.filling import Unit, auto_temperature, fill_additive, fill_exponential
from modegpt.ranks.whole import LayerSizes, Slot, round_to_budget

MODULES = ("mlp", "qk", "vo")

# The paper's table of layer ranks (appendix "Global Sparsity Allocation"): at 30 %, ε = 0.1 and 0.02.
LLAMA_7B = """
3989 3886 3813 3889 3750 3616 3598 3612 3625 3593 3546 3660 3654 3568 3575 3544
3453 3241 2997 2703 2413 1741 1620 1217 1129 1254 1054 741 1203 1363 2640 4060"""
LLAMA_70B = """
8192 8183 8186 8169 8143 8103 8130 8088 8134 7983 7908 7873 7957 8018 7932 7968 7772 8000 7858 7784
7486 7419 7079 7016 7090 7596 7214 6784 6620 6556 6204 6384 6366 6762 6719 6411 6472 6356 6651 6918
7138 6839 6872 6112 6620 5467 5042 5328 4402 3940 3563 3745 3632 3076 2814 3051 2814 2622 3025 2395
2189 2128 2158 2128 2248 2037 2760 2947 2453 3051 3152 3609 3446 3540 4148 4694 5548 5994 7355 8187"""
PUBLISHED = [(LLAMA_7B, 4096, 0.1), (LLAMA_70B, 8192, 0.02)]


def llama(d_model, d_int, d_head, n_heads, n_kv_heads=None, whole=()):
    """A Llama block: no biases, two norms."""
    heads = n_heads + (n_kv_heads or n_heads)
    cost = {"mlp": 3 * d_model, "qk": heads * d_model, "vo": heads * d_model}
    full = {"mlp": d_int, "qk": d_head, "vo": d_head}
    total = sum(cost[m] * full[m] for m in MODULES) + 2 * d_model
    return LayerSizes(full, cost, {"mlp": 1, "qk": 2, "vo": 1}, total, frozenset(whole))


SEVEN_B = llama(4096, 11008, 128, 32)
SMOL = llama(576, 1536, 64, 9, 3)


def single(weight):
    """A layer with one module of `weight` parameters, one a rank: sparsity and rank are nearly continuous."""
    return LayerSizes({"mlp": weight}, {"mlp": 1}, {"mlp": 1}, weight)


def removed(sizes, allocation):
    return sum(size.removed(ranks) for size, ranks in zip(sizes, allocation.ranks, strict=True))


def total(sizes):
    return sum(size.total for size in sizes)


def objective(scores, sparsities, weights, epsilon):
    """The paper's objective, each block weighted by its parameters as in its refined version."""
    entropy = [-phi * math.log(phi) if phi > 0 else 0.0 for phi in sparsities]
    terms = zip(weights, scores, sparsities, entropy, strict=True)
    return math.fsum(w * (s * (1 - phi) + epsilon * h) for w, s, phi, h in terms)


score = st.floats(0, 1)
layer_sizes = st.builds(
    llama,
    d_model=st.integers(8, 96),
    d_int=st.integers(8, 300),
    d_head=st.integers(2, 16).map(lambda pairs: 2 * pairs),
    n_heads=st.integers(1, 4).map(lambda n: 2 * n),
    n_kv_heads=st.sampled_from([1, 2]),
)


@given(
    layers=st.lists(st.tuples(score, st.integers(1000, 100_000)), min_size=2, max_size=8),
    sparsity=st.floats(0.02, 0.6),
    epsilon=st.floats(0.01, 10),
    bound=st.floats(0.65, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_the_optimum_beats_random_feasible_allocations(layers, sparsity, epsilon, bound, seed):
    scores, weights = [s for s, _ in layers], [w for _, w in layers]
    found = allocate("influence", [single(w) for w in weights], sparsity, ("mlp",), scores, epsilon, bound).sparsities
    # A rank is at least one step, so one parameter in a thousand or less cannot be removed.
    caps = [min(bound, 1 - 1 / w) for w in weights]
    best = objective(scores, found, weights, epsilon)
    generator = random.Random(seed)
    for trial in range(40):
        nearby = trial % 2  # half of the rivals are drawn at random, half are small changes of the answer
        draw = [
            min(max(f + 0.02 * generator.uniform(-1, 1), 0), cap) if nearby else cap * generator.random()
            for f, cap in zip(found, caps, strict=True)
        ]
        rival = to_budget(draw, weights, caps, sparsity * sum(weights))
        # 1e-9 relative: the rounding of sums of up to eight terms, far below any difference that matters.
        assert objective(scores, rival, weights, epsilon) <= best + 1e-9 * abs(best)


def to_budget(draw, weights, caps, budget):
    """Scale a draw down to 0, or its distance to the caps, so that it is feasible."""
    have = sum(w * x for w, x in zip(weights, draw, strict=True))
    if have >= budget:
        return [x * budget / have for x in draw]
    room = sum(w * cap for w, cap in zip(weights, caps, strict=True))
    return [cap - (cap - x) * (room - budget) / (room - have) for x, cap in zip(draw, caps, strict=True)]


@given(
    rule=st.sampled_from(["influence", "influence-blocks", "owl"]),
    sizes=st.lists(layer_sizes, min_size=1, max_size=6),
    sparsity=st.floats(0.01, 0.6),
    temperature=st.one_of(st.just("auto"), st.floats(1e-300, 1e300)),
    modules=st.sampled_from([MODULES, ("mlp",), ("qk", "vo"), ("mlp", "vo"), ("qk",)]),
    bound=st.floats(0.3, 1),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_the_budget_is_met_or_refused(rule, sizes, sparsity, temperature, modules, bound, data):
    columns = 2 if rule == "influence-blocks" else 1
    scores = torch.tensor(data.draw(st.lists(score, min_size=len(sizes) * columns, max_size=len(sizes) * columns)))
    scores = scores.reshape(len(sizes), 2) if columns == 2 else scores
    # 1e-9 of slack is granted to a sparsity that was computed from the largest one.
    if sparsity > largest(sizes, modules, bound, columns == 2) * (1 + 1e-9):
        for told in (scores, alike(rule, len(sizes))):  # which is known before there are scores
            with pytest.raises(InputError, match="the largest possible is"):
                allocate(rule, sizes, sparsity, modules, told, temperature, bound)
        return
    allocate(rule, sizes, sparsity, modules, alike(rule, len(sizes)), temperature, bound)
    result = allocate(rule, sizes, sparsity, modules, scores, temperature, bound)
    budget = sparsity * total(sizes)
    largest_step = max(size.cost[m] * size.step[m] for size in sizes for m in MODULES)
    assert abs(removed(sizes, result) - budget) <= max(1e-3 * budget, largest_step)
    assert math.fsum(p * s.total for p, s in zip(result.sparsities, sizes, strict=True)) == pytest.approx(budget, 2e-9)
    assert not any("cannot meet" in warning for warning in result.warnings)
    for size, ranks, share in zip(sizes, result.ranks, result.sparsities, strict=True):
        assert columns == 2 or share <= bound + 1e-12  # the last digits of a sum of three
        for module in MODULES:
            assert size.step[module] <= ranks[module] <= size.full[module]
            assert (size.full[module] - ranks[module]) % size.step[module] == 0
            assert module in modules or ranks[module] == size.full[module]


def largest(sizes, modules, bound, apart, round_to=1):
    """The largest sparsity with every rank at its smallest and no block above the bound."""
    amount = 0
    for size in sizes:
        for part in (("qk", "vo"), ("mlp",)) if apart else (MODULES,):
            grains = {m: math.lcm(size.step[m], round_to) for m in part if m in modules}
            most = sum(size.cost[m] * (size.full[m] - grain) for m, grain in grains.items() if grain < size.full[m])
            amount += min(most, bound * (sum(map(size.weight, part)) if apart else size.total))
    return amount / total(sizes)


bounds = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@given(
    blocks=st.lists(st.tuples(score, st.floats(1, 1000), bounds), min_size=1, max_size=6),
    level=st.floats(0, 1),
    epsilon=st.floats(0.05, 5),
)
@settings(max_examples=100, deadline=None)
def test_filling_between_floors_and_ceilings_is_what_bisection_finds(blocks, level, epsilon):
    units = [Unit([], s, w, low, high) for s, w, (low, high) in blocks]
    least, most = math.fsum(u.weight * u.low for u in units), math.fsum(u.weight * u.high for u in units)
    budget = least + level * (most - least)
    offsets = [-u.score for u in units]
    for found, share in (
        (fill_exponential(epsilon, units, budget), lambda t, u: math.exp(t - u.score / epsilon)),
        (fill_additive(offsets, units, budget), lambda t, u: t - u.score),
    ):
        clipped = lambda t, share=share: [min(max(share(t, u), u.low), u.high) for u in units]  # noqa: E731
        low, high = -500.0, 30.0  # from far below every floor to above every ceiling: 1·exp(1/0.05) is exp(20)
        for _ in range(100):
            middle = (low + high) / 2
            spent = math.fsum(u.weight * value for u, value in zip(units, clipped(middle), strict=True))
            low, high = (middle, high) if spent < budget else (low, middle)
        # 1e-7: weights a thousand apart make the small unit's share that much less certain than the sum's 1e-13,
        # and a level with |t| up to 500 holds 1e-13.
        assert found == pytest.approx(clipped(high), rel=1e-7, abs=1e-9)


def test_a_budget_below_the_floors_leaves_every_unit_at_its_floor():
    units = [Unit([], 0.5, 10.0, 0.2, 0.9), Unit([], 0.1, 10.0, 0.0, 0.9)]
    assert fill_exponential(0.3, units, 1.0) == [0.2, 0.0]
    assert fill_additive([-0.5, -0.1], units, 1.0) == [0.2, 0.0]


@given(scores=st.lists(score, min_size=2, max_size=12), sparsity=st.floats(0.01, 0.4))
@settings(max_examples=100, deadline=None)
def test_with_no_bound_and_a_large_temperature_it_is_the_papers_closed_form(scores, sparsity):
    # At ε = 2 scores in [0, 1] give φ ≤ 0.4·e^½ < 1, so the closed form is feasible.
    result = allocate("influence", [single(10**6)] * len(scores), sparsity, ("mlp",), scores, 2.0, 1.0)
    expected = len(scores) * sparsity * torch.softmax(-torch.tensor(scores, dtype=torch.float64) / 2.0, 0)
    torch.testing.assert_close(torch.tensor(result.sparsities, dtype=torch.float64), expected, rtol=1e-12, atol=0)


@given(scores=st.lists(score, min_size=2, max_size=12), sparsity=st.floats(0.01, 0.9))
def test_a_growing_temperature_tends_to_uniform(scores, sparsity):
    def distance(epsilon):
        result = allocate("influence", [single(10**6)] * len(scores), sparsity, ("mlp",), scores, epsilon)
        return max(abs(phi - sparsity) for phi in result.sparsities)

    # φ_i/φ is within exp(±1/ε) for scores in [0, 1]: a relative 1.0e-6 at ε = 1e6; 1e-12 is the rounding of the sums.
    assert distance(1e6) <= 1.1e-6 * sparsity + 1e-12
    assert distance(1e6) <= distance(1.0) + 1e-12


@given(
    scores=st.lists(st.integers(0, 10**6), min_size=2, max_size=10, unique=True),
    rule=st.sampled_from(["influence", "influence-blocks", "owl"]),
    round_to=st.sampled_from([1, 8]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_permuting_the_layers_permutes_the_answer(scores, rule, round_to, seed):
    order = list(range(len(scores)))
    random.Random(seed).shuffle(order)
    sizes = [llama(16 + 8 * (s % 3), 64 + 8 * (s % 5), 32, 4, 2) for s in scores]
    values = [[s / 1e6, (s / 1e6) ** 2] if rule == "influence-blocks" else s / 1e6 for s in scores]

    def solve(indices):
        chosen = [values[i] for i in indices]
        return allocate(rule, [sizes[i] for i in indices], 0.3, MODULES, chosen, 0.2, round_to=round_to)

    straight, shuffled = solve(range(len(scores))), solve(order)
    assert shuffled.sparsities == [straight.sparsities[i] for i in order]
    # Layers that the rounding visits in a tie keep the order they came in, so only distinct sparsities are compared.
    if len(set(straight.sparsities)) == len(scores):
        assert shuffled.ranks == [straight.ranks[i] for i in order]


def test_uniform_keeps_the_papers_ceilings():
    ranks = allocate("uniform", [llama(16, 11, 10, 2)], 0.3, MODULES).ranks
    # ⌈0.7·11⌉, ⌈0.7·5⌉ pairs, and ⌈0.7·10⌉, which is 7.000000000000001 in floats if computed as (1 − 0.3)·10.
    assert ranks == [{"mlp": 8, "qk": 8, "vo": 7}]
    plain = LayerSizes({"qk": 10}, {"qk": 1}, {"qk": 1}, 10)
    assert allocate("uniform", [plain], 0.3, MODULES).ranks == [{"qk": 7}]


@pytest.mark.parametrize("d_int", [2, 10, 64, 100, 1000, 1536, 11008])
def test_ceilings_are_exact_for_percentages(d_int):
    size = LayerSizes({"mlp": d_int}, {"mlp": 1}, {"mlp": 1}, d_int)
    for percent in range(1, 100):
        expected = -(-(100 - percent) * d_int // 100)
        assert allocate("uniform", [size], percent / 100, MODULES).ranks[0]["mlp"] == expected


def test_uniform_compensates_nothing():
    result = allocate("uniform", [SMOL] * 2, 0.25, ("mlp",))
    assert result.ranks == [{"mlp": 1152, "qk": 64, "vo": 64}] * 2
    assert [warning.split(":")[0] for warning in result.warnings] == [
        f"{module} stays whole, as it is not among the modules to compress" for module in ("qk", "vo")
    ]


def test_uniform_says_when_wide_steps_leave_most_of_it():
    """A tenth of 40 neurons is no step of 8."""
    size = LayerSizes({"mlp": 40}, {"mlp": 1}, {"mlp": 8}, 50)
    (warning,) = allocate("uniform", [size], 0.1, MODULES).warnings
    assert "0.00% of the blocks' parameters are removed and not 8.00%" in warning
    assert allocate("uniform", [size], 0.25, MODULES).warnings == []


@pytest.mark.parametrize("rule", ["influence", "influence-blocks", "owl"])
def test_llama_2_7b_at_30_percent(rule):
    sizes = [SEVEN_B] * 32
    generator = random.Random(0)
    columns = 2 if rule == "influence-blocks" else 1
    scores = torch.tensor([[generator.random() for _ in range(columns)] for _ in range(32)]).squeeze(1)
    result = allocate(rule, sizes, 0.3, MODULES, scores)
    # The whole-model target is 0.1 %; half an MLP neuron, 12288/2 of 1.9e9 parameters, is what the rounding leaves.
    assert abs(removed(sizes, result) - 0.3 * total(sizes)) <= 12288 / 2
    for size, ranks, share in zip(sizes, result.ranks, result.sparsities, strict=True):
        assert abs(size.removed(ranks) - share * size.total) <= 12288  # each layer keeps its own share, too


@pytest.mark.parametrize(("table", "d", "epsilon"), PUBLISHED)
def test_the_papers_published_ranks(table, d, epsilon):
    ranks = [int(rank) for rank in table.split()]
    # The stated budget is 30 %; rounding each rank moves the average by at most half of 1/4096, which is 1.2e-4.
    assert sum(ranks) / len(ranks) / d == pytest.approx(0.7, abs=1.2e-4)
    # s = −ε log φ inverts the paper's rule up to a constant; φ = 0 (a rank of 8192) stands for less than half a rank.
    scores = [-epsilon * math.log(max(d - rank, 0.25) / d) for rank in ranks]
    result = allocate("influence", [single(d)] * len(ranks), 0.3, ("mlp",), scores, epsilon)
    # One rank of rounding in the table, one in ours, and the table's average that is 3e-5 off: 0.1 rank of 3355.
    worst = max(abs(ours["mlp"] - theirs) for ours, theirs in zip(result.ranks, ranks, strict=True))
    assert worst <= 2
    assert removed([single(d)] * len(ranks), result) == round(0.3 * d * len(ranks))


def test_auto_temperature_is_near_the_papers_choice():
    # The published 7B ranks have a largest sparsity of 1 − 741/4096 = 82 % at ε = 0.1: 80 % needs slightly more.
    ranks = [int(rank) for rank in LLAMA_7B.split()]
    scores = [-0.1 * math.log(1 - rank / 4096) for rank in ranks]
    epsilon, warnings = auto_temperature(scores, [1.0] * 32, 0.3 * 32)
    assert 0.1 < epsilon < 0.11
    assert warnings == []


@given(scores=st.lists(score, min_size=2, max_size=12), sparsity=st.floats(0.1, 0.79))
@settings(max_examples=100, deadline=None)
def test_auto_temperature_is_the_smallest_that_keeps_to_80_percent(scores, sparsity):
    n, spread = len(scores), max(scores) - min(scores)
    if spread < 1e-6:  # equal scores have no scale
        return
    epsilon, warnings = auto_temperature(scores, [1.0] * n, sparsity * n)
    closed_form = lambda e: n * sparsity * torch.softmax(-torch.tensor(scores, dtype=torch.float64) / e, 0).max()  # noqa: E731
    if warnings:  # the average is so near 80 % that only a practically uniform allocation keeps to it
        assert closed_form(1000 * spread) > 0.8
        return
    assert closed_form(epsilon) <= 0.8 + 1e-9  # torch's softmax and ours round apart
    # 1 % less must be too little, or ε has reached its lower end, a hundredth of the spread.
    assert closed_form(0.99 * epsilon) > 0.8 - 1e-9 or epsilon == pytest.approx(spread / 100)


def test_an_average_above_80_percent_is_spread_evenly_and_said():
    result = allocate("influence", [single(10**5)] * 4, 0.85, ("mlp",), [0.1, 0.2, 0.3, 0.4])
    assert result.sparsities == pytest.approx([0.85] * 4, rel=1e-3)  # ε is a thousand spreads
    assert "below 80%" in result.warnings[-1]


def test_owl_follows_its_published_formula():
    ratios, width = torch.tensor([0.5, 2.0, 1.0, 4.0], dtype=torch.float64), 0.08
    result = allocate("owl", [single(10**6)] * 4, 0.3, MODULES, ratios, owl_lambda=width)
    scaled = (ratios - ratios.min()) / (ratios.max() - ratios.min()) * 2 * width
    assert result.sparsities == pytest.approx((0.3 - (scaled - scaled.mean())).tolist(), rel=1e-12)
    assert result.temperature is None
    equal = allocate("owl", [single(10**6)] * 3, 0.3, MODULES, [1.0] * 3)
    assert equal.sparsities == pytest.approx([0.3] * 3, rel=1e-12)


def test_scored_apart_the_ratio_is_that_of_the_stationarity_condition():
    scores, epsilon = torch.tensor([[0.3, 0.1], [0.2, 0.5]]), 0.4
    result = allocate("influence-blocks", [SEVEN_B] * 2, 0.2, MODULES, scores, epsilon)
    shares = []
    for ranks in result.ranks:
        attention = SEVEN_B.removed({**ranks, "mlp": 11008}) / (SEVEN_B.weight("qk") + SEVEN_B.weight("vo"))
        shares.append([attention, 1 - ranks["mlp"] / 11008])
    logs = torch.tensor(shares, dtype=torch.float64).log() + scores / epsilon
    # φ = c·exp(−s/ε): a constant, but for steps of one rotary pair, 1/64 of q and k and a tenth of their φ of 0.2.
    assert logs.max() - logs.min() < 0.06


@pytest.mark.parametrize("round_to", [8, 16, 64])
@pytest.mark.parametrize("rule", ["uniform", "influence", "influence-blocks"])
def test_rounding_to_multiples_keeps_the_budget(rule, round_to):
    sizes = [SEVEN_B] * 32
    scores = torch.rand(32, 2, generator=torch.Generator().manual_seed(0))
    scores = scores if rule == "influence-blocks" else scores[:, 0]
    result = allocate(rule, sizes, 0.3, MODULES, scores, round_to=round_to)
    budget = 0.3 * (total(sizes) if rule != "uniform" else 32 * sum(SEVEN_B.weight(m) for m in MODULES))
    assert abs(removed(sizes, result) - budget) <= 1e-3 * budget
    assert all(rank % round_to == 0 and rank > 0 for ranks in result.ranks for rank in ranks.values())
    assert result.warnings == []


def test_wide_steps_are_balanced_over_the_layers():
    # With multiples of 64 a head of 128 has ranks 64 and 128 only; of 32 layers the right share must take each.
    result = allocate("uniform", [SEVEN_B] * 32, 0.3, MODULES, round_to=64)
    for module in ("qk", "vo"):
        # Half a step may be owed after the last layer, so the average over the layers is off by at most 32/32.
        assert sum(ranks[module] for ranks in result.ranks) / 32 == pytest.approx(0.7 * 128, abs=1)


def slot(layer, cost, steps):
    return Slot(layer, "mlp", steps + 1, cost, 1, steps + 1)


def test_what_the_last_layer_cannot_round_is_taken_where_steps_are_finest():
    # Layer 1 rounds 3.4 to no step of 7; the remainder goes to the steps of 1 in layer 0, visited before.
    assert round_to_budget([slot(0, 1, 10), slot(1, 7, 3)], [5.0, 3.4], [1.0, 0.5], allowed=0.5) == [8, 0]
    # Likewise given back: 4 rounds up to a step of 7.
    assert round_to_budget([slot(0, 1, 10), slot(1, 7, 3)], [5.0, 4.0], [1.0, 0.5], allowed=0.5) == [2, 1]


def test_a_module_at_its_limit_owes_no_more_than_half_a_step_to_the_next_layer():
    # Attention of layer 0 can give 10 of 30: its MLP takes over 20, and that of layer 1 is owed 5 at most.
    slots = [Slot(0, "qk", 2, 10, 1, 2), slot(0, 1, 100), Slot(1, "qk", 6, 10, 1, 6), slot(1, 1, 100)]
    assert round_to_budget(slots, [30.0, 10.0, 8.0, 10.0], [1.0, 0.5], allowed=0.5) == [1, 30, 1, 8]


def test_what_is_removed_at_the_largest_multiple_counts_as_removed():
    # In steps of 4, of 16 and of 19, whose largest multiple is 16: at one step each, 1 of 5 and 0 of 7 are missing.
    slots = [Slot(0, "mlp", 16, 1, 4, 16), Slot(1, "mlp", 19, 1, 4, 16), slot(2, 100, 1)]
    assert round_to_budget(slots, [5.0, 7.0, 3.0], [1.0, 0.5, 0.2], allowed=0.5) == [2, 1, 0]


def test_steps_that_miss_the_budget_are_traded_against_each_other():
    slots = [slot(0, 10, 5), slot(0, 14, 5)]
    # 20 + 32 is reached by neither kind alone: two steps each leave 4, the difference of one step of 14 and 10.
    assert round_to_budget(slots, [20.0, 32.0], [1.0], allowed=5.0) == [2, 2]
    assert round_to_budget(slots, [20.0, 32.0], [1.0], allowed=1.0) == [1, 3]


@given(
    sizes=st.lists(layer_sizes, min_size=1, max_size=5),
    sparsity=st.floats(0.001, 0.5),
    round_to=st.sampled_from([2, 3, 8, 16, 64]),
    rule=st.sampled_from(["uniform", "influence", "influence-blocks"]),
)
@settings(max_examples=200, deadline=None)
def test_multiples_hold_for_any_model_and_a_missed_budget_is_said(sizes, sparsity, round_to, rule):
    shape = (len(sizes), 2) if rule == "influence-blocks" else (len(sizes),)
    room = largest(sizes, MODULES, 1.0, rule == "influence-blocks", round_to)
    if room == 0 or (rule != "uniform" and sparsity > room * (1 + 1e-9)):
        with pytest.raises(InputError, match="the largest possible is"):
            allocate(rule, sizes, sparsity, MODULES, torch.zeros(shape), 1.0, 1.0, round_to)
        return
    result = allocate(rule, sizes, sparsity, MODULES, torch.zeros(shape), 1.0, 1.0, round_to)
    for size, ranks in zip(sizes, result.ranks, strict=True):
        for module, rank in ranks.items():
            grain = math.lcm(size.step[module], round_to)
            too_small = size.full[module] < grain
            assert rank == size.full[module] if too_small else rank % grain == 0
            assert 0 < rank <= size.full[module]
    assert all(0 <= share < 1 for share in result.sparsities)
    if rule != "uniform":
        budget = sparsity * total(sizes)
        allowed = max(1e-3 * budget, max(size.cost[m] * size.step[m] for size in sizes for m in MODULES))
        missed = abs(removed(sizes, result) - budget) > allowed
        assert missed == any("cannot meet the budget" in warning for warning in result.warnings)


def test_a_module_left_whole_hands_its_share_to_the_others_of_its_layer():
    scores = [0.1, 0.2, 0.3]
    free = allocate("influence", [SEVEN_B] * 3, 0.3, MODULES, scores, 0.5)
    forced = allocate("influence", [llama(4096, 11008, 128, 32, whole=("qk",))] * 3, 0.3, MODULES, scores, 0.5)
    asked = allocate("influence", [SEVEN_B] * 3, 0.3, ("mlp", "vo"), scores, 0.5)
    assert forced.sparsities == pytest.approx(free.sparsities, rel=1e-12)
    assert forced.ranks == asked.ranks
    assert all(
        ranks["qk"] == 128 and ranks["mlp"] < other["mlp"]
        for ranks, other in zip(forced.ranks, free.ranks, strict=True)
    )
    assert "qk stays whole in every layer, as the model needs it so" in forced.warnings[0]
    assert "qk stays whole, as it is not among the modules" in asked.warnings[0]
    assert "mlp, vo" in forced.warnings[0]


def test_what_a_layer_cannot_take_falls_on_other_layers():
    # Attention alone is a third of a 7B block, so a layer wanted at more than that stops there.
    result = allocate("influence", [SEVEN_B] * 4, 0.2, ("qk", "vo"), [0.0, 1.0, 1.0, 1.0], 0.3)
    attention = (SEVEN_B.weight("qk") + SEVEN_B.weight("vo")) / SEVEN_B.total
    assert attention * 0.95 < result.sparsities[0] < attention
    assert sum(result.sparsities) == pytest.approx(0.8, rel=1e-12)


def test_an_impossible_budget_names_the_largest_sparsity_and_that_one_works():
    with pytest.raises(InputError, match="the largest possible is") as caught:
        allocate("influence", [SMOL] * 3, 0.9, ("mlp",), [0.1, 0.2, 0.3])
    possible = float(str(caught.value).rsplit(" ", 1)[1])
    sizes = [SMOL] * 3
    assert possible == pytest.approx(SMOL.cost["mlp"] * 1535 / SMOL.total, abs=1e-4)  # four digits are printed
    result = allocate("influence", sizes, possible, ("mlp",), [0.1, 0.2, 0.3])
    assert removed(sizes, result) / total(sizes) == pytest.approx(possible, rel=1e-3)
    with pytest.raises(InputError, match=r"largest possible is 0\.5$"):
        allocate("influence", [single(1000)] * 2, 0.6, ("mlp",), [0, 1], max_sparsity=0.5)
    with pytest.raises(InputError, match=r"largest possible is 0 \(qk stays whole .*\)"):
        allocate("uniform", [llama(16, 32, 8, 2, whole=("qk",))], 0.2, ("qk",))
    for rule, bounded, scores in (("owl", "block", [0.0]), ("error", "module", [[1.0] * 3])):
        with pytest.raises(InputError, match=f"with at most 0.5 of a {bounded} removed"):
            allocate(rule, [SMOL], 0.6, scores=scores, max_sparsity=0.5)


def test_width_is_one_for_all_layers_and_nearest_to_the_budget():
    sizes = [SEVEN_B] * 32
    for sparsity in (0.05, 0.2, 0.4):
        result = allocate("width", sizes, sparsity)
        widths = {ranks["mlp"] for ranks in result.ranks}
        assert len(widths) == 1
        assert all(ranks["qk"] == ranks["vo"] == 128 for ranks in result.ranks)
        # Half a neuron of every layer is what one width cannot tell.
        assert abs(removed(sizes, result) - sparsity * total(sizes)) <= 32 * SEVEN_B.cost["mlp"] / 2
        assert result.warnings == []


def test_width_in_multiples_says_what_it_removes():
    result = allocate("width", [SMOL] * 30, 0.2, round_to=256)
    assert {ranks["mlp"] for ranks in result.ranks} == {1024}
    share = removed([SMOL] * 30, result) / total([SMOL] * 30)
    assert result.warnings[-1:] == [
        f"multiples this wide cannot meet the budget: {share:.2%} of the blocks' parameters are removed and not 20.00%"
    ]
    # 0.2 of the blocks are 0.2/0.75 of the MLPs: 1126 of 1536 neurons would stay, and 1024 is the nearest multiple.
    assert result.sparsities == pytest.approx([share] * 30)


@pytest.mark.parametrize("sparsity", [1e-9, 1e-5, 0.0123])
def test_ranks_rounded_up_to_all_there_is_are_told_in_digits_that_tell_them_apart(sparsity: float):
    """An MLP of 16 neurons has no step below a sixteenth, so that nothing is removed."""
    size = llama(64, 16, 8, 2)
    (told,) = allocate("uniform", [size] * 2, sparsity).warnings
    wanted = 100 * sparsity * (size.total - 2 * 64) / size.total  # without the norms
    found = re.search(r": 0\.00% of the blocks' parameters are removed and not ([\d.e-]+)%;", told)
    assert found is not None
    assert float(found[1]) == pytest.approx(wanted, rel=0.05)  # half a unit of the second digit, at most


def test_width_leaves_alone_what_must_stay_whole():
    sizes = [llama(64, 96, 16, 4, whole=["mlp"]), llama(64, 96, 16, 4), llama(64, 96, 16, 4)]
    result = allocate("width", sizes, 0.1)
    assert result.ranks[0] == sizes[0].full
    assert result.ranks[1] == result.ranks[2]
    assert abs(removed(sizes, result) - 0.1 * total(sizes)) <= sizes[1].cost["mlp"]
    assert len(result.warnings) == 1
    assert "mlp stays whole in layers 0" in result.warnings[0]


def test_width_refuses_what_no_width_removes():
    with pytest.raises(
        InputError, match=r"sparsity 0\.9 cannot be reached by compressing mlp: the largest possible is"
    ):
        allocate("width", [SMOL] * 30, 0.9)
    with pytest.raises(InputError, match="modules 'qk,vo' must name mlp"):
        allocate("width", [SMOL] * 30, 0.2, modules=("qk", "vo"))
    with pytest.raises(InputError, match="no MLP can be cut: mlp stays whole at rank 1536: there is no"):
        allocate("width", [SMOL] * 30, 0.2, round_to=2048)
    with pytest.raises(InputError, match=r"0\.05 is less than half of what 256 neurons of every layer are") as problem:
        allocate("width", [SMOL] * 30, 0.05, round_to=256)
    least = float(str(problem.value).split("ask for ")[1].split(",")[0])
    assert {ranks["mlp"] for ranks in allocate("width", [SMOL] * 30, least, round_to=256).ranks} == {1536 - 256}
    with pytest.raises(InputError, match="the allocation 'width' cuts MLPs alone"):
        CompressionConfig(allocation="width", modules=("qk", "vo"))


def test_sparsity_zero_touches_nothing():
    for rule in ("uniform", "influence", "owl"):
        result = allocate(rule, [SMOL], 0, MODULES, [1.0], round_to=48)
        assert result.ranks == [SMOL.full]


def test_a_plan_is_taken_as_given_and_checked():
    plan = [{"mlp": 1000, "qk": 32, "vo": 7}, {"vo": 64}]
    result = allocate("plan", [SMOL] * 2, 0.0, MODULES, plan=plan)
    assert result.ranks == [plan[0], SMOL.full]
    assert result.sparsities == [SMOL.removed(plan[0]) / SMOL.total, 0.0]
    for entry, message in [
        ({"qk": 33}, "layer 1: qk has rank 33; allowed: a whole number from 2 to 64 and a multiple of 2"),
        ({"mlp": 0}, "from 1 to 1536"),
        ({"mlp": 1537}, "from 1 to 1536"),
        ({"mlp": 3.0}, "a whole number"),
        ({"mlp": 1536.0}, "a whole number"),
        ({"mlp": True}, "a whole number"),
        ({"ffn": 3}, "'ffn' is unknown; allowed: mlp, qk, vo"),
    ]:
        with pytest.raises(InputError, match=message):
            allocate("plan", [SMOL] * 2, 0.3, MODULES, plan=[{}, entry])
    with pytest.raises(InputError, match="1 layers and the model 2"):
        allocate("plan", [SMOL] * 2, 0.3, MODULES, plan=[{}])
    with pytest.raises(InputError, match="not among the modules"):
        allocate("plan", [SMOL], 0.3, ("mlp",), plan=[{"vo": 8}])
    with pytest.raises(InputError, match="this model needs it so"):
        allocate("plan", [llama(16, 32, 8, 2, whole=("qk",))], 0.3, MODULES, plan=[{"qk": 4}])
    with pytest.raises(InputError, match="multiple of 8"):
        allocate("plan", [SMOL], 0.3, MODULES, plan=[{"vo": 12}], round_to=8)
    with pytest.raises(InputError, match="needs a plan"):
        allocate("plan", [SMOL], 0.3, MODULES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "best"}, "'best' is unknown; allowed: uniform, influence"),
        ({"sparsity": 1.0}, r"outside \[0, 1\)"),
        ({"sparsity": math.nan}, r"outside \[0, 1\)"),
        ({"modules": ()}, "allowed: mlp, qk, vo"),
        ({"temperature": 0}, "neither 'auto' nor a positive number"),
        ({"temperature": "cold"}, "neither 'auto' nor a positive number"),
        ({"max_sparsity": 0}, r"outside \(0, 1\]"),
        ({"round_to": 0}, "round_to 0"),
        ({"owl_lambda": -1}, "owl_lambda -1"),
        ({"scores": None}, "needs scores"),
        ({"scores": [1.0]}, r"shape \(2, 1\); they are \(1, 1\)"),
        ({"scores": [[0.1, 0.2], [0.3, 0.4]]}, r"they are \(2, 2\)"),
    ],
)
def test_bad_arguments(arguments, message):
    good = {"rule": "influence", "sizes": [SMOL] * 2, "sparsity": 0.3, "modules": MODULES, "scores": [0.1, 0.2]}
    allocate(**good)
    with pytest.raises(InputError, match=message):
        allocate(**{**good, **arguments})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_names_the_layer(bad):
    with pytest.raises(NumericalError, match="layer 1"):
        allocate("influence", [SMOL] * 2, 0.3, MODULES, [0.1, bad])


def test_no_width_goes_below_one_multiple():
    size = llama(64, 128, 16, 4)
    most = 64 * size.cost["mlp"] / size.total
    with pytest.raises(InputError, match="largest possible"):
        allocate("width", [size] * 2, most + 0.05, round_to=64)


def test_a_block_loses_at_most_its_share_of_all_that_it_holds():
    """What has no rank counts, too: with as many parameters beside, 35 % of a block are 70 % of what can go."""
    size = llama(64, 128, 16, 4)
    size = replace(size, total=2 * size.total)
    found = allocate("influence", [size] * 2, 0.3, scores=[0.1, 0.2], max_sparsity=0.35)
    assert abs(removed([size] * 2, found) - 0.3 * 2 * size.total) <= size.cost["vo"] * 2
