"""What of a request can be met: the refusals and the warnings of `allocation`."""

import math
from collections.abc import Sequence

from ..config import ALLOCATIONS, MODULES, check_choice
from ..errors import InputError
from .whole import LayerSizes


def check_request(
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


def impossible(
    sparsity: float,
    reachable: float,
    modules: Sequence[str],
    max_sparsity: float | None,
    round_to: int,
    bounded: str = "block",
) -> str:
    """Say that a sparsity cannot be reached, and which one can; `bounded` is what `max_sparsity` bounds."""
    rounded = f" in multiples of {round_to}" if round_to > 1 else ""
    bound = "" if max_sparsity is None else f" with at most {max_sparsity:g} of a {bounded} removed"
    return (
        f"sparsity {sparsity:g} cannot be reached by compressing {', '.join(modules)}{rounded}{bound}: "
        f"the largest possible is {math.floor(reachable * 1e4) / 1e4:g}"
    )


def share(part: float) -> str:
    """Return a share in per cent with two decimals, or, below them, with two significant digits."""
    return f"{part:.2%}" if part == 0 or part >= 1e-4 else f"{100 * part:.2g}%"


def missed(sizes: Sequence[LayerSizes], ranks: Sequence[dict[str, int]], budget: float, allowed: float) -> list[str]:
    """Say that ranks on a coarse grid miss the budget by more than is allowed."""
    removed = sum(size.removed(chosen) for size, chosen in zip(sizes, ranks, strict=True))
    if abs(removed - budget) <= allowed:
        return []
    total = sum(size.total for size in sizes)
    return [
        f"multiples this wide cannot meet the budget: {share(removed / total)} of the blocks' parameters are removed "
        f"and not {share(budget / total)}"
    ]


def rounded_away(sizes: Sequence[LayerSizes], ranks: Sequence[dict[str, int]], wanted: float) -> list[str]:
    """Say that ranks which are rounded up leave more than half of what should go: in small models, with wide steps."""
    removed = sum(size.removed(chosen) for size, chosen in zip(sizes, ranks, strict=True))
    if removed >= wanted / 2:
        return []
    total = sum(size.total for size in sizes)
    return [
        f"ranks are rounded up to whole steps, which are wide here: {share(removed / total)} of the blocks' "
        f"parameters are removed and not {share(wanted / total)}; every other allocation rounds to the nearest"
    ]


def left_whole(
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
            reason = why_whole(module, [sizes[index] for index in forced])
            warnings.append(f"{module} stays whole in {where}, as the model needs it so ({reason}): {consequence}")
    return warnings


def why_whole(module: str, sizes: Sequence[LayerSizes]) -> str:
    """Say why layers leave a module whole."""
    if module == "mlp":
        beside, lacking = "it is one MLP among layers of experts", "there is none"
        told = dict.fromkeys(beside if size.cost["mlp"] else lacking for size in sizes)
        return ", or ".join(told)
    if "vo" in sizes[0].whole:
        return "this family's attention is left as it is"
    return "its queries and keys are normalised, which reads all their coordinates"
