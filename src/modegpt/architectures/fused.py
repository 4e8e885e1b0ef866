"""How a mixture stores its fused experts: outputs by inputs or the other way, gates before ups or in turn with them.

Most families have `(experts, 2·d_int, d_model)` and `(experts, d_model, d_int)`, all gates first, and no biases.
gpt-oss has both transposed, a gate and its up side by side, and biases; Nemotron 3 has `(experts, d_int, d_model)` ups
and no gates. transformers notes on the module what holds; but on that of Llama 4, which has both transposed, nothing.
"""

from typing import Any

from torch import Tensor

Projections = list[tuple[Tensor, Tensor | None]]
"""Weight and bias, by expert."""


def weights_of(mixture: Any) -> tuple[Tensor, Tensor]:
    """Return views: gates and ups, `(experts, 2·d_int, d_model)`, and downs, `(experts, d_model, d_int)`.

    Gates and ups stand in the order in which they are stored; `ups_of` tells them apart. Without gates there are
    `(experts, d_int, d_model)` ups.
    """
    gate_up, down = getattr(mixture, "gate_up_proj" if has_gate(mixture) else "up_proj"), mixture.down_proj
    return (gate_up.mT, down.mT) if getattr(mixture, "is_transposed", True) else (gate_up, down)


def has_gate(mixture: Any) -> bool:
    """Return whether experts have a gate."""
    return getattr(mixture, "has_gate", True)


def weighs_inputs(mixture: Any) -> bool:
    """Return whether a token's share multiplies what an expert reads, and not what it gives: in Llama 4."""
    return not hasattr(mixture, "has_gate")


def activations_of(mixture: Any, products: Tensor) -> Tensor:
    """Return `(tokens, d_int)` what the down projections read, of the products with the gates and ups of an expert."""
    if weighs_inputs(mixture):
        gate, up = products.chunk(2, dim=-1)
        return up * mixture.act_fn(gate)
    return mixture._apply_gate(products) if has_gate(mixture) else mixture.act_fn(products)


def projections_of(mixture: Any) -> tuple[Projections, Projections]:
    """Return, by expert, weight and bias of its gates and ups, and those of its downs: views, None for no bias."""
    gate_up, down = weights_of(mixture)
    gate_ups = _by_expert(gate_up, getattr(mixture, "gate_up_proj_bias", None))
    return gate_ups, _by_expert(down, getattr(mixture, "down_proj_bias", None))


def _by_expert(weights: Tensor, biases: Tensor | None) -> Projections:
    return [(weight, None if biases is None else biases[number]) for number, weight in enumerate(weights)]


def ups_of(mixture: Any) -> tuple[slice, ...]:
    """Return the stored rows of an expert's gates, if it has any, and those of its ups."""
    if not has_gate(mixture):
        return (slice(None),)
    if not getattr(mixture, "is_concatenated", True):
        return slice(0, None, 2), slice(1, None, 2)
    width = width_of(mixture)
    return slice(0, width), slice(width, None)


def width_of(mixture: Any) -> int:
    """Return `d_int`, the neurons of each expert."""
    return weights_of(mixture)[1].shape[-1]
