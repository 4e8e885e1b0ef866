"""Scores to sparsity to whole ranks, under one parameter budget.

Pure functions: scores, sizes and a budget go in; no model is touched. The sparsity of a rule other than `uniform` is
the share of all the blocks' parameters, norms included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import MODULES
from .errors import InputError
from .ranks.filling import auto_temperature, fill_additive, fill_exponential
from .ranks.limits import check_request, impossible, left_whole, missed, rounded_away
from .ranks.units import (
    COLUMNS,
    kept_by_half,
    layer_units,
    module_units,
    scaled_scores,
    scores_by_part,
    within_units,
)
from .ranks.whole import LayerSizes, Slot, allowed_error, ceiling_rank, check_plan, open_slots, round_to_budget


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
      model's own class has room for (`export.stock`). It is the width that comes nearest to the budget. Where some are
      a whole number of times as wide as others, they stay so.
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
    check_request(rule, sparsity, modules, temperature, max_sparsity, round_to, owl_lambda)
    if rule == "plan":
        return _planned(sizes, modules, plan, round_to)
    if sparsity == 0:
        return Allocation([0.0] * len(sizes), [dict(size.full) for size in sizes])
    if rule == "width":
        return _one_width(sizes, sparsity, modules, round_to)
    slots, warnings = open_slots(sizes, modules, round_to)
    bounded = "module" if rule == "error" else "block"
    if not slots:
        warnings += left_whole(sizes, modules, "it cannot be cut", modules)
        reasons = f" ({'; '.join(warnings)})" if warnings else ""
        bound = None if rule == "uniform" else max_sparsity
        raise InputError(impossible(sparsity, 0.0, modules, bound, round_to, bounded) + reasons)
    if rule == "uniform":
        warnings += left_whole(sizes, modules, "nothing makes up for it under 'uniform'")
        sparsities = [sparsity] * len(sizes)
        if round_to == 1:
            ranks = [_ceilings(size, sparsity, modules) for size in sizes]
            warnings += rounded_away(sizes, ranks, sparsity * sum(slot.weight for slot in slots))
            return Allocation(sparsities, ranks, warnings=warnings)
        ranks = _whole_ranks(sizes, slots, [sparsity * slot.weight for slot in slots], sparsities, warnings)
        return Allocation(sparsities, ranks, warnings=warnings)

    used = ", ".join(sorted({slot.module for slot in slots}))
    warnings += left_whole(sizes, modules, f"its share of the budget falls on the rest ({used}, in any layer)")
    if rule == "error":
        units = module_units(sizes, slots, scores_by_part(rule, scores, len(sizes)), max_sparsity)
    else:
        units = layer_units(sizes, slots, scores_by_part(rule, scores, len(sizes)), max_sparsity)
    total = sum(size.total for size in sizes)
    budget = sparsity * total
    reachable = math.fsum(unit.weight * unit.high for unit in units)
    # Relative 1e-9 forgives the rounding of a sparsity computed as removed/total, and stays far below one parameter
    # in the billions of a large model.
    if budget > reachable * (1 + 1e-9):
        raise InputError(impossible(sparsity, reachable / total, modules, max_sparsity, round_to, bounded))
    chosen = None
    if rule == "error":
        shares = fill_exponential(1.0, kept_by_half(units, budget), budget)
    elif rule == "owl":
        shares = fill_additive([-score for score in scaled_scores(units, 2 * owl_lambda)], units, budget)
    else:
        chosen, notes = temperature, []
        if isinstance(chosen, str):
            chosen, notes = auto_temperature([u.score for u in units], [u.weight for u in units], budget)
        warnings += notes
        shares = fill_exponential(chosen, units, budget)
    wanted = within_units(slots, units, shares)
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
    warnings += missed(sizes, ranks, budget, allowed)
    return ranks


def _one_width(sizes: Sequence[LayerSizes], sparsity: float, modules: Sequence[str], round_to: int) -> Allocation:
    """Return the width of all MLPs that comes nearest to the budget; layers whose MLP must stay whole keep it."""
    if "mlp" not in modules:
        raise InputError(f"the allocation 'width' cuts MLPs alone: modules '{','.join(modules)}' must name mlp")
    slots, warnings = open_slots(sizes, ("mlp",), round_to)
    if not slots:
        raise InputError(f"no MLP can be cut: {'; '.join(warnings) or 'the model needs them whole'}")
    first, total = min(slots, key=lambda slot: slot.full), sum(size.total for size in sizes)
    times = {slot.layer: slot.full // first.full for slot in slots}
    a_neuron = sum(slot.cost * times[slot.layer] for slot in slots)
    reachable = sum(slot.most for slot in slots) / total
    if sparsity > reachable * (1 + 1e-9):
        raise InputError(impossible(sparsity, reachable, ("mlp",), None, round_to))
    warnings += left_whole(sizes, MODULES, "the rule 'width' cuts MLPs alone", ("mlp",))
    budget = sparsity * total
    steps = math.floor((first.full - budget / a_neuron) / first.grain + 0.5)
    width = min(first.top, max(first.grain, steps * first.grain))
    if width == first.full:
        least = first.grain * a_neuron / total
        neurons = "1 neuron of every layer is" if first.grain == 1 else f"{first.grain} neurons of every layer are"
        raise InputError(
            f"sparsity {sparsity:g} is less than half of what {neurons}, the least that can be removed: ask for "
            f"{math.ceil(least * 1e4) / 1e4:g}{', or round to less' if round_to > 1 else ''}"
        )
    ranks = [
        {**size.full, "mlp": width * times[layer]} if layer in times else dict(size.full)
        for layer, size in enumerate(sizes)
    ]
    if first.grain > 1:
        warnings += missed(sizes, ranks, budget, allowed_error(budget, sizes))
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
