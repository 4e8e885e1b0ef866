"""Scores to units: what receives one sparsity under each rule, within which bounds.

A unit is a block, a block's attention or MLP, or one module; `filling` spreads the budget over them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..config import MODULES, NAMES
from ..errors import InputError, NumericalError
from .filling import Unit, fill_additive
from .whole import LayerSizes, Slot, trial_rank

PARTS = {"attention": ("qk", "vo"), "mlp": ("mlp",)}
"""What `influence-blocks` scores apart, in the order of the score's columns."""
COLUMNS = {"influence": 1, "influence-blocks": len(PARTS), "owl": 1, "error": len(MODULES)}
"""Scores of a layer, for the rules that need some."""
NEGLIGIBLE = 1e-9
"""Damages below this share of the largest one count as it: a module that costs nothing is then cut first."""


def score_parts(rule: str, score: Any) -> dict[str, float]:
    """Return a layer's score by what it is the score of, for tables and plots."""
    if not isinstance(score, list):
        return {rule: score}
    return dict(zip(NAMES.values() if rule == "error" else ("attention", "MLP"), score, strict=True))


def scores_by_part(rule: str, scores: Any, n_layers: int) -> list[list[float]]:
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


def layer_units(
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


def module_units(
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


def kept_by_half(units: Sequence[Unit], budget: float) -> list[Unit]:
    """Return the units with a bound of `(1 + φ)/2`, with `φ` the share that all would lose alike.

    The damage was measured at one rank, and far beyond it the square says little: without this bound the first layer of
    SmolLM2 keeps 3 of 64 value dims at 30 %. Whatever budget could be met without it can be met with it.
    """
    alike = max(fill_additive([0.0] * len(units), units, budget))
    return [unit._replace(high=max(unit.low, min(unit.high, (1 + alike) / 2))) for unit in units]


def scaled_scores(units: Sequence[Unit], width: float) -> list[float]:
    """Scale the scores to `[0, width]`; all 0 where they are equal."""
    least = min(unit.score for unit in units)
    spread = max(unit.score for unit in units) - least
    return [width * (unit.score - least) / spread if spread else 0.0 for unit in units]


def within_units(slots: Sequence[Slot], units: Sequence[Unit], shares: Sequence[float]) -> list[float]:
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
