"""Scores to sparsity to whole ranks, under one parameter budget.

Pure functions: scores, sizes and a budget go in; no model is touched. The sparsity of a rule other than `uniform` is
the share of all the blocks' parameters, norms included.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import ALLOCATIONS, MODULES, NAMES, check_choice
from .errors import InputError, NumericalError
from .filling import Unit, auto_temperature, fill_additive, fill_exponential
from .ranks import (
    LayerSizes,
    Slot,
    allowed_error,
    ceiling_rank,
    check_plan,
    open_slots,
    round_to_budget,
    trial_rank,
)

PARTS = {"attention": ("qk", "vo"), "mlp": ("mlp",)}
"""What `influence-blocks` scores apart, in the order of the score's columns."""
COLUMNS = {"influence": 1, "influence-blocks": len(PARTS), "owl": 1, "error": len(MODULES)}
"""Scores of a layer, for the rules that need some."""
NEGLIGIBLE = 1e-9
"""Damages below this share of the largest one count as it: a module that costs nothing is then cut first."""


@dataclass
class Allocation:
    """What each layer loses."""

    sparsities: list[float]
    """By layer, before rounding: the share of the block's parameters (`uniform`: of each module compressed)."""
    ranks: list[dict[str, int]]
    """By layer and module."""
    temperature: float | None = None
    """ε of the influence rules, chosen or given."""
    warnings: list[str] = field(default_factory=list)


def allocate(
    rule: str,
    sizes: Sequence[LayerSizes],
    sparsity: float,
    modules: Sequence[str] = MODULES,
    scores: Any = None,
    temperature: float | str = "auto",
    max_sparsity: float = 0.95,
    round_to: int = 1,
    owl_lambda: float = 0.08,
    plan: Sequence[dict[str, int]] | None = None,
) -> Allocation:
    """Spend a parameter budget over the modules of a model.

    - `uniform` is the paper's: `⌈(1−φ)d⌉` of every module asked for, in whole rotary pairs where the step is 2. The
      others stay whole, and nothing makes up for them. With `round_to` the same total is met by multiples instead.
    - `influence` maximises `Σ w_i (s_i (1−φ_i) − ε φ_i log φ_i)` under `Σ w_i φ_i = φ Σ w_i`, `0 ≤ φ_i ≤ φ_max`, `w_i`
      the parameters of block `i`: `φ_i = min(φ_max, c·exp(−s_i/ε))`, exactly. Blocks of one size give the paper's
      objective. Within a block every module loses the same share.
    - `influence-blocks` is the same with attention and MLP as blocks of their own.
    - `owl` (Yin et al. 2023): the outlier ratios are scaled to `[0, 2λ]` and taken off a level that the budget sets.
    - `error` minimises the sum of what compressing each module alone damages, `D_lm (φ_lm/φ_trial)²`, under the same
      budget: `φ_lm ∝ w_lm/D_lm` off the bounds, where every module has the same marginal damage per parameter. One more
      bound: each module keeps at least half of the share that all would keep alike.
    - `width` gives the MLPs, or the experts, of all layers one width, and leaves everything else whole: what the dense
      model's own class has room for (`export.stock`). It is the width that comes nearest to the budget.
    - `plan` takes the ranks as given, and no notice of `sparsity`.

    The part of a module that stays whole falls on the others of its block, and beyond what these can lose on other
    blocks. No rank goes below one step, so a bound on a block's loss may lie below `max_sparsity`.

    Args:
        rule: one of `config.ALLOCATIONS`.
        sizes: by layer.
        sparsity: the share to remove, in [0, 1).
        modules: which of `mlp`, `qk`, `vo` to compress.
        scores: higher is more important; `(n_layers,)`, or `(n_layers, 2)` as attention, MLP for `influence-blocks`;
            for `error` `(n_layers, 3)`, the damage `D` of each of `MODULES` at its trial rank.
        temperature: ε in units of the score, or `auto`: see `auto_temperature`.
        max_sparsity: φ_max, of a block (under `error`, of a module); `uniform`, `width` and `plan` know none.
        round_to: every rank chosen is a multiple of this; at sparsity 0 nothing is touched.
        owl_lambda: λ of `owl`.
        plan: the ranks by layer, for `plan`.

    Returns:
        Ranks whose removed parameters are within 0.1 % of the request, or within one rank step of the largest module;
        a warning says where a coarse grid allows no such sum (`uniform` without one keeps its ceilings, `width` is
        within half a neuron of every layer).

    Raises:
        InputError: an argument is out of range, or the budget cannot be met; says the largest sparsity that can.
        NumericalError: a score is NaN or infinite; names the layer.
    """
    _check(rule, sparsity, modules, temperature, max_sparsity, round_to, owl_lambda)
    if rule == "plan":
        return _planned(sizes, modules, plan, round_to)
    if sparsity == 0:
        return Allocation([0.0] * len(sizes), [dict(size.full) for size in sizes])
    if rule == "width":
        return _one_width(sizes, sparsity, modules, round_to)
    slots, warnings = open_slots(sizes, modules, round_to)
    if not slots:
        raise InputError(_impossible(sparsity, 0.0, modules, max_sparsity, round_to))
    if rule == "uniform":
        warnings += _left_whole(sizes, MODULES, "nothing makes up for it under 'uniform'")
        sparsities = [sparsity] * len(sizes)
        if round_to == 1:
            ranks = [_ceilings(size, sparsity, modules) for size in sizes]
            return Allocation(sparsities, ranks, warnings=warnings)
        ranks = _whole_ranks(sizes, slots, [sparsity * slot.weight for slot in slots], sparsities, warnings)
        return Allocation(sparsities, ranks, warnings=warnings)

    used = ", ".join(sorted({slot.module for slot in slots}))
    warnings += _left_whole(sizes, modules, f"its share of the budget falls on the rest ({used}, in any layer)")
    if rule == "error":
        units = _modules_alone(sizes, slots, _by_part(rule, scores, len(sizes)), max_sparsity)
    else:
        units = _units(sizes, slots, _by_part(rule, scores, len(sizes)), max_sparsity)
    total = sum(size.total for size in sizes)
    budget = sparsity * total
    reachable = math.fsum(unit.weight * unit.high for unit in units)
    # Relative 1e-9 forgives the rounding of a sparsity computed as removed/total, and stays far below one parameter
    # in the billions of a large model.
    if budget > reachable * (1 + 1e-9):
        raise InputError(_impossible(sparsity, reachable / total, modules, max_sparsity, round_to))
    chosen = None
    if rule == "error":
        shares = fill_exponential(1.0, _kept_by_half(units, budget), budget)
    elif rule == "owl":
        shares = fill_additive([-score for score in _scaled(units, 2 * owl_lambda)], units, budget)
    else:
        chosen, notes = temperature, []
        if isinstance(chosen, str):
            chosen, notes = auto_temperature([u.score for u in units], [u.weight for u in units], budget)
        warnings += notes
        shares = fill_exponential(chosen, units, budget)
    wanted = _within_units(slots, units, shares)
    sparsities = [
        math.fsum(wanted[index] for index, slot in enumerate(slots) if slot.layer == layer) / size.total
        for layer, size in enumerate(sizes)
    ]
    return Allocation(sparsities, _whole_ranks(sizes, slots, wanted, sparsities, warnings, budget), chosen, warnings)


