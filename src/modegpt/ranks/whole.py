"""Whole ranks that hit a parameter budget.

The rules of `allocation` say how many parameters each module should lose, as real numbers. Here that becomes ranks on
each module's grid, with the rounding errors passed on, so that the total is met to about half the finest step.
"""

import itertools
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from ..errors import InputError

TOLERANCE = 1e-3
"""Share of the requested removal by which the ranks may miss it; one rank step where that is more."""

TRIAL = 0.3
"""Share of a module whose removal the rule `error` tries."""


ALIGNED = 8
"""Of 16-bit numbers so many are 16 bytes, and a GPU's tensor cores take rows that are a multiple of these: a bfloat16
product with 7706 neurons took 3.7 ms of an H200, and the dense model's with 11008 took 0.9 (docs/log.md)."""
ALIGNED_FROM = 1024
"""Neurons, of which `ALIGNED` are too few to matter."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one decoder block, by module (`mlp`, `qk`, `vo`)."""

    full: dict[str, int]
    """Full rank: `d_int`, `d_head`, `d_head`."""
    cost: dict[str, int]
    """Parameters of the block that one unit of rank holds, over all heads, biases included."""
    step: dict[str, int]
    """Granularity of the rank: 2 where rotary pairs are kept whole."""
    total: int
    """All parameters of the block, norms included."""
    whole: frozenset[str] = frozenset()
    """Modules that must stay whole, such as `qk` where queries and keys are normalised."""
    unranked: frozenset[str] = frozenset()
    """Those of them that the block lacks, or that have no one rank: attention that is left as it is."""

    def weight(self, module: str) -> int:
        """Return the parameters of a module that rank governs."""
        return self.cost[module] * self.full[module]

    def removed(self, ranks: dict[str, int]) -> int:
        """Return the parameters removed at these ranks."""
        return sum(self.cost[module] * (self.full[module] - ranks[module]) for module in self.full)


def told(ranks: dict[str, int], unranked: Set[str]) -> dict[str, int | None]:
    """Return ranks as they are told: None for a module that has none."""
    return {module: None if module in unranked else rank for module, rank in ranks.items()}


@dataclass(frozen=True)
class Slot:
    """The rank of one module of one layer, free to be chosen: `top - n·grain` for `n` in `0..steps`."""

    layer: int
    module: str
    full: int
    cost: int
    grain: int
    """Distance of the allowed ranks, and the smallest of them where it divides `top`."""
    top: int
    """Largest allowed rank; below `full` where that is no multiple of what was asked for."""

    @property
    def steps(self) -> int:
        """Steps from `top` down to the smallest allowed rank."""
        return (self.top - self.grain) // self.grain

    @property
    def unit(self) -> int:
        """Parameters in one step."""
        return self.cost * self.grain

    @property
    def weight(self) -> int:
        """Parameters at full rank."""
        return self.cost * self.full

    @property
    def least(self) -> int:
        """Parameters removed at `top`."""
        return self.cost * (self.full - self.top)

    @property
    def most(self) -> int:
        """Parameters removed at the smallest allowed rank."""
        return self.least + self.steps * self.unit


def aligned(sizes: Sequence[LayerSizes], itemsize: int) -> list[LayerSizes]:
    """Return the sizes with MLP widths in steps of `ALIGNED` where weights are of 2 bytes.

    Where an MLP has fewer than `ALIGNED_FROM` neurons, or no such multiple of them, it stays as it is. So does
    attention: its projections are as wide as all heads together, and with eight that is such a multiple at any rank.
    """

    def step(size: LayerSizes) -> int:
        fits = itemsize == 2 and size.full["mlp"] >= ALIGNED_FROM and size.full["mlp"] % ALIGNED == 0
        return math.lcm(size.step["mlp"], ALIGNED if fits else 1)

    return [replace(size, step={**size.step, "mlp": step(size)}) for size in sizes]


