"""The experts of a block beside the dense model: refitted to what the block's output lacks of it, group by group."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..architectures.fused import weights_of
from ..decompose import psd
from ..decompose.asymmetric import correction
from ..hidden_states import HiddenStates
from ..observing.experts import Routed, routed, watched
from ..solvers.mlp import TARGET_RIDGE
from ..sums.exact_products import cross_product, left_factor
from ..sums.triangle import add_lower, fill_upper
from .distributed import Team

GROUPS = 8
"""Groups of experts that are refitted one after another. With one group of 8 experts, 5 of them a token, the log
perplexity rises by 0.50 where it does by 0.46 with eight, at 30 % (docs/log.md). Each is a pass over all residuals."""


class ExpertRefit:
    """Refits the down projections of a mixture whose neurons are chosen.

    A token's experts have one target together, `y_t`: what the block's output lacks of the dense model's without them.
    Their weights `W_e` are changed by `δ_e`, a group of experts after another, on the residual that all of them leave,

        r_t = y_t − Σ_e g_te W_e z_te.

    If a token is sent to `m_t` experts of a group, then `‖r − Σ d_e‖² ≤ m_t Σ ‖r/m_t − d_e‖²` for what each adds
    (Jensen), with equality where nothing is added. So each of them minimises its own part of that bound, with a ridge,

        Σ_t w_t m_t ‖r_t/m_t − g_te δ_e z_te‖² + λ Σ_i M_ii ‖δ_e,i‖²,   M = Σ_t w_t m_t g² z zᵀ,

    which is `δ_eᵀ = (M + λ diag M)⁻¹ Σ_t w_t g z rᵀ`, and no group raises `Σ w ‖r‖²` on the calibration tokens. Where
    no token is sent to two experts of a group, it is block coordinate descent on the joint least squares.

    Args:
        experts: the module of a block (`Architecture.experts`), already narrowed, in the dtypes it computes in.
        states: under whose limit of memory inputs and residuals are kept.
        keep: whether what the experts read may be kept for all tokens; else it is computed again from their inputs.
    """

    def __init__(self, experts: Any, states: HiddenStates, keep: bool) -> None:
        """Know of no tokens yet."""
        self._experts = experts
        self.sent: list[list[Routed]] | None = [] if keep else None
        """What the experts read, by batch; None where it is not kept."""
        self._inputs, self._lacking = states.another(), states.another()
        self._routing: list[tuple[Tensor, Tensor]] = []
        self._weights: list[Tensor] = []
        self._given: Tensor | None = None
        self._wanted = torch.zeros((), dtype=torch.float64, device=experts.down_proj.device)

    @contextmanager
    def record(self) -> Iterator[None]:
        """While the context is open, every forward of the block gives a batch; `lacks` must follow each."""

        def keep(states: Tensor, chosen: Tensor, shares: Tensor, sent: list[Routed]) -> None:
            self._routing.append((chosen, shares))
            if self.sent is not None:
                self.sent.append(sent)
            else:
                self._inputs.append(states[None])

        def note(_module: Any, _inputs: Any, output: Tensor) -> None:
            self._given = output

        handle = self._experts.register_forward_hook(note)
        try:
            with watched(self._experts, keep):
                yield
        finally:
            handle.remove()

    def lacks(self, residual: Tensor, weights: Tensor) -> None:
        """Say what the experts of the last batch would still have to add.

        Args:
            residual: `(batch, tokens, d_model)` `r`, float32.
            weights: `(batch, tokens)` `w`, float32.
        """
        assert self._given is not None
        rows = residual.flatten(0, 1)
        self._lacking.append(rows[None])
        self._weights.append(weights.flatten()[:, None])
        wanted = rows + self._given.float().view_as(rows)
        self._wanted += _energy(wanted, self._weights[-1])
        self._given = None

    @torch.no_grad()
    def run(self, team: Team, dtype: torch.dtype) -> float:
        """Refit all experts in place, to weights that are rounded to `dtype`, and return the relative error.

        It is `(Σ w ‖r‖² / Σ w ‖y‖²)^½` over the tokens of all processes. Cost: `n² + 4·n·d_model` operations for each
        expert of a token, with `n` neurons, and where what they read is not kept its gate and up rows twice; a solve
        for each expert. Memory: two streams of hidden states, and the moments of a group.

        Raises:
            NotPositiveDefiniteError: a state is not finite.
        """
        n_experts = len(weights_of(self._experts)[1])
        size = -(-n_experts // GROUPS)
        changes: dict[int, Tensor] = {}
        for start in range(0, n_experts, size):
            group = range(n_experts)[start : start + size]
            moments, crosses = self._measure(group, changes)
            team.sum_(moments)
            team.sum_(crosses)
            changes = {each[0]: self._change(*each, dtype) for each in zip(group, moments, crosses, strict=True)}
        lost = torch.zeros_like(self._wanted)
        for (residual, _sent), weights in zip(self._residuals(changes), self._weights, strict=True):
            lost += _energy(residual, weights)
        lost, wanted = team.sum_(torch.stack((lost, self._wanted))).tolist()
        return (lost / wanted) ** 0.5 if wanted > 0 else 0.0

    def _residuals(
        self, changes: dict[int, Tensor], group: Collection[int] = ()
    ) -> Iterator[tuple[Tensor, list[Routed]]]:
        """Yield, by batch, the residual less what experts have changed, and what those of another group read.

        It is one pass over the residuals for both, as they are wider than what a small expert reads.
        """
        inputs = iter(self._inputs)
        for batch, residual in enumerate(self._lacking.in_place()):
            rows, states = residual[0], next(inputs, None)
            for each in self._read(batch, states, changes):
                more = (each.activations @ changes[each.number].mT).float()
                # By shares of the other sign: `index_add_` with a factor takes four times as long on a CPU.
                rows.index_add_(0, each.places, more * -each.shares.float())
            yield rows, self._read(batch, states, group)

    def _read(self, batch: int, states: Tensor | None, group: Collection[int]) -> list[Routed]:
        """Return what some experts read of a batch, of which `states` are the inputs if that was not kept."""
        if self.sent is not None:
            return [each for each in self.sent[batch] if each.number in group]
        assert states is not None
        chosen, shares = self._routing[batch]
        return list(routed(self._experts, states[0].to(chosen.device), chosen, shares, group)) if group else []

    def _measure(self, group: range, changes: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return, for each expert of a group, `M` and `Σ w g z rᵀ`: `(experts, n, n)` and `(experts, n, d_model)`."""
        _, d_model, width = weights_of(self._experts)[1].shape
        moments = self._wanted.new_zeros(len(group), width, width)
        crosses = self._wanted.new_zeros(len(group), width, d_model)
        batches = zip(self._residuals(changes, group), self._routing, self._weights, strict=True)
        for (residual, sent), (chosen, _shares), weights in batches:
            together = ((chosen >= group.start) & (chosen < group.stop)).sum(1, keepdim=True)
            for each in sent:
                weight, place, shares = weights[each.places], each.number - group.start, each.shares.float()
                roots = (weight * together[each.places]).sqrt() * shares
                add_lower(moments[place], left_factor(each.activations, roots), roots)
                own = residual.index_select(0, each.places)
                crosses[place] += cross_product(each.activations, own, weight * shares)
        for moment in moments:
            fill_upper(moment)
        return moments, crosses

    def _change(self, number: int, moment: Tensor, cross: Tensor, dtype: torch.dtype) -> Tensor:
        """Refit one expert, and return by what its down projection changed."""
        present = weights_of(self._experts)[1][number]
        if not moment.diagonal().any():
            psd.require_finite(moment, "the moment of an expert")
            return torch.zeros_like(present)
        # In float32: the ridge bounds the condition of the scaled moment by n + 1.
        found = correction(moment.float(), cross.float(), TARGET_RIDGE).x.mT
        new = (present.float() + found).to(dtype).to(present.dtype)
        change = new - present
        present.copy_(new)
        return change


def _energy(rows: Tensor, weights: Tensor) -> Tensor:
    """Return `Σ w ‖r‖²`, float64, of float32 `(tokens, d_model)` rows and `(tokens, 1)` weights."""
    return weights[:, 0].double() @ rows.square().sum(1).double()
