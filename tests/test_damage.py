"""The rule `error`: the damages it measures, the curves it fits, and the ranks it chooses."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import modegpt
from modegpt import CompressionConfig
from modegpt.allocation import LayerSizes, allocate
from modegpt.config import MODULES
from modegpt.errors import InputError, NumericalError
from modegpt.filling import EXPONENTS, PowerLaw, Unit, fill_power_laws, fit_power_law
from modegpt.ranks import TRIALS, trial_ranks

curves = st.builds(PowerLaw, st.floats(1e-9, 1e3), st.floats(*EXPONENTS))


@given(
    parts=st.lists(
        st.tuples(curves, st.integers(1, 10**6), st.floats(0, 0.1), st.floats(0.4, 1)), min_size=2, max_size=8
    ),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_power_laws_are_filled_at_the_least_sum(parts, share, seed):
    laws = [law for law, *_ in parts]
    units = [Unit([i], 0.0, weight, low, high) for i, (_, weight, low, high) in enumerate(parts)]
    least, most = (math.fsum(u.weight * bound for u, bound in zip(units, side, strict=True))
                   for side in ([u.low for u in units], [u.high for u in units]))  # fmt: skip
    budget = least + share * (most - least)
    found = fill_power_laws(laws, units, budget)
    # The bisection ends when the logarithm of the level is known to 1e-12 of its size, some 50: the shares then move by
    # 5e-11/(p - 1), the total by as much of itself.
    assert math.fsum(u.weight * x for u, x in zip(units, found, strict=True)) == pytest.approx(budget, rel=1e-9)
    assert all(u.low <= x <= u.high for u, x in zip(units, found, strict=True))

    def cost(shares):
        return math.fsum(law.factor * x**law.exponent for law, x in zip(laws, shares, strict=True))

    generator = random.Random(seed)
    for _ in range(40):  # move some parameters from one unit to another
        giver, taker = generator.sample(range(len(units)), 2)
        room = min((found[giver] - units[giver].low) * units[giver].weight,
                   (units[taker].high - found[taker]) * units[taker].weight)  # fmt: skip
        moved = room * generator.random()
        rival = list(found)
        rival[giver] -= moved / units[giver].weight
        rival[taker] += moved / units[taker].weight
        # 1e-8: the optimum is flat, and the shares are known to about 1e-10.
        assert cost(rival) >= cost(found) * (1 - 1e-8)


@given(law=st.builds(PowerLaw, st.floats(1e-6, 1e3), st.floats(EXPONENTS[0] + 1e-6, EXPONENTS[1] - 1e-6)))
def test_a_power_law_is_fitted_exactly(law):
    found = fit_power_law(TRIALS, [law.factor * share**law.exponent for share in TRIALS])
    assert found == pytest.approx(law, rel=1e-9)  # a few roundings of logarithms of size ten


def test_a_module_that_costs_nothing_goes_first():
    assert fit_power_law(TRIALS, [0.0, 0.0, 0.0]).factor == 0
    units = [Unit([0], 0.0, 10, 0.0, 0.9), Unit([1], 0.0, 10, 0.0, 0.9)]
    assert fill_power_laws([PowerLaw(0.0, 2.0), PowerLaw(1.0, 2.0)], units, 10.0) == pytest.approx([0.9, 0.1])


def sizes(n_layers: int) -> list[LayerSizes]:
    full, cost = {"mlp": 1536, "qk": 64, "vo": 64}, {"mlp": 1728, "qk": 6912, "vo": 6912}
    total = sum(full[module] * cost[module] for module in MODULES)
    return [LayerSizes(full, cost, {"mlp": 1, "qk": 2, "vo": 1}, total) for _ in range(n_layers)]


def test_modules_end_at_one_marginal_damage_per_parameter():
    layers = sizes(4)
    laws = [[PowerLaw((2.0 + layer) * 10.0**-module, 1.5 + module) for module in range(3)] for layer in range(4)]
    damages = [[[law.factor * (1 - rank / layers[0].full[m]) ** law.exponent
                 for rank in trial_ranks(layers[0].full[m], layers[0].step[m])]
                for law, m in zip(layer, MODULES, strict=True)] for layer in laws]  # fmt: skip
    result = allocate("error", layers, 0.3, scores=torch.tensor(damages, dtype=torch.float64), max_sparsity=0.9)
    removed = sum(size.removed(ranks) for size, ranks in zip(layers, result.ranks, strict=True))
    budget = 0.3 * sum(size.total for size in layers)
    assert abs(removed - budget) <= 1e-3 * budget
    slopes = []
    for layer, ranks in enumerate(result.ranks):
        for law, module in zip(laws[layer], MODULES, strict=True):
            share = 1 - ranks[module] / layers[layer].full[module]
            if 0.05 < share < 0.85:  # a rank step is below a tenth of these shares, and they are off their bounds
                weight = layers[layer].weight(module)
                slopes.append(law.factor * law.exponent * share ** (law.exponent - 1) / weight)
    assert len(slopes) >= 8
    # Whole ranks move a share by half a step of 1/32 at most, a slope by (p - 1) times as much, relative to the share.
    assert max(slopes) / min(slopes) < 1.7


@pytest.mark.parametrize("bad", [None, [[[0.1] * 3] * 3], [[[0.1] * 2] * 3] * 2, [[0.1] * 3] * 2 and [[[0.1] * 3]] * 2])
def test_scores_of_another_shape_are_refused(bad):
    with pytest.raises(InputError, match=r"the rule 'error' needs scores of shape \(2, 3, 3\)"):
        allocate("error", sizes(2), 0.3, scores=bad)


def test_a_damage_that_is_no_number_names_the_layer():
    damages = torch.full((2, 3, 3), 0.1)
    damages[1, 2, 0] = math.nan
    with pytest.raises(NumericalError, match="layer 1, vo: the damage is NaN or infinite"):
        allocate("error", sizes(2), 0.3, scores=damages)


@pytest.mark.parametrize("solver", ["paper", "best"])
def test_damages_are_those_of_the_block_on_text_that_the_solver_has_not_seen(solver):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    dense = LlamaForCausalLM(config).eval()
    windows = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(1))
    settings = {"batch_size": 4, "solver": solver, "feedback": 0.0 if solver == "best" else None, "coverage": 0.0}
    run = CompressionConfig(sparsity=0.3, allocation="error", **settings)
    scores = modegpt.compress(dense, windows, run).modegpt_report["allocation"]["scores"]
    full = {"mlp": 48, "qk": 8, "vo": 8}

    def hidden(model):
        states = []
        handle = model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: states.append(output))
        with torch.no_grad():
            model(windows[:4])
        handle.remove()
        return states[0].double()

    before = hidden(dense)
    for module, damages in zip(MODULES, scores[0], strict=True):
        for rank, damage in zip(trial_ranks(full[module], 2 if module == "qk" else 1), damages, strict=True):
            plan = ({**full, module: rank},)
            alone = CompressionConfig(allocation="plan", plan=plan, **settings)
            lost = hidden(modegpt.compress(dense, windows[4:], alone)) - before
            expected = (lost.square().sum(-1) / before.square().sum(-1)).mean().item()
            # Float32 states of some 1e-7 relative, whose difference is squared: a thousandth of what is lost.
            assert damage == pytest.approx(expected, rel=1e-3)
            assert (damage > 0) == (rank < full[module])