def ceiling_rank(full: int, step: int, sparsity: float) -> int:
    """Return the paper's rank, `⌈(1−φ)d⌉`, in whole steps, at least one."""
    # Six digits forgive float noise, as in (1 − 0.3)·10, and no real fraction of a dimension is that small.
    return min(full, step * max(1, math.ceil(round((1 - sparsity) * full / step, 6))))


def trial_rank(full: int, step: int) -> int:
    """Return the rank of a module at which the rule `error` measures it: below the full one if any is."""
    return max(step, min(full - step, ceiling_rank(full, step, TRIAL)))


def open_slots(sizes: Sequence[LayerSizes], modules: Sequence[str], round_to: int) -> tuple[list[Slot], list[str]]:
    """List the ranks that may be chosen.

    Args:
        sizes: by layer.
        modules: those asked for; the rest stays whole, and so does what a layer marks as `whole`.
        round_to: every rank is a multiple of it; 1 leaves the module's own step.

    Returns:
        The slots by layer, and a warning for each module that has no multiple of `round_to` below its full rank.
    """
    slots, stuck = [], set()
    for index, size in enumerate(sizes):
        for module, full in size.full.items():
            if module not in modules or module in size.whole:
                continue
            grain = math.lcm(size.step[module], round_to)
            top = full if round_to == 1 else full // grain * grain
            if top == 0 or (top == full and full < 2 * grain):
                stuck.add((module, full, grain))
                continue
            slots.append(Slot(index, module, full, size.cost[module], grain, top))
    warnings = [
        f"{module} stays whole at rank {full}: there is no smaller multiple of {grain}"
        for module, full, grain in sorted(stuck)
    ]
    return slots, warnings


def round_to_budget(
    slots: Sequence[Slot], wanted: Sequence[float], urgency: Sequence[float], allowed: float
) -> list[int]:
    """Round real-valued removals to steps so that their sum is kept.

    Error diffusion: in each layer the module with the finest steps (the MLP, or value-output where widths go in steps
    of `ALIGNED`) takes over what the rounding of the others left, and what the layer before left. So each layer keeps
    its share to about half its finest step, and the total too. The coarser modules pass their own error on to the same
    module of the next layer, so that over the layers each keeps its share as well, however wide the steps. What full or
    empty modules could not take is then corrected where the steps are finest.

    Args:
        slots: the free ranks.
        wanted: parameters to remove from each.
        urgency: by layer; layers are visited from the highest, so the result does not depend on their numbering.
        allowed: parameters by which the total may be missed before steps far from what was wanted are tried.

    Returns:
        Steps to take from each slot's `top`.
    """
    steps, carry = [0] * len(slots), 0.0
    owed: dict[str, float] = {}
    layers: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        layers.setdefault(slot.layer, []).append(index)
    for layer in sorted(layers, key=lambda layer: (-urgency[layer], layer)):
        *coarse, finest = sorted(layers[layer], key=lambda index: -slots[index].unit)
        for index in (*coarse, finest):
            slot, due = slots[index], wanted[index] - slots[index].least
            passed_on = carry if index == finest else owed.get(slot.module, 0.0)
            steps[index] = min(max(math.floor((due + passed_on) / slot.unit + 0.5), 0), slot.steps)
            left = due - steps[index] * slot.unit
            carry += left
            # More than half a step is owed only by a module at its limit: it cannot be made up for, so it is dropped.
            owed[slot.module] = min(max(owed.get(slot.module, 0.0) + left, -slot.unit / 2), slot.unit / 2)
    _correct(slots, wanted, steps, carry, allowed)
    return steps


def allowed_error(budget: float, sizes: Sequence[LayerSizes]) -> float:
    """Return how many parameters the ranks may miss `budget` by: 0.1 % of it, or the largest rank step."""
    steps = (size.cost[m] * size.step[m] for size in sizes for m in size.full if m not in size.whole)
    return max(TOLERANCE * budget, max(steps, default=0))