def alike(rule: str, n_layers: int) -> list[list[float]] | None:
    """Return equal scores, None for a rule that needs none.

    What can be reached depends on no score: `allocate` refuses a sparsity with these, or with no others.
    """
    return [[1.0] * COLUMNS[rule]] * n_layers if rule in COLUMNS else None


def _modules_alone(
    sizes: Sequence[LayerSizes], slots: Sequence[Slot], damages: list[list[float]], max_sparsity: float
) -> list[Unit]:
    """Return every slot as a unit of its own, scored such that `φ = c·exp(−score)` has equal marginal damages.

    The divergence that a small change of the hidden states makes grows with its square, and between 1.5 and 3 that is
    the best exponent (docs/log.md). With `a φ²` the marginal damage per parameter `2aφ/w` is equal where `φ ∝ w/a`.
    """
    floor = NEGLIGIBLE * max(max(row) for row in damages) or 1.0
    units = []
    for index, slot in enumerate(slots):
        trial = 1 - trial_rank(slot.full, sizes[slot.layer].step[slot.module]) / slot.full
        factor = max(damages[slot.layer][MODULES.index(slot.module)], floor) / trial**2
        low = slot.least / slot.weight
        high = max(low, min(max_sparsity, slot.most / slot.weight))
        units.append(Unit([index], math.log(factor / slot.weight), slot.weight, low, high))
    return units


def _kept_by_half(units: Sequence[Unit], budget: float) -> list[Unit]:
    """Return the units with a bound of `(1 + φ)/2`, with `φ` the share that all would lose alike.

    The damage was measured at one rank, and far beyond it the square says little: without this bound the first layer of
    SmolLM2 keeps 3 of 64 value dims at 30 %. Whatever budget could be met without it can be met with it.
    """
    alike = max(fill_additive([0.0] * len(units), units, budget))
    return [unit._replace(high=max(unit.low, min(unit.high, (1 + alike) / 2))) for unit in units]


def score_parts(rule: str, score: Any) -> dict[str, float]:
    """Return a layer's score by what it is the score of, for tables and plots."""
    if not isinstance(score, list):
        return {rule: score}
    return dict(zip(NAMES.values() if rule == "error" else ("attention", "MLP"), score, strict=True))


