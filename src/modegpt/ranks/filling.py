"""Spreading a budget over units by a common level: the exact solution of the allocation rules' problems."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

AUTO_MAX_SPARSITY = 0.8
"""The paper's rule of thumb: choose ε so that no layer loses more than about 80 %."""


class Unit(NamedTuple):
    """What receives one sparsity: a block, a block's attention or MLP, or one module."""

    slots: list[int]
    """The ranks it governs, as positions in the list of slots."""
    score: float
    weight: float
    """Its parameters."""
    low: float
    """Smallest sparsity."""
    high: float
    """Largest sparsity."""


def auto_temperature(
    scores: Sequence[float], weights: Sequence[float], budget: float, limit: float = AUTO_MAX_SPARSITY
) -> tuple[float, list[str]]:
    """Find the smallest ε at which the paper's closed form `φ_i ∝ exp(−s_i/ε)` stays at or below `limit` everywhere.

    The largest φ falls with ε, so this is a bisection, between a hundredth of the spread of the scores (below, a tiny
    budget would fall on a single layer) and a thousand times it (above, the allocation is uniform to 0.1 %).

    Args:
        scores: by block.
        weights: parameters by block.
        budget: parameters to remove, `Σ w_i φ_i`.
        limit: the largest φ allowed.

    Returns:
        ε, and a warning where no ε keeps to `limit` because the average itself is above it: ε is then the upper end.
    """
    least = min(scores)
    spread = max(scores) - least
    if spread == 0:
        return 1.0, []  # equal scores: every ε gives the uniform allocation

    def largest(epsilon: float) -> float:
        return budget / math.fsum(w * math.exp((least - s) / epsilon) for s, w in zip(scores, weights, strict=True))

    low, high = spread / 100, spread * 1000
    if largest(low) <= limit:
        return low, []
    if largest(high) > limit:
        average = budget / math.fsum(weights)
        message = f"no temperature keeps every layer below {limit:.0%}, as the average is {average:.1%}"
        return high, [f"{message}: the sparsity is spread evenly"]
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if largest(middle) <= limit else (middle, high)
    return high, []


def fill_exponential(epsilon: float, units: Sequence[Unit], budget: float) -> list[float]:
    """Solve `Σ w φ = budget`, `φ_i = clip(c·exp(−s_i/ε), low_i, high_i)`."""
    least = min(unit.score for unit in units)
    spread = max(unit.score for unit in units) - least
    # Below a millionth of the spread the order of the scores alone decides, and the exponents would lose their digits.
    epsilon = max(epsilon, spread * 1e-6)
    offsets = [(least - unit.score) / epsilon for unit in units]

    def solve(free: Sequence[int], remaining: float) -> list[float]:
        top = max(offsets[i] for i in free)
        powers = [math.exp(offsets[i] - top) for i in free]
        norm = math.fsum(units[i].weight * power for i, power in zip(free, powers, strict=True))
        return [remaining * power / norm for power in powers]

    def level(share: float, offset: float) -> float:
        return math.log(share) - offset if share > 0 else -math.inf

    return _fill(units, budget, offsets, level, lambda height, offset: math.exp(height + offset), solve)


def fill_additive(offsets: Sequence[float], units: Sequence[Unit], budget: float) -> list[float]:
    """Solve `Σ w φ = budget`, `φ_i = clip(c + offset_i, low_i, high_i)`."""

    def solve(free: Sequence[int], remaining: float) -> list[float]:
        norm = math.fsum(units[i].weight for i in free)
        constant = (remaining - math.fsum(units[i].weight * offsets[i] for i in free)) / norm
        return [constant + offsets[i] for i in free]

    return _fill(units, budget, offsets, lambda share, offset: share - offset, lambda c, offset: c + offset, solve)


def _fill(
    units: Sequence[Unit],
    budget: float,
    offsets: Sequence[float],
    level: Callable[[float, float], float],
    share: Callable[[float, float], float],
    solve: Callable[[Sequence[int], float], list[float]],
) -> list[float]:
    """Raise a common level until the budget is met: exact water-filling with a floor and a ceiling for each unit.

    The units' levels of leaving the floor and of reaching the ceiling are the kinks of the total, which is monotone.
    Between the two kinks that enclose the budget the free units are known, and `solve` gives their shares.
    Sums are `math.fsum`, so the order of the units does not matter to the last bit.
    """
    starts = [level(unit.low, offset) for unit, offset in zip(units, offsets, strict=True)]
    ends = [level(unit.high, offset) for unit, offset in zip(units, offsets, strict=True)]

    def at(height: float, i: int) -> float:
        if height <= starts[i]:
            return units[i].low
        return units[i].high if height >= ends[i] else share(height, offsets[i])

    kinks = sorted({height for height in starts + ends if math.isfinite(height)})
    first, last = 0, len(kinks)  # the first kink at which the total exceeds the budget
    while first < last:
        middle = (first + last) // 2
        if math.fsum(unit.weight * at(kinks[middle], i) for i, unit in enumerate(units)) > budget:
            last = middle
        else:
            first = middle + 1
    left = kinks[first - 1] if first else -math.inf
    right = kinks[first] if first < len(kinks) else math.inf
    free = [i for i in range(len(units)) if starts[i] <= left and ends[i] >= right and units[i].low < units[i].high]
    shares = [unit.low if starts[i] >= right else unit.high for i, unit in enumerate(units)]
    if free and right < math.inf:
        fixed = math.fsum(units[i].weight * shares[i] for i in set(range(len(units))) - set(free))
        for i, value in zip(free, solve(free, budget - fixed), strict=True):
            shares[i] = min(max(value, units[i].low), units[i].high)
    return shares
