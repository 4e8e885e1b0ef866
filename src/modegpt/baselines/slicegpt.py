"""SliceGPT (Ashkboos et al. 2024, arXiv:2401.15024): the residual stream loses directions, found by PCA.

Before every attention and every MLP the stream is turned by an orthogonal `Q`, the eigenvectors of its second moment,
and cut to its first `k` coordinates; the turns are folded into the weights, but for one `k × k` matrix `Q_iᵀ Q_{i+1}`
on each of a block's two residual connections. Here the stream keeps its coordinates and is projected by `P = Q_k Q_kᵀ`
instead, which computes the same. The stream behind the last block stays whole, as in their experiments.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..architectures import Architecture
from ..architectures.access import affine
from ..decompose import psd
from ..observing.inputs import inputs_of
from ..progress import Progress
from .reduced import Reduced, reaches, require
from .walk import Decoder, Walk, layer_parameters, not_plain


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Return what cuts the residual stream to the largest `k` at which the blocks, with their `Q`, lose the share.

    Each PCA is of what the norm behind it reads, on the stream that the blocks before it, already cut, put out: so it
    is in their code. Of what the norm gives, as in their paper, it lost more (docs/log.md).
    """

    @torch.no_grad()
    def at(sparsity: float) -> Reduced:
        model = copy.deepcopy(dense)
        walk = Walk(model, windows)
        total, d_model, n_layers = sum(layer_parameters(dense)), walk.dims.d_model, len(walk.layers)
        rank = d_model
        while not reaches(removed := total - _sliced_parameters(walk, rank), sparsity, total) and rank > 1:
            rank -= 1
        require("slicegpt", removed, sparsity, total)
        centred = _is_centred(walk.architecture.middle_module(walk.layers[0]))
        basis = _directions(walk.calibration.hidden, rank, centred, walk.device)
        walk.layers[0].register_forward_pre_hook(_projecting_input(basis), with_kwargs=True)
        for index, block in enumerate(walk.layers):
            progress("compress", index, n_layers)
            basis = _directions(_middle(walk, index), rank, centred, walk.device)
            _project_attention(block, walk.architecture, basis)
            if index < n_layers - 1:
                basis = _directions(walk.run(index), rank, centred, walk.device)
                block.register_forward_hook(_projecting_output(basis))
            walk.advance(index)
        return Reduced(model, removed, removed / total)

    return at


def most(dense: PreTrainedModel) -> int:
    """Return the parameters that go if one direction stays."""
    return sum(layer_parameters(dense)) - _sliced_parameters(Decoder(dense), 1)


def not_plain_sums(architecture: Architecture) -> str | None:
    """Return why a family's blocks do not add attention and MLP, one after the other and as they are, to the stream."""
    sums = architecture.adds_mlp and not architecture.mlp_norm and architecture.mlp_factor == 1
    if architecture.parallel or not sums:
        return "its blocks do not add attention and then MLP, as they are, to the residual stream"
    return not_plain(architecture)


def _sliced_parameters(decoder: Decoder, rank: int) -> int:
    """Return the parameters of all blocks on `rank` directions.

    Two `Q` are added. The norms before attention and MLP are folded into the weights that read them, with their biases
    into those of the weights, which get some where they have none; norms of queries and keys stay.
    """
    total, architecture = 0, decoder.architecture
    for index, block in enumerate(decoder.layers):
        behind = decoder.dims.d_model if index == len(decoder.layers) - 1 else rank
        writers = [architecture.projection(block, role) for role in ("output", "down")]
        biased = getattr(architecture.middle_module(block), "bias", None) is not None
        total += rank * (rank + behind)
        total += sum(parameter.numel() for norm in architecture.norms(block) for parameter in norm.parameters())
        for module in architecture.linears(block):
            weight, bias = affine(module)
            if module in writers:
                total += (rank, behind)[writers.index(module)] * (weight.shape[1] + (bias is not None))
            else:
                total += len(weight) * (rank + (biased or bias is not None))
    return total


def _is_centred(norm: nn.Module) -> bool:
    """Whether a norm takes off the mean: then the stream is, too, as SliceGPT folds that into what writes to it."""
    return "LayerNorm" in type(norm).__name__ or isinstance(norm, nn.LayerNorm)


def _directions(states: Iterable[Tensor], rank: int, centred: bool, device: torch.device) -> Tensor:
    """Return the `(d_model, rank)` leading eigenvectors of the states' second moment, in their dtype."""
    moment, dtype = None, torch.float32
    for batch in states:
        # Float64: a few tokens are so large that float32 would lose all but their direction.
        rows, dtype = batch.to(device).flatten(0, -2).double(), batch.dtype
        if centred:
            rows = rows - rows.mean(-1, keepdim=True)
        moment = rows.mT @ rows if moment is None else moment + rows.mT @ rows
    assert moment is not None
    return psd.leading(moment, rank).to(dtype)


def _middle(walk: Walk, index: int) -> Iterable[Tensor]:
    """Yield the residual stream between attention and MLP of a block, for each batch."""
    with inputs_of(walk.architecture.middle_module(walk.layers[index])) as seen:
        for _ in walk.run(index):
            yield seen.pop()


def _projected(states: Tensor, basis: Tensor) -> Tensor:
    return (states @ basis) @ basis.mT


def _projecting_input(basis: Tensor) -> Callable[..., Any]:
    """Return a hook that projects the hidden states that enter a block."""

    def hook(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if inputs:
            return (_projected(inputs[0], basis), *inputs[1:]), named
        return inputs, {**named, "hidden_states": _projected(named["hidden_states"], basis)}

    return hook


def _projecting_output(basis: Tensor) -> Callable[..., Any]:
    """Return a hook that projects what a block puts out."""

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_projected(output[0], basis), *output[1:])
        return _projected(output, basis)

    return hook


def _project_attention(block: nn.Module, architecture: Architecture, basis: Tensor) -> None:
    """Project the stream behind a block's attention: of `x + a`, attention adds `P(x + a) − x` from now on."""
    entering: list[Tensor] = []

    def note(_module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        entering[:] = [inputs[0] if inputs else named["hidden_states"]]

    def shift(_module: Any, _inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        states = entering.pop()
        if architecture.adds_attention:  # it puts out x + a
            return (_projected(output[0], basis), *output[1:])
        return (_projected(states + output[0], basis) - states, *output[1:])

    block.register_forward_pre_hook(note, with_kwargs=True)
    block.get_submodule(architecture.attention).register_forward_hook(shift)