def _units(
    sizes: Sequence[LayerSizes], slots: Sequence[Slot], scores: list[list[float]], max_sparsity: float
) -> list[Unit]:
    """Group the slots by layer, or by layer and part where the scores have two columns."""
    units = []
    for layer, size in enumerate(sizes):
        groups = [MODULES] if len(scores[layer]) == 1 else list(PARTS.values())
        for group, score in zip(groups, scores[layer], strict=True):
            members = [i for i, slot in enumerate(slots) if slot.layer == layer and slot.module in group]
            if not members:
                continue
            weight = size.total if group is MODULES else sum(size.weight(m) for m in group if m in size.full)
            low = sum(slots[i].least for i in members) / weight
            high = min(max_sparsity, sum(slots[i].most for i in members) / weight)
            units.append(Unit(members, score, weight, low, max(low, high)))
    return units


def _within_units(slots: Sequence[Slot], units: Sequence[Unit], shares: Sequence[float]) -> list[float]:
    """Divide each unit's loss among its modules: the same share of each, within what each can lose."""
    wanted = [0.0] * len(slots)
    for unit, share in zip(units, shares, strict=True):
        parts = [
            Unit([i], 0.0, slots[i].weight, slots[i].least / slots[i].weight, slots[i].most / slots[i].weight)
            for i in unit.slots
        ]
        for part, value in zip(parts, fill_additive([0.0] * len(parts), parts, share * unit.weight), strict=True):
            wanted[part.slots[0]] = value * part.weight
    return wanted


def _whole_ranks(
    sizes: Sequence[LayerSizes],
    slots: Sequence[Slot],
    wanted: Sequence[float],
    urgency: Sequence[float],
    warnings: list[str],
    budget: float | None = None,
) -> list[dict[str, int]]:
    """Round to ranks, and warn where the budget is missed by more than is allowed."""
    budget = math.fsum(wanted) if budget is None else budget
    allowed = allowed_error(budget, sizes)
    ranks = [dict(size.full) for size in sizes]
    for slot, steps in zip(slots, round_to_budget(slots, wanted, urgency, allowed), strict=True):
        ranks[slot.layer][slot.module] = slot.top - steps * slot.grain
    warnings += _missed(sizes, ranks, budget, allowed)
    return ranks


def _missed(sizes: Sequence[LayerSizes], ranks: Sequence[dict[str, int]], budget: float, allowed: float) -> list[str]:
    """Say that ranks on a coarse grid miss the budget by more than is allowed."""
    removed = sum(size.removed(chosen) for size, chosen in zip(sizes, ranks, strict=True))
    if abs(removed - budget) <= allowed:
        return []
    total = sum(size.total for size in sizes)
    return [
        f"multiples this wide cannot meet the budget: {removed / total:.2%} of the blocks' parameters are removed and "
        f"not {budget / total:.2%}"
    ]


def _one_width(sizes: Sequence[LayerSizes], sparsity: float, modules: Sequence[str], round_to: int) -> Allocation:
    """Return the width of all MLPs that comes nearest to the budget; layers whose MLP must stay whole keep it."""
    if "mlp" not in modules:
        raise InputError(f"the allocation 'width' cuts MLPs alone: modules '{','.join(modules)}' must name mlp")
    slots, warnings = open_slots(sizes, ("mlp",), round_to)
    if not slots:
        raise InputError(f"no MLP can be cut: {'; '.join(warnings) or 'the model needs them whole'}")
    total, a_neuron = sum(size.total for size in sizes), sum(slot.cost for slot in slots)
    reachable = sum(slot.most for slot in slots) / total
    if sparsity > reachable * (1 + 1e-9):
        raise InputError(_impossible(sparsity, reachable, ("mlp",), None, round_to))
    warnings += _left_whole(sizes, MODULES, "the rule 'width' cuts MLPs alone", ("mlp",))
    first, budget = slots[0], sparsity * total
    steps = math.floor((first.full - budget / a_neuron) / first.grain + 0.5)
    width = min(first.top, max(first.grain, steps * first.grain))
    if width == first.full:
        least = first.grain * a_neuron / total
        raise InputError(
            f"sparsity {sparsity:g} is less than half of what {first.grain} neurons of every layer are, the least that "
            f"can be removed: ask for {math.ceil(least * 1e4) / 1e4:g}, or round to less"
        )
    cut = {slot.layer for slot in slots}
    ranks = [{**size.full, "mlp": width} if layer in cut else dict(size.full) for layer, size in enumerate(sizes)]
    if first.grain > 1:
        warnings += _missed(sizes, ranks, budget, allowed_error(budget, sizes))
    shares = [size.removed(chosen) / size.total for size, chosen in zip(sizes, ranks, strict=True)]
    return Allocation(shares, ranks, warnings=warnings)


