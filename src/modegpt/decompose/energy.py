"""Type I with another selection: keep the neurons whose output is largest (`nystrom.keep_highest`).

The paper's leverage score (`nystrom.py`) asks how well the other neurons predict a neuron's activation, and ignores
what the down projection makes of it. `C_ii ‖W_D[:,i]‖²` is the energy of what the neuron adds to the residual stream.
"""

from torch import Tensor


def energy_scores(moment: Tensor, down: Tensor) -> Tensor:
    """Return `C_ii ‖W_D[:,i]‖² = Σ_t ‖w_i z_ti‖²` of every neuron, `(d_int,)`.

    The set of the highest does not minimise what a refit leaves on the calibration text (`nystrom.refit`): backward
    elimination finds sets that leave less. It generalises: a diagonal score has nothing to overfit.

    Args:
        moment: `(d_int, d_int)` second moment `C = Σ z zᵀ` of the down projection's input, float64.
        down: `(d_model, d_int)` down projection, float64.
    """
    return moment.diagonal() * down.square().sum(0)
