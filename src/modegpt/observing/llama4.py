"""Llama 4's mixtures, called as those of other families: with tokens, numbers of experts and shares.

The stock classes run all experts on all tokens, on zeros where one is not sent. These are classes of modules that are
there, and functions of none: a function that is bound to a module would keep it, and every copy of it, alive.
"""

from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from .experts import combined, routed


class RoutedExperts(Llama4TextExperts):
    """Experts that run on the tokens that each is sent."""

    def forward(self, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return what they give together, `(tokens, d_model)`; the arguments are those of `routed`."""
        return combined(self, list(routed(self, states, chosen, shares)), states)


class RoutedMoe(Llama4TextMoe):
    """A mixture that calls them."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the stock class does: the output, `(tokens, d_model)`, and the router's logits."""
        states = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(states)  # scores of 0 where a token is not sent
        shares, chosen = scores.topk(self.top_k, dim=-1)
        output = self.shared_expert(states)
        output.add_(self.experts(states, chosen, shares))
        return output, logits


ROUTED = {Llama4TextExperts: RoutedExperts, Llama4TextMoe: RoutedMoe}
