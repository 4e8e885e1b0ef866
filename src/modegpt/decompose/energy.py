"""Type I with another selection: keep the neurons whose output is largest, and refit the down projection.

The paper's leverage score (`nystrom.py`) asks how well the other neurons predict a neuron's activation, and ignores
what the down projection makes of it. `C_ii ‖W_D[:,i]‖²` is the energy of what the neuron adds to the residual stream.
"""

from torch import Tensor

from . import psd
from .nystrom import NystromResult, keep_highest


def energy_scores(moment: Tensor, down: Tensor) -> Tensor:
    """Return `C_ii ‖W_D[:,i]‖² = Σ_t ‖w_i z_ti‖²` of every neuron, `(d_int,)`.

    Args:
        moment: `(d_int, d_int)` second moment `C = Σ z zᵀ` of the down projection's input, float64.
        down: `(d_model, d_int)` down projection, float64.
    """
    return moment.diagonal() * down.square().sum(0)


def energy(moment: Tensor, down: Tensor, rank: int, ridge: float = 0.0, heard: Tensor | None = None) -> NystromResult:
    """Compress an MLP to the `rank` neurons of the largest energy, then refit by (ridge) least squares.

    The kept set does not minimise the stated loss on the calibration text: backward elimination finds smaller ones.
    It generalises: a diagonal score has nothing to overfit. Ties are broken by the lower index. Cost: about
    `rank³/3 + 4·d_int·rank·d_model` operations; the paper's scores take another `d_int³`.

    Args:
        moment: `(d_int, d_int)` second moment, symmetric positive semidefinite, float64.
        down: `(d_model, d_int)` weight of the down projection (Hugging Face layout: out, in), float64.
        rank: neurons to keep, `1 ≤ rank ≤ d_int`.
        ridge: `λ` of the refit, relative to each neuron's own energy: `(C_SS + λ diag C_SS)⁻¹`.
        heard: `(d_model, d_int)`, what the scores read in place of `down`: what comes through a norm behind it.

    Raises:
        NotPositiveDefiniteError: an input is not finite.
    """
    psd.require_finite(down, "the down projection")
    psd.require_finite(moment, "the moment of the MLP")
    return keep_highest(moment, down, energy_scores(moment, down if heard is None else heard), rank, ridge)
