"""A gated MLP: what the neurons that go would have written is partly folded into the up rows of those that stay.

A gated MLP adds `Σ_i w_i a_i (u_iᵀ x)` to the residual stream, with `a = σ(gate)`. The refit of the down projection
changes the `w_i`. The `u_i` are as free: beside fixed gates the output is linear in them.
"""

from torch import Tensor

from . import psd


def folded_up(gates: Tensor, up: Tensor, down: Tensor, kept: Tensor, refitted: Tensor, ridge: float) -> Tensor:
    """Return the up rows of the neurons kept, changed to make up for what the refit of the down projection lacks.

    With `V = W − Ŵ` (`Ŵ` zero on what goes) the refit leaves `Σ_i v_i a_i u_iᵀx`. The change `P` of the kept rows that
    minimises `E‖Σ_i v_i a_i u_iᵀx − Σ_S ŵ_j a_j p_jᵀx‖²` solves a system of `rank·d_model` unknowns. If gates and
    inputs were independent, `E[a aᵀ ⊗ x xᵀ] = A ⊗ C`, the moment of the inputs would cancel, and

        (K + μ diag K) P = ((Ŵᵀ V) ∘ A_S:) U,   K = (Ŵᵀ Ŵ) ∘ A_SS.

    They are not, so this is no optimum, and the ridge stands for the line search that it would need (docs/log.md).
    `K` is positive semidefinite (Schur's product theorem). Cost: `rank³/3 + 2·rank²·d_model + 4·rank·d_int·d_model`
    operations.

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
    return up[kept] + psd.solve(system, ((refitted.mT @ lost) * rows) @ up).x
