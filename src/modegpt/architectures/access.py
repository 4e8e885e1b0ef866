"""Reads and writes a decoder block's weights in one canonical layout, however the family stores them.

Canonical: weights are `(out, in)`; query heads stand in the order of their key heads; a head's coordinate `j` and
`j + r/2` are a rotary pair (`r = rotary_dim`), and unrotated coordinates come last. Storage differs from that by a
choice of rows alone (fused projections, interleaved pairs) and by a transpose (GPT-2), so `Layout` is row numbers.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .dimensions import Dimensions
from .fused import projections_of, ups_of
from .spec import Architecture

HEADS = ("query", "key", "value")


class Affine(NamedTuple):
    """One linear map: `x ↦ x Wᵀ + b`."""

    weight: Tensor
    """`(out, in)`."""
    bias: Tensor | None
    """`(out,)`."""

    def rows(self, kept: slice | Tensor) -> "Affine":
        """Return the map onto some of the outputs: a view for a slice, else a copy."""
        return Affine(self.weight[kept], None if self.bias is None else self.bias[kept])


class Expert(NamedTuple):
    """The weights of one expert of a mixture."""

    ups: tuple[Affine, ...]
    """Its gate, if it has one, and its up projection, each `(d_int, d_model)`."""
    down: Affine
    """`(d_model, d_int)`."""


NOTHING = Affine(torch.empty(0, 0), None)
"""In place of the projections of an attention that stays whole."""


@dataclass
class BlockWeights:
    """The weights of one block that have a rank, in the canonical layout; `NOTHING` for those of a whole attention."""

    query: Affine
    """`(n_heads·d_head, d_model)`."""
    key: Affine
    """`(n_kv_heads·d_head, d_model)`."""
    value: Affine
    """`(n_kv_heads·d_head, d_model)`."""
    output: Affine
    """`(d_model, n_heads·d_head)`."""
    ups: tuple[Affine, ...]
    """Every map into the MLP's intermediate space, each `(d_int, d_model)`; none of a mixture of experts, or no MLP."""
    down: Affine | None
    """`(d_model, d_int)`; None of a mixture of experts, or where there is no MLP."""
    experts: tuple[Expert, ...] = ()
    """Those of a mixture."""
    mlp_gain: Tensor | None = None
    """`(d_model,)` what the norm of the MLP's output multiplies it by, after the division by its RMS; None without."""
    norms: tuple[Tensor, ...] = ()
    """Gains of query and key norms by head coordinate, where the family stores those in another order."""


