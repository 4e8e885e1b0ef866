"""Scores of how much a block matters, from one pass over the calibration text."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import InputError, NumericalError

OWL_THRESHOLD = 5.0
"""M of OWL: an entry is an outlier above this many times its layer's mean."""


class InfluenceMeter:
    """Block Influence `s = 1 − E cos(x_in, x_out)`, averaged over tokens, by layer and by part of a layer.

    With `parts=2` a layer is scored as attention (`x_in` to `x_mid`, the residual stream after attention) and MLP
    (`x_mid` to `x_out`), the paper's refined version. Everything is float64; `x_in` and `x_out` are those of the
    block, before the final norm.

    The state is `totals`, `(n_layers, parts, 2)` float64: the sum of `1 − cos` and the number of tokens. Totals of
    disjoint tokens add, so processes merge by one all-reduce of it.
    """

    def __init__(self, n_layers: int, parts: int = 1) -> None:
        self.totals = torch.zeros(n_layers, parts, 2, dtype=torch.float64)

    def update(self, layer: int, *states: Tensor, mask: Tensor | None = None) -> None:
        """Add tokens of one layer. Cost: three passes over the states.

        A token whose state is zero has no direction: its cosine counts as 1 where the state stays zero, and as 0
        where only one of the two is zero.

        Args:
            layer: its number.
            states: `(..., d_model)`, one more than there are parts: `x_in, x_out` or `x_in, x_mid, x_out`.
            mask: of the tokens' shape, true where a token counts; without it every token does.

        Raises:
            NumericalError: a state that counts is NaN or infinite; names the layer.
        """
        parts = self.totals.shape[1]
        if len(states) != parts + 1:
            raise InputError(f"{len(states)} states were given; {parts} part(s) of a layer need {parts + 1}")
        self.update_parts(layer, *itertools.pairwise(states), mask=mask)

    def update_parts(self, layer: int, *pairs: tuple[Tensor, Tensor], mask: Tensor | None = None) -> None:
        """Add tokens of one layer whose parts do not follow one another: a pair of states, before and after, for each.

        Arguments and errors otherwise as for `update`.
        """
        for part, pair in enumerate(pairs):
            before, after = ((state.flatten(0, -2) if mask is None else state[mask]).double() for state in pair)
            norms = [torch.linalg.vector_norm(rows, dim=-1) for rows in (before, after)]
            products = norms[0] * norms[1]
            cosine = torch.linalg.vecdot(before, after) / products
            both_zero = (norms[0] == 0) & (norms[1] == 0)
            cosine = torch.where(products == 0, both_zero.to(cosine.dtype), cosine).clamp(-1, 1)
            loss = float((1 - cosine).sum())
            if loss != loss:
                raise NumericalError(f"layer {layer}: NaN or infinity in the hidden states on the calibration text")
            self.totals[layer, part] += torch.tensor([loss, len(cosine)], dtype=torch.float64)

    def merge(self, other: "InfluenceMeter") -> None:
        """Add what another meter saw of other tokens."""
        self.totals += other.totals

    def scores(self) -> Tensor:
        """Return the scores in [0, 2], `(n_layers,)` float64, or `(n_layers, parts)` where there are several.

        Raises:
            InputError: a layer saw no token; names it.
        """
        sums, counts = self.totals.unbind(-1)
        if (counts == 0).any():
            raise InputError(f"layer {int((counts == 0).any(1).nonzero()[0])} was shown no tokens: nothing to score")
        means = sums / counts
        return means[:, 0] if means.shape[1] == 1 else means


@torch.no_grad()
def outlier_ratio(
    weights: Sequence[Tensor], input_norms: Sequence[Tensor], threshold: float = OWL_THRESHOLD, layer: int | None = None
) -> float:
    """Return OWL's share of outliers in a layer (Yin et al. 2023).

    `A_ij = |W_ij|·‖X_j‖₂`; the share of all entries of the layer's matrices with `A_ij > M·mean(A)`, the mean over
    them together. Float32 entries, float64 sums; one matrix is held at a time. A layer of zeros has no outliers.

    Args:
        weights: `(out, in)`, the linear layers of one block.
        input_norms: `(in,)` for each: the norm of every input feature over the calibration tokens, in any common
            scale (the root of the sum or of the mean square), as the ratio does not depend on it.
        threshold: M.
        layer: number, for the message.

    Raises:
        NumericalError: a weight or a norm is NaN or infinite; names the layer.
    """
    count = sum(weight.numel() for weight in weights)
    if not count:
        return 0.0
    mean = sum(float(_metric(w, n).sum(dtype=torch.float64)) for w, n in zip(weights, input_norms, strict=True)) / count
    if not mean < float("inf"):
        where = "" if layer is None else f"layer {layer}: "
        raise NumericalError(f"{where}NaN or infinity in the weights or their inputs on the calibration text")
    bound = threshold * mean
    return sum(int((_metric(w, n) > bound).sum()) for w, n in zip(weights, input_norms, strict=True)) / count


def _metric(weight: Tensor, norms: Tensor) -> Tensor:
    return weight.float().abs() * norms.to(weight.device).float()
