"""SVD-LLM (Wang et al. 2025, arXiv:2403.07378): every matrix becomes two factors, by an SVD in whitened inputs.

The variant without fine-tuning, their SVD-LLM (W).
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..architectures.access import Affine, BlockWeights, Layout
from ..decompose import psd
from ..modeling_modegpt import ROLES
from ..progress import Progress
from .reduced import Reduced, require
from .walk import Decoder, Walk, blocks_of, layer_parameters, reading


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Return what truncates every matrix of the blocks to the same share of its parameters.

    Of an `(m, n)` matrix `⌊r·m·n / (m + n)⌋` ranks stay, `r` the share of all matrices that stays. Inputs are those of
    the dense model. What a family fuses is taken apart.
    """

    @torch.no_grad()
    def at(sparsity: float) -> Reduced:
        walk, model = Walk(dense, windows), copy.deepcopy(dense)
        architecture, total = walk.architecture, sum(layer_parameters(dense))
        layouts, shapes = _layouts(walk)
        held = sum(shape.numel() for shape in shapes)
        stays = 1 - sparsity * total / held
        removed = held - sum(_rank(shape, stays) * sum(shape) for shape in shapes)
        require("svd-llm", removed, sparsity, total)
        for index, (block, target, layout) in enumerate(zip(walk.layers, blocks_of(model), layouts, strict=True)):
            progress("compress", index, len(layouts))
            modules = architecture.linears(block)
            moments: dict[Any, Tensor] = {}

            def see(number: int, rows: Tensor, moments: dict[Any, Tensor] = moments, modules: Any = modules) -> None:
                rows, module = rows.float(), modules[number]
                own = (rows.mT @ rows).double()
                moments[module] = own + moments[module] if module in moments else own

            with reading(modules, see):
                walk.advance(index)

            def cut(part: Affine, module: Any, moments: dict[Any, Tensor] = moments) -> Affine:
                return Affine(truncated(part.weight, moments[module], _rank(part.weight.shape, stays)), part.bias)

            weights = layout.read(target)
            assert weights.down is not None
            heads = {role: cut(getattr(weights, role), architecture.projection(block, role)) for role in ROLES}
            ups = tuple(cut(up, module) for up, (module, _rows) in zip(weights.ups, layout.ups(block), strict=True))
            down = cut(weights.down, architecture.projection(block, "down"))
            layout.write(target, replace(weights, **heads, ups=ups, down=down))
        return Reduced(model, removed, removed / total)

    return at


def most(dense: PreTrainedModel) -> int:
    """Return the parameters that go if one rank stays of every matrix."""
    return sum(shape.numel() - sum(shape) for shape in _layouts(Decoder(dense))[1])


def _layouts(decoder: Decoder) -> tuple[list[Layout], list[torch.Size]]:
    """Return where each block has its matrices, and the shapes of all of them."""
    architecture, dims, blocks = decoder.architecture, decoder.dims, decoder.layers
    layouts = [Layout.dense(architecture, architecture.block_dims(block, dims)) for block in blocks]
    pairs = zip(layouts, blocks, strict=True)
    return layouts, [part.weight.shape for layout, block in pairs for part in _parts(layout.read(block))]


def _parts(weights: BlockWeights) -> list[Affine]:
    """Return every matrix of a block that is cut."""
    assert weights.down is not None
    return [*(getattr(weights, role) for role in ROLES), *weights.ups, weights.down]


def _rank(shape: torch.Size, stays: float) -> int:
    """Return the most ranks of a matrix whose two factors hold no more than a share of it, at least one."""
    return max(1, int(stays * shape.numel() / sum(shape)))


def truncated(weight: Tensor, moment: Tensor, rank: int) -> Tensor:
    """Return the matrix of a rank that is nearest in its outputs: `argmin_V tr((W − V) C (W − V)ᵀ)`, `(m, n)` float64.

    With `C = S Sᵀ`, the SVD `W S = U Σ Vᵀ` cut to `U_k Σ_k V_kᵀ S⁻¹` is `U_k U_kᵀ W` (their theorem 3.2), and `U` are
    the eigenvectors of `W C Wᵀ`: no factor of `C` is needed, which may be singular. Cost: about `9m³`.

    Args:
        weight: `(m, n)`.
        moment: `(n, n)` second moment `C` of its inputs, float64.
        rank: to keep.
    """
    weight = weight.double()
    basis = psd.leading(weight @ moment @ weight.mT, min(rank, len(weight)))
    return basis @ (basis.mT @ weight)
