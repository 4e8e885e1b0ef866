"""What every method gives."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import InputError
from ..progress import Progress


class Reduced(NamedTuple):
    """A model that a method made smaller."""

    model: PreTrainedModel
    """Of the dense model's class; it computes what the smaller model would."""
    removed: int
    """Parameters of the decoder blocks that the smaller model does without, less those that the method adds."""
    share: float
    """The same, as a share of the blocks' parameters."""


def reaches(removed: int, sparsity: float, total: int) -> bool:
    """Whether as many parameters are a share of all: whole numbers are compared, whatever the product rounds to."""
    return removed >= sparsity * total - 0.5


def unreachable(method: str, most: float, sparsity: float) -> InputError:
    """Return what to raise where a method cannot remove as much."""
    return InputError(
        f"{method} can remove {most:.1%} of the blocks of this model, and {100 * sparsity:g}% was asked for; give a "
        "smaller --sparsity, or leave it out of --methods"
    )


def require(method: str, most: int, sparsity: float, total: int) -> None:
    """Raise `InputError` if the most parameters that a method can remove are less than a share of all."""
    if not reaches(most, sparsity, total):
        raise unreachable(method, most / total, sparsity)


Start = Callable[[PreTrainedModel, Tensor, Progress], Callable[[float], Reduced]]
"""A method: looks at a dense model on `(samples, seq_len)` calibration windows, and returns what makes the model of a
sparsity: the one that removes least of all that remove as much. Scores that do not depend on the sparsity are taken
once. The dense model stays as it is. What is returned raises `InputError` for a sparsity that the method cannot reach,
and `NumericalError` for NaN or infinity in the hidden states."""
