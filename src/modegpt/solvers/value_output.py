"""Value and output: a basis of every value head, and the output projection that reads it."""

from functools import partial

from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import Affine, BlockWeights
from ..config import CompressionConfig
from ..decompose import joint_svd, value_eigenvectors
from ..decompose.context import context_svd, narrowed
from ..moments import BlockMoments
from .bias import centred, shifted_bias
from .decision import Decision, Solver

RIDGE = 0.1
"""λ of the joint refit: on SmolLM2 at 20 % it loses less than 0.01 (docs/log.md)."""


def values(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """The paper's: by the values before attention; joint SVD, or its rule for grouped queries (Algorithm 3)."""
    groups, per_group = dims.n_kv_heads, dims.n_heads // dims.n_kv_heads
    # (d_model, heads·d_head) to one (d_head, per_group·d_model) matrix a group: its heads' blocks side by side.
    blocks = weights.output.weight.double().reshape(dims.d_model, groups, per_group, dims.d_head).permute(1, 3, 2, 0)
    decompose = joint_svd if per_group == 1 else value_eigenvectors
    result = decompose(moments["value"], blocks.flatten(2), rank)
    new_output = result.output.unflatten(2, (per_group, dims.d_model)).permute(3, 0, 2, 1)
    output = Affine(new_output.reshape(dims.d_model, -1), weights.output.bias)
    missing = result.deficiency
    notes = [f"the value moments lack {missing} ranks over all heads"] if missing else []
    return Decision({"value": _narrow(weights.value, result.basis), "output": output}, result.error, notes)


def contexts(
    weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """By the contexts that the output projection reads, all heads refitted together; means go into its bias."""
    output = weights.output.weight.double()
    result = context_svd(centred(moments, "context"), output, dims.n_heads, dims.n_kv_heads, rank, RIDGE)
    keep = partial(_shortened, result.basis)
    bias = shifted_bias(weights.output.bias, moments, "context", output, result.output, keep)
    missing = result.deficiency
    notes = [f"the kept contexts lack {missing} ranks; a pseudo-inverse was used"] if missing else []
    narrow = {"value": _narrow(weights.value, result.basis), "output": Affine(result.output, bias)}
    return Decision(narrow, result.error, notes)


def _narrow(value: Affine, basis: Tensor) -> Affine:
    """Return `Bᵀ W_V`, and `Bᵀ b_V`, by head."""
    bias = None if value.bias is None else _shortened(basis, value.bias.double())
    return Affine(narrowed(basis, value.weight.double()), bias)


def _shortened(basis: Tensor, vector: Tensor) -> Tensor:
    """Return `Bᵀ x` of a vector of all heads, by head."""
    return narrowed(basis, vector[:, None])[:, 0]


SVD = Solver(values, needs=lambda dims, bias: ("value",))
CONTEXT = Solver(contexts, needs=lambda dims, bias: ("context", "context_sum") if bias else ("context",))