@dataclass(frozen=True)
class Layout:
    """Where the canonical rows of a block of certain sizes are stored."""

    architecture: Architecture
    dims: Dimensions
    qk_dim: int
    value_dim: int
    mlp_width: int
    interleaved: bool
    """Whether a head's rotary pairs are stored side by side; a compressed block's never are."""

    @classmethod
    def dense(cls, architecture: Architecture, dims: Dimensions) -> "Layout":
        """Return the layout of the family's stock block."""
        return cls(architecture, dims, dims.d_head, dims.d_head, dims.d_int, architecture.interleaved)

    def narrowed(self, layer: dict[str, int]) -> "Layout":
        """Return the layout of a compressed block; `layer` as in `config.modegpt["layers"]`."""
        qk_dim = 2 * layer["rope_pairs"] + layer["qk_plain"]
        sizes = {"qk_dim": qk_dim, "value_dim": layer["value_dim"], "mlp_width": layer["mlp_width"]}
        return replace(self, **sizes, interleaved=False)

    def rows(self, role: str) -> slice | Tensor:
        """Return the stored rows of `query`, `key` or `value` in canonical order; a slice where they are adjacent."""
        n_groups = self.architecture.fused_parts or self.dims.n_kv_heads
        n_queries, n_keys = self.dims.n_heads // n_groups, self.dims.n_kv_heads // n_groups
        sizes = {"query": n_queries * self.qk_dim, "key": n_keys * self.qk_dim, "value": n_keys * self.value_dim}
        names = {name: getattr(self.architecture, name) for name in HEADS}
        together = [name for name in self.architecture.fused_order.split() if names[name] == names[role]]
        before = sum(sizes[name] for name in together[: together.index(role)])
        by_group = (self.architecture.by_group or self.architecture.fused_parts) and n_groups > 1
        reorder = self.interleaved and role != "value"
        if not by_group and not reorder:
            return slice(n_groups * before, n_groups * (before + sizes[role]))
        stride, first = (sum(sizes[n] for n in together), before) if by_group else (sizes[role], n_groups * before)
        groups = first + stride * torch.arange(n_groups)[:, None]
        if not reorder:
            return (groups + torch.arange(sizes[role])).flatten()
        heads = groups[..., None] + self.qk_dim * torch.arange(sizes[role] // self.qk_dim)[:, None]
        return (heads + self._coordinates()).flatten()

    def states(self, role: str, output: Tensor) -> Tensor:
        """Return the canonical query, key or value states, `(..., heads·d_head)`, of its projection's output."""
        return output[..., self.rows(role)]

    def read(self, block: nn.Module) -> BlockWeights:
        """Return the block's weights: views of them where the rows are adjacent, copies elsewhere."""
        architecture = self.architecture
        heads, output = dict.fromkeys(HEADS, NOTHING), NOTHING
        if not architecture.whole_attention:
            heads = {role: affine(architecture.projection(block, role)).rows(self.rows(role)) for role in HEADS}
            output = affine(architecture.projection(block, "output"))
        ups = tuple(affine(module).rows(rows) for module, rows in self.ups(block))
        down = affine(architecture.projection(block, "down")) if architecture.has_mlp(block) else None
        experts, gain = self.experts(block), None
        last = experts[0].down if experts else down
        norm = architecture.output_norm(block)
        if last is not None and norm is not None:
            gain = norm(last.weight.new_ones(len(last.weight)))
        return BlockWeights(
            **heads,
            output=output,
            ups=ups,
            down=down,
            experts=experts,
            mlp_gain=gain,
            norms=self._norms(block),
        )

    @torch.no_grad()
    def write(self, block: nn.Module, weights: BlockWeights) -> None:
        """Copy weights of this layout's sizes into the block, rounded to the dtype of its parameters."""
        architecture = self.architecture
        if not architecture.whole_attention:
            for role in HEADS:
                _copy(getattr(weights, role), affine(architecture.projection(block, role)), self.rows(role))
            _copy(weights.output, affine(architecture.projection(block, "output")))
        for (module, rows), up in zip(self.ups(block), weights.ups, strict=True):
            _copy(up, affine(module), rows)
        if weights.down is not None:
            _copy(weights.down, affine(architecture.projection(block, "down")))
        for new, old in zip(weights.experts, self.experts(block), strict=True):
            for source, target in zip((*new.ups, new.down), (*old.ups, old.down), strict=True):
                _copy(source, target)
        if self.architecture.interleaved:
            for norm, gain in zip(architecture.norms(block), weights.norms, strict=True):
                norm.weight[..., self._coordinates()] = gain

    def _coordinates(self) -> Tensor:
        """Return where a head's canonical coordinates are stored: first halves, second halves, unrotated ones."""
        every = torch.arange(self.qk_dim)
        if not self.interleaved:
            return every
        rotated = every[: self.dims.rotary_dim]
        return torch.cat((rotated[::2], rotated[1::2], every[self.dims.rotary_dim :]))

    def _norms(self, block: nn.Module) -> tuple[Tensor, ...]:
        if not self.architecture.interleaved:
            return ()
        return tuple(norm.weight[..., self._coordinates()] for norm in self.architecture.norms(block))

    def ups(self, block: nn.Module) -> list[tuple[Any, slice]]:
        """Return module and rows of each map into the MLP: one named twice holds two, one after another."""
        names, width = self.architecture.up if self.architecture.has_mlp(block) else (), self.mlp_width
        before = [names[:index].count(name) for index, name in enumerate(names)]
        return [
            (block.get_submodule(name), slice(width * place, width * (place + 1)))
            for name, place in zip(names, before, strict=True)
        ]

    def experts(self, block: nn.Module) -> tuple[Expert, ...]:
        """Return views of the weights of each expert; none where the block has no experts."""
        mixture = self.architecture.mixture(block)
        if mixture is None:
            return ()
        gate_ups, downs = ([Affine(*own) for own in each] for each in projections_of(mixture))
        pairs = zip(gate_ups, downs, strict=True)
        return tuple(Expert(tuple(up.rows(rows) for rows in ups_of(mixture)), down) for up, down in pairs)


def affine(module: Any) -> Affine:
    """Return a linear layer's weight as `(out, in)`, and its bias; views."""
    weight = module.weight.mT if isinstance(module, Conv1D) else module.weight
    return Affine(weight, module.bias)


def _copy(source: Affine, target: Affine, rows: slice | Tensor = slice(None)) -> None:
    assert (source.bias is None) == (target.bias is None), "a bias can be changed, not added or removed"
    for new, old in zip(source, target, strict=True):
        if new is not None and old is not None:
            old[rows] = new.to(old.dtype)
