"""One decoder block: its moments and ranks go in, its narrower weights are written in place."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Architecture, Dimensions
from .architectures.access import Affine, BlockWeights, Layout
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
class Decision:
    """What a step decided for one module of a block."""

    weights: dict[str, Any]
    """The narrow fields of `BlockWeights`, by name, in float64 or in the weights' own dtype."""
    error: float
    """Relative reconstruction error."""
    notes: list[str] = field(default_factory=list)
    """What had to be repaired."""
    pairs: Tensor | None = None
    """`(n_kv_heads, pairs)`: the rotary pairs kept; None where all or none are."""


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
    layout = Layout.dense(architecture, dims)
    weights, error, repairs = layout.read(block), {}, []
    full = {"mlp": dims.d_int, "qk": dims.d_head, "vo": dims.d_head}
    narrow, pairs = {}, None
    for name, step in STEPS.items():
        if ranks[name] == full[name]:
            error[name] = 0.0
            continue
        try:
            decision = step(weights, dims, moments, ranks[name], config)
        except NotPositiveDefiniteError as problem:
            raise NumericalError(f"layer {index}, {name}: {problem}") from problem
        error[name], narrow, pairs = (
            decision.error,
            narrow | decision.weights,
            decision.pairs if pairs is None else pairs,
        )
        repairs += [f"layer {index}, {name}: {note}" for note in decision.notes]

    # From here on nothing holds the dense weights but the block, which lets go of them one by one.
    weights = replace(weights, **narrow)
    n_pairs, n_plain = split_rank(ranks["qk"], dims)
    layer = {"rope_pairs": n_pairs, "qk_plain": n_plain, "value_dim": ranks["vo"], "mlp_width": ranks["mlp"]}
    shrink_block(block, architecture.describe(), layer, model_config)
    layout.narrowed(layer).write(block, weights)
    if not all(torch.isfinite(module.weight).all() for module in architecture.linears(block)):
        raise NumericalError(f"layer {index}: the decomposition produced NaN or infinity")
    if n_pairs:
        rope_index = block.get_submodule(architecture.attention).get_buffer("rope_index")
        # The number of a pair is its place in the model's table of cosines, which holds every entry twice.
        rope_index.copy_((rope_index if pairs is None else pairs) * (2 if architecture.interleaved else 1))
    return BlockOutcome(layer, error, repairs)


def split_rank(rank: int, dims: Dimensions) -> tuple[int, int]:
    """Split a query-key rank into rotary pairs and unrotated coordinates, each in its share of the dense head."""
    if dims.rotary_dim == 0:
        return 0, rank
    plain = round(rank * (dims.d_head - dims.rotary_dim) / dims.d_head)
    plain += (rank - plain) % 2
    return (rank - plain) // 2, plain


def _mlp(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    assert weights.down is not None
    result = nystrom(moments.mlp, weights.down.weight.double(), rank, config.ridge)
    dead = int((moments.mlp.diagonal() == 0).sum())
    notes = [f"{dead} neurons are zero on the whole calibration text"] if dead else []
    if result.jitter:
        notes.append(f"leverage scores needed jitter of {result.jitter:.1e} of the diagonal")
    if result.deficiency:
        notes.append(f"the kept moment lacks {result.deficiency} of {rank} ranks; a pseudo-inverse was used")
    ups = tuple(up.rows(result.kept) for up in weights.ups)
    return Decision({"ups": ups, "down": Affine(result.weight, weights.down.bias)}, result.error, notes)


def _query_key(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    n_pairs, n_plain = split_rank(rank, dims)
    result = cr(moments.query, moments.key, n_pairs, n_plain, dims.rotary_dim)
    # A compressed head is laid out as first halves, second halves, unrotated coordinates.
    kept = torch.cat((result.pairs, result.pairs + dims.rotary_dim // 2, result.plain), dim=1)
    narrow = {}
    for role, n_heads in (("query", dims.n_heads), ("key", dims.n_kv_heads)):
        by_head = kept.repeat_interleave(n_heads // dims.n_kv_heads, dim=0)
        offsets = dims.d_head * torch.arange(n_heads, device=kept.device)[:, None]
        narrow[role] = getattr(weights, role).rows((by_head + offsets).flatten())
    return Decision(narrow, result.error, pairs=result.pairs)


def _value_output(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    value, output = weights.value, weights.output
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
    narrow = {
        "value": Affine((result.basis.mT @ heads).flatten(0, 1), bias),
        "output": Affine(new_output.reshape(dims.d_model, -1), output.bias),
    }
    missing = result.deficiency
    notes = [f"the value moments lack {missing} ranks over all heads"] if missing else []
    return Decision(narrow, result.error, notes)


STEPS = {"mlp": _mlp, "qk": _query_key, "vo": _value_output}


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
