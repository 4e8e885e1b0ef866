"""What every selection by scores must do, whatever the scores."""

import torch
from torch import Tensor

from modegpt.decompose.nystrom import NystromResult, refit


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
