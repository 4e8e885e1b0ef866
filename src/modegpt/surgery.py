"""One decoder block: its moments and ranks go in, its narrower weights are written in place."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Architecture, Dimensions
from .config import CompressionConfig
from .decompose import NotPositiveDefiniteError, cr, joint_svd, nystrom, value_eigenvectors
from .errors import NumericalError
from .modeling_modegpt import shrink_block
from .moments import BlockMoments


@dataclass
class BlockOutcome:
    """What compressing one block did."""

    layer: dict[str, int]
    """The layer's entry of `config.modegpt["layers"]`."""
    error: dict[str, float]
    """Relative reconstruction error by module (`mlp`, `qk`, `vo`); 0 for one left whole."""
    repairs: list[str] = field(default_factory=list)
    """Jitter, rank deficiency and dead neurons, each as one sentence."""


@dataclass
class _NewWeights:
    """Narrow float64 tensors by the module they belong to, in Hugging Face layout, and the rotary pairs kept."""

    tensors: list[tuple[nn.Linear, Tensor, Tensor | None]] = field(default_factory=list)
    pairs: Tensor | None = None

    def rows(self, linear: nn.Linear, kept: Tensor) -> None:
        """Select output rows of a linear layer, bias included."""
        bias = None if linear.bias is None else linear.bias[kept]
        self.tensors.append((linear, linear.weight[kept], bias))


@torch.no_grad()
def compress_block(
    block: nn.Module,
    architecture: Architecture,
    dims: Dimensions,
    moments: BlockMoments,
    ranks: dict[str, int],
    config: CompressionConfig,
    model_config: Any,
    index: int,
) -> BlockOutcome:
    """Decompose the modules of one block to `ranks` and shrink the block in place.

    Args:
        block: a stock decoder block; afterwards a compressed one.
        architecture: its family.
        dims: the dense model's sizes.
        moments: of this block, on the device of the block.
        ranks: `mlp` neurons, `qk` and `vo` coordinates a head, at most the full sizes.
        config: solver and ridge.
        model_config: the dense model's config.
        index: layer number, for messages.

    Raises:
        NumericalError: a moment is indefinite or not finite; names the layer and the matrix.
    """
    new, error, repairs = _NewWeights(), {}, []
    steps = {"mlp": _mlp, "qk": _query_key, "vo": _value_output}
    full = {"mlp": dims.d_int, "qk": dims.d_head, "vo": dims.d_head}
    for name, step in steps.items():
        if ranks[name] == full[name]:
            error[name] = 0.0
            continue
        try:
            error[name], notes = step(block, architecture, dims, moments, ranks[name], config, new)
        except NotPositiveDefiniteError as problem:
            raise NumericalError(f"layer {index}, {name}: {problem}") from problem
        repairs += [f"layer {index}, {name}: {note}" for note in notes]

    n_pairs, n_plain = split_rank(ranks["qk"], dims)
    layer = {"rope_pairs": n_pairs, "qk_plain": n_plain, "value_dim": ranks["vo"], "mlp_width": ranks["mlp"]}
    shrink_block(block, architecture.describe(), layer, model_config)
    for linear, weight, bias in new.tensors:
        if not torch.isfinite(weight).all():
            raise NumericalError(f"layer {index}: the decomposition produced NaN or infinity")
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    if new.pairs is not None:
        rope_index = block.get_submodule(architecture.attention).get_buffer("rope_index")
        rope_index.copy_(new.pairs)
    return BlockOutcome(layer, error, repairs)


def split_rank(rank: int, dims: Dimensions) -> tuple[int, int]:
    """Split a query-key rank into rotary pairs and unrotated coordinates, each in its share of the dense head."""
    if dims.rotary_dim == 0:
        return 0, rank
    plain = round(rank * (dims.d_head - dims.rotary_dim) / dims.d_head)
    plain += (rank - plain) % 2
    return (rank - plain) // 2, plain


def _mlp(
    block: nn.Module,
    architecture: Architecture,
    dims: Dimensions,
    moments: BlockMoments,
    rank: int,
    config: CompressionConfig,
    new: _NewWeights,
) -> tuple[float, list[str]]:
    down = architecture.projection(block, "down")
    result = nystrom(moments.mlp, down.weight.double(), rank, config.ridge)
    for up in architecture.up_projections(block):
        new.rows(up, result.kept)
    new.tensors.append((down, result.weight, None))
    dead = int((moments.mlp.diagonal() == 0).sum())
    notes = [f"{dead} neurons are zero on the whole calibration text"] if dead else []
    if result.jitter:
        notes.append(f"leverage scores needed jitter of {result.jitter:.1e} of the diagonal")
    if result.deficiency:
        notes.append(f"the kept moment lacks {result.deficiency} of {rank} ranks; a pseudo-inverse was used")
    return result.error, notes


def _query_key(
    block: nn.Module,
    architecture: Architecture,
    dims: Dimensions,
    moments: BlockMoments,
    rank: int,
    config: CompressionConfig,
    new: _NewWeights,
) -> tuple[float, list[str]]:
    n_pairs, n_plain = split_rank(rank, dims)
    result = cr(moments.query, moments.key, n_pairs, n_plain, dims.rotary_dim)
    # A compressed head is laid out as first halves, second halves, unrotated coordinates.
    kept = torch.cat((result.pairs, result.pairs + dims.rotary_dim // 2, result.plain), dim=1)
    for role, n_heads in (("query", dims.n_heads), ("key", dims.n_kv_heads)):
        by_head = kept.repeat_interleave(n_heads // dims.n_kv_heads, dim=0)
        offsets = dims.d_head * torch.arange(n_heads, device=kept.device)[:, None]
        new.rows(architecture.projection(block, role), (by_head + offsets).flatten())
    if n_pairs:
        new.pairs = result.pairs
    return result.error, []


def _value_output(
    block: nn.Module,
    architecture: Architecture,
    dims: Dimensions,
    moments: BlockMoments,
    rank: int,
    config: CompressionConfig,
    new: _NewWeights,
) -> tuple[float, list[str]]:
    value, output = architecture.projection(block, "value"), architecture.projection(block, "output")
    groups, per_group = dims.n_kv_heads, dims.n_heads // dims.n_kv_heads
    # (d_model, heads·d_head) to one (d_head, per_group·d_model) matrix a group: its heads' blocks side by side.
    blocks = output.weight.double().reshape(dims.d_model, groups, per_group, dims.d_head).permute(1, 3, 2, 0)
    decompose = joint_svd if per_group == 1 else value_eigenvectors
    result = decompose(moments.value, blocks.flatten(2), rank)
    new_output = result.output.unflatten(2, (per_group, dims.d_model)).permute(3, 0, 2, 1)
    heads = value.weight.double().reshape(groups, dims.d_head, dims.d_model)
    bias = None
    if value.bias is not None:
        bias = (result.basis.mT @ value.bias.double().reshape(groups, dims.d_head, 1)).flatten()
    new.tensors.append((value, (result.basis.mT @ heads).flatten(0, 1), bias))
    new.tensors.append((output, new_output.reshape(dims.d_model, -1), None))
    missing = result.deficiency
    return result.error, [f"the value moments lack {missing} ranks over all heads"] if missing else []


@torch.no_grad()
def rounded_tensors(block: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the block's tensors in their final dtype, and round the block itself to it.

    The next block must be calibrated on what the written weights produce, and so that a resumed run sees the same.
    """
    tensors = {}
    for name, tensor in block.state_dict().items():
        tensors[name] = tensor.to("cpu", dtype, copy=True) if tensor.is_floating_point() else tensor.cpu()
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.copy_(tensors[name])
    return tensors
