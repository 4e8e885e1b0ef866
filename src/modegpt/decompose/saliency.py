"""Type I with another selection: keep the neurons whose loss the others could make up for least.

The energy of a neuron (`energy.py`) is what is lost if it goes and nothing else changes. The refit makes up for a part
of that: more of it where other neurons tell the same. This counts what the refit leaves.
"""

import torch
from torch import Tensor

from . import psd


def saliencies(moment: Tensor, down: Tensor, ridge: float) -> Tensor:
    """Return `‖w_i‖² / [(C + μ diag C)⁻¹]_ii` of every neuron, `(d_int,)`; 0 for one that is never active.

    It is the loss `min_X tr((X − W)(C + μ diag C)(X − W)ᵀ)` over `X` whose column `i` is zero: that of the ridge refit
    if this neuron alone goes. That is the saliency of Optimal Brain Surgeon (Hassibi and Stork, 1993), for a whole
    column and with a ridge. As `μ → ∞`, the order is that of the energies; as `μ → 0`, with `W` of orthogonal columns
    of one size, that of the leverage scores. Cost: `2 d_int³/3` operations.

    Args:
        moment: `(d_int, d_int)` second moment `C = Σ z zᵀ` of the down projection's input: float64, or float32, as the
            ridge bounds the condition of the scaled matrix by `(d_int + μ)/μ`.
        down: `(d_model, d_int)` down projection `W`, in its dtype.
        ridge: `μ > 0`, relative to each neuron's own energy.
    """
    size = moment.diagonal()
    alive = size > 0
    lower, _jitter = psd.cholesky(moment, torch.where(alive, ridge * size, 1))
    return torch.where(alive, down.square().sum(0) / psd.inverse_diagonal(lower), 0)
