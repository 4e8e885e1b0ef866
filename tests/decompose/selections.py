"""What every selection by scores must do, whatever the scores."""

import torch
from torch import Tensor

from modegpt.decompose.energy import energy_scores
from modegpt.decompose.nystrom import NystromResult, refit
from modegpt.decompose.saliency import saliencies
from modegpt.solvers.mlp import MARGIN, RIDGE, SALIENCY_RIDGE


def assert_highest_are_kept_and_refitted(
    result: NystromResult, scores: Tensor, moment: Tensor, down: Tensor, rank: int, ridge: float
) -> None:
    dropped = torch.tensor([i not in result.kept for i in range(len(scores))])
    assert result.kept.tolist() == sorted(set(result.kept.tolist()))
    assert len(result.kept) == rank
    assert rank == len(scores) or bool((scores[result.kept].min() >= scores[dropped]).all())
    weight, error, deficiency = refit(moment, down, result.kept, ridge)
    assert torch.equal(result.weight, weight)
    assert (result.error, result.jitter, result.deficiency) == (error, 0, deficiency)


def by_loss(moment: Tensor, down: Tensor, rank: int) -> Tensor:
    """Return the saliencies, or the energies if their highest neurons lose clearly less after the refit."""
    scores = {"saliency": saliencies(moment, down, SALIENCY_RIDGE), "energy": energy_scores(moment, down)}
    losses = {}
    for name, own in scores.items():
        kept = own.argsort(descending=True)[:rank].sort().values
        change = torch.zeros_like(down)
        change[:, kept] = refit(moment, down, kept, RIDGE)[0]
        change -= down
        held_back = moment.diagonal()[kept] * change[:, kept].square().sum(0)
        losses[name] = ((change @ moment) * change).sum() + RIDGE * held_back.sum()
    return scores["energy" if losses["energy"] < MARGIN * losses["saliency"] else "saliency"]
