"""One decoder block: its moments and ranks go in, its narrower weights are written in place."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures import Architecture, Dimensions
from ..architectures.access import Layout
from ..config import MODULES, CompressionConfig
from ..decompose import NotPositiveDefiniteError
from ..decompose.psd import all_finite
from ..errors import NumericalError
from ..modeling_modegpt import shrink_block, shrink_mlp
from ..moments import BlockMoments
from ..solvers import SOLVERS, Solver, split_rank
from ..solvers.experts import decide as decide_experts
from ..solvers.mlp import towards


@dataclass
class BlockOutcome:
    """What compressing one block did."""

    layer: dict[str, int]
    """The layer's entry of `config.modegpt["layers"]`."""
    error: dict[str, float]
    """Relative reconstruction error by module (`mlp`, `qk`, `vo`); 0 for one left whole."""
    repairs: list[str] = field(default_factory=list)
    """Jitter, rank deficiency and dead neurons, each as one sentence."""


def solver_of(module: str, config: CompressionConfig) -> Solver:
    """Return the solver that the settings name for a module."""
    return SOLVERS[module][config.solver_of(module)]


def stages(
    ranks: dict[str, int], architecture: Architecture, dims: Dimensions, config: CompressionConfig
) -> list[tuple[str, ...]]:
    """Return the modules of a block that are to be compressed, in the order in which their moments are taken.

    `dims` are the block's. The MLP comes in a stage of its own where its solver wants the moments that the compressed
    attention gives.
    """
    chosen = cut_modules(ranks, dims)
    attention = tuple(module for module in chosen if module != "mlp")
    if "mlp" in chosen and attention and solver_of("mlp", config).late and not architecture.parallel:
        return [attention, ("mlp",)]
    return [chosen] if chosen else []


def cut_modules(ranks: dict[str, int], dims: Dimensions) -> tuple[str, ...]:
    """Return the modules of a block whose rank is below the full one; `dims` are the block's."""
    return tuple(module for module in MODULES if ranks[module] < dims.full_ranks[module])


def needed_moments(
    modules: Sequence[str], block: nn.Module, architecture: Architecture, dims: Dimensions, config: CompressionConfig
) -> tuple[str, ...]:
    """Return the names of the moments that the solvers of these modules read."""
    names: list[str] = []
    dims = architecture.block_dims(block, dims)
    for module in modules:
        if module == "mlp" and architecture.experts:
            assert solver_of(module, config).needs(dims, False) == ("mlp",)
            names.append("experts")
            continue
        refitted = {"mlp": "down", "qk": "key", "vo": "output"}[module]
        has_bias = architecture.projection(block, refitted).bias is not None
        names += solver_of(module, config).needs(dims, has_bias)
    return tuple(dict.fromkeys(names))