def _correct(slots: Sequence[Slot], wanted: Sequence[float], steps: list[int], error: float, allowed: float) -> None:
    """Take further steps, in place, so that `error` parameters more are removed (fewer, where it is negative)."""
    kinds: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        if slot.steps:
            kinds.setdefault(slot.unit, []).append(index)
    fine_first = sorted(kinds)
    for unit in fine_first:
        if abs(error) <= unit / 2:
            break
        count = _possible(kinds[unit], slots, steps, round(error / unit))
        _take(kinds[unit], slots, wanted, steps, count)
        error -= count * unit
    if abs(error) <= allowed:
        return
    # Wide steps (a large `round_to`) can still miss: one or two steps of a coarse kind against those of a finer one
    # reach sums that lie between the steps of either.
    moves = [(abs(error), 0, 0, 0, 0)]
    for fine, coarse in itertools.combinations(fine_first, 2):
        for n_coarse in (-2, -1, 1, 2):
            n_fine = round((error - n_coarse * coarse) / fine)
            if all(_possible(kinds[unit], slots, steps, n) == n for unit, n in ((coarse, n_coarse), (fine, n_fine))):
                moves.append((abs(error - n_coarse * coarse - n_fine * fine), coarse, n_coarse, fine, n_fine))
    _, coarse, n_coarse, fine, n_fine = min(moves)
    if coarse:
        _take(kinds[coarse], slots, wanted, steps, n_coarse)
        _take(kinds[fine], slots, wanted, steps, n_fine)


def _possible(kind: Sequence[int], slots: Sequence[Slot], steps: Sequence[int], count: int) -> int:
    """Clip a number of steps to what these slots have room for."""
    taken = sum(steps[index] for index in kind)
    return min(max(count, -taken), sum(slots[index].steps for index in kind) - taken)


def _take(kind: Sequence[int], slots: Sequence[Slot], wanted: Sequence[float], steps: list[int], count: int) -> None:
    """Spread `count` steps, each where it comes nearest to what was wanted."""
    sign = 1 if count > 0 else -1
    for _ in range(abs(count)):
        open_ = [index for index in kind if 0 <= steps[index] + sign <= slots[index].steps]

        def lack(index: int) -> float:
            slot = slots[index]
            return sign * (wanted[index] - slot.least - steps[index] * slot.unit)

        steps[max(open_, key=lack)] += sign


def check_plan(
    plan: Sequence[dict[str, int]], sizes: Sequence[LayerSizes], modules: Sequence[str], round_to: int = 1
) -> list[dict[str, int]]:
    """Check explicit ranks against the model; a module that a layer's entry leaves out stays whole.

    Raises:
        InputError: the number of layers, a module's name or a rank does not fit; names the first such layer.
    """
    if len(plan) != len(sizes):
        raise InputError(f"the plan has {len(plan)} layers and the model {len(sizes)}: give one entry for each layer")
    ranks = []
    for index, (entry, size) in enumerate(zip(plan, sizes, strict=True)):
        for module, rank in entry.items():
            problem = _rank_problem(module, rank, size, modules, round_to)
            if problem:
                raise InputError(f"plan, layer {index}: {problem}")
        ranks.append({**size.full, **entry})
    return ranks


def _rank_problem(module: str, rank: object, size: LayerSizes, modules: Sequence[str], round_to: int) -> str | None:
    """Say what is wrong with a planned rank, if anything is."""
    if module not in size.full:
        return f"module '{module}' is unknown; allowed: {', '.join(size.full)}"
    full, step = size.full[module], size.step[module]
    if rank == full and isinstance(rank, int) and not isinstance(rank, bool):
        return None
    if module not in modules or module in size.whole:
        reason = "this model needs it so" if module in size.whole else "it is not among the modules to compress"
        return f"{module} has rank {rank!r} but must stay whole at {full}: {reason}"
    grain = math.lcm(step, round_to)
    if isinstance(rank, bool) or not isinstance(rank, int) or not step <= rank < full or rank % grain:
        multiple = f" and a multiple of {grain}" if grain > 1 else ""
        return f"{module} has rank {rank!r}; allowed: a whole number from {grain} to {full}{multiple}"
    return None
