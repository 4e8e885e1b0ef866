"""Streaming second moments of one decoder block, taken by hooks on its linear layers.

Products are float32 and are added into float64, so many batches lose nothing to the order of summation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Architecture, Dimensions
from .architectures.access import HEADS, Layout
from .errors import NumericalError


@dataclass
class BlockMoments:
    """The sums over calibration tokens from which a block is decomposed; all float64, unnormalised.

    A block of `n_heads` query heads and `n_kv_heads` key-value heads needs no `d_model × d_model` matrix.
    """

    mlp: Tensor
    """`(d_int, d_int)`: `C = Σ z zᵀ`, `z` the input of the down projection."""
    query: Tensor
    """`(n_heads, d_head)`: `e_Q = Σ q²`, before the rotary embedding, bias included."""
    key: Tensor
    """`(n_kv_heads, d_head)`: `e_K = Σ k²`."""
    value: Tensor
    """`(n_kv_heads, d_head, d_head)`: `G_V = Σ v vᵀ`, bias included."""
    n_tokens: int = field(default=0)

    @classmethod
    def zeros(cls, dims: Dimensions, device: torch.device | str = "cpu") -> "BlockMoments":
        """Return the moments of no tokens."""
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(
            mlp=torch.zeros(dims.d_int, dims.d_int, **options),
            query=torch.zeros(dims.n_heads, dims.d_head, **options),
            key=torch.zeros(dims.n_kv_heads, dims.d_head, **options),
            value=torch.zeros(dims.n_kv_heads, dims.d_head, dims.d_head, **options),
        )

    def update_mlp(self, z: Tensor) -> None:
        """Add the `(..., d_int)` inputs of the down projection. Cost: `2·d_int²` operations a token."""
        z = z.flatten(0, -2).float()
        self.mlp += z.mT @ z
        self.n_tokens += len(z)

    def update_query(self, q: Tensor) -> None:
        """Add `(..., n_heads·d_head)` query states."""
        self.query += _heads(q, self.query.shape[0]).square().sum(0)

    def update_key(self, k: Tensor) -> None:
        """Add `(..., n_kv_heads·d_head)` key states."""
        self.key += _heads(k, self.key.shape[0]).square().sum(0)

    def update_value(self, v: Tensor) -> None:
        """Add `(..., n_kv_heads·d_head)` value states."""
        heads = _heads(v, self.value.shape[0]).transpose(0, 1)
        self.value += heads.mT @ heads

    def merge(self, other: "BlockMoments") -> None:
        """Add the moments of other tokens of the same block: sums of disjoint batches merge exactly."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def check_finite(self, layer: int) -> None:
        """Raise `NumericalError` naming the layer and the matrix if a sum is NaN or infinite."""
        names = {"mlp": "MLP activations", "query": "query states", "key": "key states", "value": "value states"}
        for name, meaning in names.items():
            if not torch.isfinite(getattr(self, name)).all():
                raise NumericalError(f"layer {layer}: NaN or infinity in the {meaning} on the calibration text")


@contextmanager
def record_moments(
    block: nn.Module, architecture: Architecture, dims: Dimensions, moments: BlockMoments
) -> Iterator[None]:
    """While the context is open, every forward of `block` adds its tokens to `moments`."""
    layout = Layout.dense(architecture, dims)
    updates = {role: getattr(moments, f"update_{role}") for role in HEADS}
    handles = []
    for module in dict.fromkeys(architecture.projection(block, role) for role in HEADS):
        held = [role for role in HEADS if architecture.projection(block, role) is module]

        def add_heads(_module: Any, _inputs: Any, output: Tensor, held: list[str] = held) -> None:
            for role in held:
                updates[role](layout.states(role, output))

        handles.append(module.register_forward_hook(add_heads))
    if architecture.down:
        down = architecture.projection(block, "down")
        handles.append(down.register_forward_pre_hook(lambda _module, inputs: moments.update_mlp(inputs[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _heads(states: Tensor, n_heads: int) -> Tensor:
    """`(..., n_heads·d_head)` to float32 `(tokens, n_heads, d_head)`."""
    return states.flatten(0, -2).float().unflatten(-1, (n_heads, -1))
