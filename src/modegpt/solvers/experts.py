"""A mixture of experts: each is compressed as an MLP of its own, on the tokens that the router sends it."""

from dataclasses import replace

import torch
from torch import Tensor

from ..architectures import Dimensions
from ..architectures.access import Affine, BlockWeights, Expert
from ..config import CompressionConfig
from ..moments import BlockMoments
from .decision import Decision, Solver


def decide(
    solver: Solver, weights: BlockWeights, dims: Dimensions, moments: BlockMoments, rank: int, config: CompressionConfig
) -> Decision:
    """Compress every expert to `rank` neurons with a solver of the MLP.

    A mixture puts out `y_t = Σ_e g_te W_e z_te`. The router reads the residual stream alone, so its shares `g` stay
    what they are, and an expert's part of the loss is `Σ_t g_te² ‖W_e z_te − Ŵ_e ẑ_te‖²`: that of an MLP with the
    second moment `C_e = Σ_t g_te² z_te z_teᵀ`. That what two experts lose on one token may add up or cancel is left
    out. Biases stay as they are. An expert that no token is sent to is chosen by its weights (`unseen`) and keeps its
    down projection.

    The error is that of all experts together, `(Σ_e ‖lost_e‖² / Σ_e ‖given_e‖²)^½`. Cost: the solver's, for each.
    """
    experts, notes, idle = [], [], []
    lost = given = 0.0
    for number, expert in enumerate(weights.experts):
        own, down = moments.expert(number), expert.down.weight
        energy = ((down.double() @ own["mlp"]) * down.double()).sum().item()
        if not own["mlp"].any():
            idle.append(number)
            own = BlockMoments({"mlp": unseen(expert)})
        alone = replace(weights, ups=expert.ups, down=expert.down, experts=())
        decision = solver.decide(alone, dims, own, rank, config)
        narrow = decision.weights
        # Rounded at once, as it will be written: in float64 those of all experts would be as large as the layer.
        experts.append(Expert(narrow["ups"], Affine(narrow["down"].weight.to(down.dtype), expert.down.bias)))
        notes += [f"expert {number}: {note}" for note in decision.notes]
        given += energy  # none where no token came
        lost += energy * decision.error**2
    if idle:
        notes.append(f"no token of the calibration text is sent to the experts {', '.join(map(str, idle))}")
    error = (lost / given) ** 0.5 if given else 0.0
    return Decision({"experts": tuple(experts)}, error, notes)


def unseen(expert: Expert) -> Tensor:
    """Return `diag(‖g_i‖² ‖u_i‖²)`, `(d_int, d_int)`: an expert's moment as far as its gate and up rows tell it.

    It is what `z_i = (g_iᵀx)(u_iᵀx)` has on its diagonal, up to a factor, for inputs without a direction and a gate of
    no curvature, were the two rows orthogonal. Being diagonal, it moves nothing from one neuron to another. Without a
    gate it is `diag(‖u_i‖²)`.
    """
    lengths = torch.stack([each.weight.double().square().sum(1) for each in expert.ups])
    return torch.diag(lengths.prod(0))