def _ceilings(size: LayerSizes, sparsity: float, modules: Sequence[str]) -> dict[str, int]:
    """Return the paper's ranks of a layer."""
    kept = [m for m in size.full if m not in modules or m in size.whole]
    return {m: full if m in kept else ceiling_rank(full, size.step[m], sparsity) for m, full in size.full.items()}


def _planned(
    sizes: Sequence[LayerSizes], modules: Sequence[str], plan: Sequence[dict[str, int]] | None, round_to: int
) -> Allocation:
    if plan is None:
        raise InputError("the rule 'plan' needs a plan: the ranks of every layer")
    ranks = check_plan(plan, sizes, modules, round_to)
    return Allocation([size.removed(chosen) / size.total for size, chosen in zip(sizes, ranks, strict=True)], ranks)


def _by_part(rule: str, scores: Any, n_layers: int) -> list[list[float]]:
    """Return the scores as one list a layer: of one number, of attention's and the MLP's, or of each module's."""
    if scores is None:
        raise InputError(f"the rule '{rule}' needs scores, one for each layer")
    values = scores.tolist() if hasattr(scores, "tolist") else list(scores)
    rows = [list(row) if isinstance(row, Iterable) else [row] for row in values]
    columns = COLUMNS[rule]
    if len(rows) != n_layers or any(len(row) != columns for row in rows):
        shape = f"({len(rows)}, {len(rows[0])})" if rows else "(0,)"
        raise InputError(f"the rule '{rule}' needs scores of shape ({n_layers}, {columns}); they are {shape}")
    for layer, row in enumerate(rows):
        if not all(math.isfinite(score) for score in row):
            raise NumericalError(f"layer {layer}: the importance score is NaN or infinite")
    return rows


def _scaled(units: Sequence[Unit], width: float) -> list[float]:
    """Scale the scores to `[0, width]`; all 0 where they are equal."""
    least = min(unit.score for unit in units)
    spread = max(unit.score for unit in units) - least
    return [width * (unit.score - least) / spread if spread else 0.0 for unit in units]


def why_whole(module: str, size: LayerSizes) -> str:
    """Say why a layer leaves a module whole."""
    if module == "mlp":
        return "it is one MLP among layers of experts"
    if "vo" in size.whole:
        return "this family's attention is left as it is"
    return "its queries and keys are normalised, which reads all their coordinates"


def _left_whole(
    sizes: Sequence[LayerSizes], modules: Sequence[str], consequence: str, among: Sequence[str] = MODULES
) -> list[str]:
    """Say which of some modules stay whole, and what that means."""
    warnings = []
    for module in among:
        forced = [index for index, size in enumerate(sizes) if module in size.whole]
        if module not in modules:
            warnings.append(f"{module} stays whole, as it is not among the modules to compress: {consequence}")
        elif forced:
            where = "every layer" if len(forced) == len(sizes) else f"layers {', '.join(map(str, forced))}"
            reason = why_whole(module, sizes[forced[0]])
            warnings.append(f"{module} stays whole in {where}, as the model needs it so ({reason}): {consequence}")
    return warnings


def _impossible(
    sparsity: float, reachable: float, modules: Sequence[str], max_sparsity: float | None, round_to: int
) -> str:
    rounded = f" in multiples of {round_to}" if round_to > 1 else ""
    bound = "" if max_sparsity is None else f" with at most {max_sparsity:g} of a block removed"
    return (
        f"sparsity {sparsity:g} cannot be reached by compressing {', '.join(modules)}{rounded}{bound}: "
        f"the largest possible is {math.floor(reachable * 1e4) / 1e4:g}"
    )


def _check(
    rule: str,
    sparsity: float,
    modules: Sequence[str],
    temperature: float | str,
    max_sparsity: float,
    round_to: int,
    owl_lambda: float,
) -> None:
    """Raise `InputError` for an argument that is out of range."""
    check_choice("allocation", rule, ALLOCATIONS)
    if not 0 <= sparsity < 1:
        raise InputError(f"sparsity {sparsity} is outside [0, 1): give a share such as 0.3 for 30 %")
    if not modules or any(module not in MODULES for module in modules):
        raise InputError(f"modules '{','.join(modules)}' are not all known; allowed: {', '.join(MODULES)}")
    if temperature != "auto" and not (
        isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature > 0
    ):
        raise InputError(f"temperature {temperature} is neither 'auto' nor a positive number")
    if not 0 < max_sparsity <= 1:
        raise InputError(f"max_sparsity {max_sparsity} is outside (0, 1]")
    if round_to < 1:
        raise InputError(f"round_to {round_to} is not a positive whole number, such as 8")
    if not (math.isfinite(owl_lambda) and owl_lambda >= 0):
        raise InputError(f"owl_lambda {owl_lambda} is not a number of at least 0")