def blank_moments(
    modules: Sequence[str],
    block: nn.Module,
    architecture: Architecture,
    dims: Dimensions,
    config: CompressionConfig,
    device: torch.device,
    more: Sequence[str] = (),
    every: int = 1,
) -> BlockMoments:
    """Return what the solvers of these modules read, and `more` moments, of no tokens; `every` as in `BlockMoments`."""
    needed, dims = needed_moments(modules, block, architecture, dims, config), architecture.block_dims(block, dims)
    return BlockMoments.zeros(dims, (*needed, *more), device, every)


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
    modules: Sequence[str] = MODULES,
    before: BlockOutcome | None = None,
    ahead: BlockMoments | None = None,
) -> BlockOutcome:
    """Decompose modules of one block to `ranks` and shrink the block in place.

    Args:
        block: a stock decoder block; afterwards a compressed one.
        architecture: its family.
        dims: the dense model's sizes.
        moments: of this block, on the device of the block.
        ranks: `mlp` neurons, `qk` and `vo` coordinates a head, at most the full sizes.
        config: the solvers and their settings.
        model_config: the dense model's config.
        index: layer number, for messages.
        modules: which to decompose now; the others keep their present size.
        before: what an earlier call did to the block's attention; only `mlp` can then follow.
        ahead: moments by which the MLP's neurons are chosen and no more; `refit_down` must follow.

    Raises:
        NumericalError: a moment is indefinite or not finite; names the layer and the matrix.
    """
    dims = architecture.block_dims(block, dims)
    full = dims.full_ranks
    dense = Layout.dense(architecture, dims)
    weights = (dense if before is None else dense.narrowed(before.layer)).read(block)
    error, repairs, narrow, pairs = dict.fromkeys(full, 0.0), [], {}, None
    if before is not None:
        error, repairs = dict(before.error), list(before.repairs)
    for module in modules:
        if ranks[module] == full[module]:
            continue
        solver = solver_of(module, config)
        try:
            if module == "mlp" and weights.experts:
                own = moments if ahead is None else ahead
                decision = decide_experts(solver, weights, dims, own, ranks[module], config)
            elif module == "mlp" and ahead is not None and solver.ahead is not None:
                decision = solver.ahead(weights, dims, ahead, ranks[module], config)
            else:
                decision = solver.decide(weights, dims, moments, ranks[module], config)
        except NotPositiveDefiniteError as problem:
            raise NumericalError(f"layer {index}, {module}: {problem}") from problem
        error[module], pairs = decision.error, decision.pairs if pairs is None else pairs
        narrow |= decision.weights
        repairs += [f"layer {index}, {module}: {note}" for note in decision.notes]

    # From here on nothing holds the dense weights but the block, which lets go of them one by one.
    weights = replace(weights, **narrow)
    sizes = {module: ranks[module] if module in modules else full[module] for module in full}
    if before is None:
        n_pairs, n_plain = split_rank(sizes["qk"], dims)
        layer = {"rope_pairs": n_pairs, "qk_plain": n_plain, "value_dim": sizes["vo"], "mlp_width": sizes["mlp"]}
        shrink_block(block, architecture.describe(), layer, model_config)
    else:
        layer = {**before.layer, "mlp_width": sizes["mlp"]}
        shrink_mlp(block, architecture.describe(), sizes["mlp"])
    dense.narrowed(layer).write(block, weights)
    if not all(all_finite(weight) for module in architecture.narrowed(block) for weight in module.parameters()):
        raise NumericalError(f"layer {index}: the decomposition produced NaN or infinity")
    if before is None and layer["rope_pairs"]:
        rope_index = block.get_submodule(architecture.attention).get_buffer("rope_index")
        # The number of a pair is its place in the model's table of cosines, which holds every entry twice.
        rope_index.copy_((rope_index if pairs is None else pairs) * (2 if architecture.interleaved_tables else 1))
    return BlockOutcome(layer, error, repairs)


@torch.no_grad()
def refit_down(
    block: nn.Module, layout: Layout, moments: BlockMoments, index: int, before: BlockOutcome, drifted: bool
) -> BlockOutcome:
    """Refit, in place, the down projection of a block that is compressed but for that.

    Args:
        block: compressed.
        layout: of the dense block.
        moments: of the compressed block, with the targets of its MLP.
        index: layer number, for messages.
        before: what was done to the block so far.
        drifted: whether a block before this one was compressed.

    Raises:
        NumericalError: a moment is indefinite or not finite; names the layer.
    """
    layout = layout.narrowed(before.layer)
    weights = layout.read(block)
    assert weights.down is not None
    try:
        decision = towards(weights.down, moments, drifted)
    except NotPositiveDefiniteError as problem:
        raise NumericalError(f"layer {index}, mlp: {problem}") from problem
    layout.write(block, replace(weights, **decision.weights))
    notes = [f"layer {index}, mlp: {note}" for note in decision.notes]
    return BlockOutcome(before.layer, {**before.error, "mlp": decision.error}, before.repairs + notes)


@torch.no_grad()
def round_weights(
    block: nn.Module, architecture: Architecture, dtype: torch.dtype, besides: Sequence[str] = ()
) -> None:
    """Round a block's tensors to their final dtype, but for those of the modules `besides`; each stays in its own.

    What follows must be calibrated on what the written weights produce, and so that a resumed run sees the same.
    """
    for name, tensor in block.state_dict().items():
        final = architecture.stored_dtype(name, tensor.dtype, dtype)
        if tensor.dtype != final and name.rpartition(".")[0] not in besides:
            tensor.copy_(tensor.to(final))


@torch.no_grad()
def rounded_tensors(block: nn.Module, architecture: Architecture, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the block to its final dtype, and return its tensors in it."""
    round_weights(block, architecture, dtype)
    return {
        name: tensor.to("cpu", architecture.stored_dtype(name, tensor.dtype, dtype), copy=True)
        for name, tensor in block.state_dict().items()
    }
