"""Asymmetric least squares for a down projection: inputs from the compressed model, targets from the dense one."""

import torch
from torch import Tensor

from . import psd
from .nystrom import NystromResult


def asymmetric_refit(moment: Tensor, target: Tensor, energy: Tensor, down: Tensor, ridge: float) -> NystromResult:
    """Refit a down projection to what the MLP should add: `min_X Σ ‖y − X z‖² + λ Σ C_ii ‖X_:i − W_:i‖²`.

    With `C = Σ z zᵀ` and `D = Σ z yᵀ` it is `Xᵀ = Wᵀ + (C + λ diag C)⁻¹ (D − C Wᵀ)`: the ridge holds it back towards
    the weights as they are, not towards zero. At any `λ` the error is at most that of `W`, for which the ridge costs
    nothing. Cost: `rank³/3 + 4·rank²·d_model` operations.

    Args:
        moment: `(rank, rank)` second moment `C` of the neurons that are left.
        target: `(rank, d_model)` cross moment `D`.
        energy: `Σ ‖y‖²`, a scalar.
        down: `(d_model, rank)` their columns of the down projection, `W`. All in one dtype but the energy: float64, or
            float32, where an error below 1e-3 is not told from rounding.
        ridge: `λ > 0`, relative to each neuron's own energy.

    Returns:
        All neurons as kept, the new weight, the error `(Σ ‖y − X z‖² / Σ ‖y‖²)^½` and the rank deficiency of `C`.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    psd.require_finite(down, "the down projection")
    change, found = correction(moment, target - moment @ down.mT, ridge)
    new = down.mT + change
    # By the normal equations C X = D − λ diag(C)(X − W): no further product with C.
    image = target - ridge * moment.diagonal()[:, None] * change
    left = energy - 2 * (new * target).sum(dtype=energy.dtype) + (new * image).sum(dtype=energy.dtype)
    error = (left.clamp_min(0) / energy).sqrt().item() if energy > 0 else 0.0
    return NystromResult(torch.arange(len(moment), device=moment.device), new.mT, error, 0.0, len(moment) - found)


def correction(moment: Tensor, cross: Tensor, ridge: float) -> psd.Solution:
    """Solve `min_δ Σ ‖r − δ z‖² + λ Σ C_ii ‖δ_:i‖²`, `δᵀ = (C + λ diag C)⁻¹ Σ z rᵀ`, for what a down projection lacks.

    At any `λ` the residual is at most that of `δ = 0`. Cost: `rank³/3 + 2·rank²·d_model` operations.

    Args:
        moment: `(rank, rank)` second moment `C = Σ z zᵀ`.
        cross: `(rank, d_model)` `Σ z rᵀ`, in its dtype: float64, or float32 for a `λ` that bounds the condition,
            `(rank + λ)/λ`.
        ridge: `λ > 0`.

    Returns:
        `(rank, d_model)` `δᵀ`, and the rank of `C`.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    psd.require_finite(cross, "the cross moment of the target")
    damped = moment.clone()
    damped.diagonal().mul_(1 + ridge)
    return psd.solve(damped, cross)
