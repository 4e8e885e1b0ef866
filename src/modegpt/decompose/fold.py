"""A gated MLP: what the neurons that go would have written is partly folded into the up rows of those that stay.

A gated MLP adds `Σ_i w_i a_i (u_iᵀ x)` to the residual stream, with `a = σ(gate)`. The refit of the down projection
changes the `w_i`. The `u_i` are as free: beside fixed gates the output is linear in them.
"""

import torch
from torch import Tensor

from . import psd


def own_share(gates: Tensor, ridge: float) -> Tensor:
    """Return how much of every gate no other gate tells: `κ_i = 1/([A'⁻¹]_ii A'_ii)`, `A' = A + μ diag A`, in [0, 1].

    If gates and inputs were independent, and each up row free to feed any output, `κ_i` of a neuron's energy would be
    lost where it alone goes: the up rows of the others make up for the rest, as `folded_up` lets them in part. So it
    weighs the scores by which neurons are chosen. Of a gate that was never seen open nothing is known, and no other
    tells it: it has 1. Cost: `2 d_int³/3` operations.

    Args:
        gates: `(d_int, d_int)` second moment `A = Σ a aᵀ` of the gates' activations.
        ridge: `μ > 0`, relative to each gate's own energy. It also bounds the condition of the scaled moment, so that
            float32 will do.

    Returns:
        `(d_int,)`, in the dtype of `A`.

    Raises:
        NotPositiveDefiniteError: an entry is not finite.
    """
    psd.require_finite(gates, "the moment of the gates")
    size = gates.diagonal()
    alive = size > 0
    lower, _jitter = psd.cholesky(gates, torch.where(alive, ridge * size, 1))
    return torch.where(alive, 1 / ((1 + ridge) * size * psd.inverse_diagonal(lower)), 1).clamp_max(1)


def folded_up(gates: Tensor, up: Tensor, down: Tensor, kept: Tensor, refitted: Tensor, ridge: float) -> Tensor:
    """Return the up rows of the neurons kept, changed to make up for what the refit of the down projection lacks.

    With `V = W − Ŵ` (`Ŵ` zero on what goes) the refit leaves `Σ_i v_i a_i u_iᵀx`. The change `P` of the kept rows that
    minimises `E‖Σ_i v_i a_i u_iᵀx − Σ_S ŵ_j a_j p_jᵀx‖²` solves a system of `rank·d_model` unknowns. If gates and
    inputs were independent, `E[a aᵀ ⊗ x xᵀ] = A ⊗ C`, the moment of the inputs would cancel, and

        (K + μ diag K) P = ((Ŵᵀ V) ∘ A_S:) U,   K = (Ŵᵀ Ŵ) ∘ A_SS.

    They are not, so this is no optimum, and the ridge stands for the line search that it would need (docs/log.md).
    As it is relative to each gate's own energy, the row of one that was hardly seen open would be changed without
    bound: none is changed by more than its own norm. `K` is positive semidefinite (Schur's product theorem). Cost:
    `rank³/3 + 2·rank²·d_model + 4·rank·d_int·d_model` operations.

    Args:
        gates: `(d_int, d_int)` second moment `A = Σ a aᵀ` of the gates' activations.
        up: `(d_int, d_model)` up projection `U`.
        down: `(d_model, d_int)` down projection `W`.
        kept: `(rank,)` neurons that stay.
        refitted: `(d_model, rank)` their refitted down projection `Ŵ`.
        ridge: `μ > 0`.

    Returns:
        `(rank, d_model)`, in the dtype of the inputs, which must be one.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    psd.require_finite(gates, "the moment of the gates")
    lost = down.clone()
    lost[:, kept] -= refitted
    rows = gates[kept]
    system = (refitted.mT @ refitted) * rows[:, kept]
    system.diagonal().mul_(1 + ridge)
    own, change = up[kept], psd.solve(system, ((refitted.mT @ lost) * rows) @ up).x
    norms = change.norm(dim=1, keepdim=True)
    return own + change * (own.norm(dim=1, keepdim=True) / torch.where(norms > 0, norms, 1)).clamp_max(1)
