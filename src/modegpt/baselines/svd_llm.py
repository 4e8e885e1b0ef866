"""SVD-LLM (Wang et al. 2025, arXiv:2403.07378): every matrix becomes two factors, by an SVD in whitened inputs.

The variant without fine-tuning, their SVD-LLM (W).
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..architectures.access import affine
from ..decompose.psd import symmetrize
from ..run import Progress
from .reduced import Reduced
from .walk import Walk, blocks_of, layer_parameters, reading, second_moment


def start(dense: PreTrainedModel, windows: Tensor, progress: Progress) -> Callable[[float], Reduced]:
    """Return what truncates every matrix of the blocks to the same share of its parameters.

    Of an `(m, n)` matrix `⌊r·m·n / (m + n)⌋` ranks stay, `r` the share of all matrices that stays. Inputs are those of
    the dense model.
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
            for number, module in enumerate(walk.architecture.linears(targets[index])):
                weight = affine(module).weight
                rank = int(stays * weight.numel() / sum(weight.shape))
                weight.copy_(truncated(weight, moments[number], rank))
                removed += weight.numel() - rank * sum(weight.shape)
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
