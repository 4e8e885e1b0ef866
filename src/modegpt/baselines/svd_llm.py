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

from ..architectures.access import Affine, Layout, affine
from ..decompose.psd import symmetrize
from ..modeling_modegpt import ROLES
from ..run import Progress
from .reduced import Reduced, unreachable
from .walk import Walk, blocks_of, layer_parameters, reading, second_moment


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Return what truncates every matrix of the blocks to the same share of its parameters.

    Of an `(m, n)` matrix `⌊r·m·n / (m + n)⌋` ranks stay, `r` the share of all matrices that stays. Inputs are those of
    the dense model. What a family fuses is taken apart.
    """

    @torch.no_grad()
    def at(sparsity: float) -> Reduced:
        walk, model = Walk(dense, windows), copy.deepcopy(dense)
        targets = blocks_of(model)
        total = sum(layer_parameters(dense))
        matrices = [affine(module).weight for block in walk.layers for module in walk.architecture.linears(block)]
        held = sum(matrix.numel() for matrix in matrices)
        stays, removed, n_layers = 1 - sparsity * total / held, 0, len(walk.layers)
        for index, block in enumerate(walk.layers):
            progress("compress", index, n_layers)
            modules = walk.architecture.linears(block)
            moments: dict[int, Tensor] = {}

            def see(number: int, rows: Tensor, moments: dict[int, Tensor] = moments) -> None:
                own = second_moment(rows)
                moments[number] = own + moments[number] if number in moments else own

            with reading(modules, see):
                walk.advance(index)
            layout = Layout.dense(walk.architecture, walk.architecture.block_dims(block, walk.dims))
            weights, of_module = layout.read(targets[index]), {modules[n]: moment for n, moment in moments.items()}

            def cut(matrix: Affine, module: Any, of_module: dict[Any, Tensor] = of_module) -> Affine:
                nonlocal removed
                rank = int(stays * matrix.weight.numel() / sum(matrix.weight.shape))
                if rank < 1:
                    raise unreachable("svd-llm", held / total, sparsity)
                removed += matrix.weight.numel() - rank * sum(matrix.weight.shape)
                return Affine(truncated(matrix.weight, of_module[module], rank), matrix.bias)

            assert weights.down is not None
            heads = {role: cut(getattr(weights, role), walk.architecture.projection(block, role)) for role in ROLES}
            ups = tuple(cut(up, module) for up, (module, _rows) in zip(weights.ups, layout.ups(block), strict=True))
            down = cut(weights.down, walk.architecture.projection(block, "down"))
            layout.write(targets[index], replace(weights, **heads, ups=ups, down=down))
        return Reduced(model, removed, removed / total)

    return at


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
    _values, vectors = torch.linalg.eigh(symmetrize(weight @ moment @ weight.mT))
    basis = vectors[:, len(vectors) - min(rank, len(vectors)) :]
    return basis @ (basis.mT @ weight)
