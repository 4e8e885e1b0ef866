"""Streaming second moments of one decoder block, taken by hooks on its linear layers.

Products are float32 and are added into float64, so many batches lose nothing to the order of summation. Which moments
are taken is up to the solvers: each names those it reads.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Architecture, Dimensions
from .architectures.access import HEADS, Layout
from .attention_logits import record_logits
from .errors import NumericalError

SHAPES: dict[str, Callable[[Dimensions], tuple[int, ...]]] = {
    "mlp": lambda d: (d.d_int, d.d_int),
    "mlp_sum": lambda d: (d.d_int,),
    "mlp_target": lambda d: (d.d_int, d.d_model),
    "query": lambda d: (d.n_heads, d.d_head),
    "key": lambda d: (d.n_kv_heads, d.d_head),
    "query_moment": lambda d: (d.n_heads, d.d_head, d.d_head),
    "key_moment": lambda d: (d.n_kv_heads, d.d_head, d.d_head),
    "key_sum": lambda d: (d.n_kv_heads, d.d_head),
    "value": lambda d: (d.n_kv_heads, d.d_head, d.d_head),
    "context": lambda d: (d.n_heads * d.d_head, d.n_heads * d.d_head),
    "context_sum": lambda d: (d.n_heads * d.d_head,),
    "logits": lambda d: (d.n_heads, d.d_head, d.d_head),
}
"""The sums that can be taken. `z` is the input of the down projection, `q k v` are the projections' outputs before the
rotary embedding, biases included, `u` is the context, the input of the output projection, and `y` is what the MLP would
have to add for the block's output to be the dense model's. Over all tokens, each times its weight: `mlp = Σ z zᵀ`,
`mlp_sum = Σ z`, `mlp_target = Σ z yᵀ`, and over all heads `context = Σ u uᵀ`, `context_sum = Σ u`. Over all tokens
alike, by head: `query = Σ q²`, `key = Σ k²`, `query_moment = Σ q qᵀ`, `key_moment = Σ k kᵀ`, `key_sum = Σ k`,
`value = Σ v vᵀ`; and `logits`, the covariance of the coordinates' shares in the attention logits
(`decompose.logits`)."""

WEIGHTED = ("mlp", "context")
"""The sources whose tokens have weights: those that a refit reads. Query-key measures every window's logits alike."""

MEANINGS = {"mlp": "MLP activations", "context": "contexts", "logits": "attention logits"}


@dataclass
class BlockMoments:
    """The sums over calibration tokens from which a block is decomposed; all float64, unnormalised."""

    sums: dict[str, Tensor]
    """By the names of `SHAPES`."""
    n_tokens: int = field(default=0)
    """What the weights of all tokens sum to."""
    roots: Tensor | None = field(default=None, repr=False)
    """`(tokens, 1)` square roots of the weights of the tokens that come next; None where all count alike."""
    _mlp_input: Tensor | None = field(default=None, repr=False)

    @classmethod
    def zeros(cls, dims: Dimensions, names: Iterable[str], device: torch.device | str = "cpu") -> "BlockMoments":
        """Return the named moments of no tokens."""
        return cls({name: torch.zeros(SHAPES[name](dims), dtype=torch.float64, device=device) for name in names})

    def __getitem__(self, name: str) -> Tensor:
        """Return a sum."""
        return self.sums[name]

    def update(self, source: str, states: Tensor) -> None:
        """Add the states of more tokens to every moment of one source.

        Args:
            source: `mlp`, `query`, `key`, `value` or `context`.
            states: `(..., width)`: what the down projection reads, what a projection gives, heads side by side, or
                what the output projection reads. Cost: `2·d_int²` operations a token for `mlp`.
        """
        x = states.flatten(0, -2).float()
        if self.roots is not None and source in WEIGHTED:
            x = self.roots * x
        if source == "mlp" and "mlp_target" in self.sums:
            self._mlp_input = x
        for name in self.sums.keys() & {source, f"{source}_sum", f"{source}_moment"}:
            total = self.sums[name]
            if name in ("mlp", "context"):
                total += x.mT @ x
            elif name.endswith("_sum"):
                weighted = x if self.roots is None or source not in WEIGHTED else self.roots * x
                total += weighted.sum(0, dtype=torch.float64).view_as(total)
            else:
                heads = x.unflatten(-1, (len(total), -1)).transpose(0, 1)
                total += heads.square().sum(1) if total.ndim == 2 else heads.mT @ heads

    def update_target(self, wanted: Tensor) -> None:
        """Add `(..., d_model)` targets of the tokens whose MLP input was added last. Cost: `2·d_int·d_model` each."""
        assert self._mlp_input is not None
        wanted = wanted.flatten(0, -2).float()
        self.sums["mlp_target"] += self._mlp_input.mT @ (wanted if self.roots is None else self.roots * wanted)
        self._mlp_input = None

    def merge(self, other: "BlockMoments") -> None:
        """Add the moments of other tokens of the same block: sums of disjoint batches merge exactly."""
        self.n_tokens += other.n_tokens
        for name, total in self.sums.items():
            total += other.sums[name]

    def check_finite(self, layer: int) -> None:
        """Raise `NumericalError` naming the layer and the matrix if a sum is NaN or infinite."""
        for name, total in self.sums.items():
            if not torch.isfinite(total.sum()):
                source = name.split("_")[0]
                meaning = MEANINGS.get(source, f"{source} states")
                raise NumericalError(f"layer {layer}: NaN or infinity in the {meaning} on the calibration text")


@contextmanager
def record_moments(
    block: nn.Module,
    architecture: Architecture,
    dims: Dimensions,
    moments: BlockMoments,
    weights: Iterable[Tensor] | None = None,
) -> Iterator[None]:
    """While the context is open, every forward of a dense `block` adds its tokens to `moments`.

    Where only the MLP's are asked for, the block's attention may already be a compressed one. `weights` are those of
    the tokens of each forward, in turn.
    """
    layout = Layout.dense(architecture, dims)
    coming = None if weights is None else iter(weights)
    sources = {name.split("_")[0] for name in moments.sums}
    with ExitStack() as stack:

        def hook(handle: Any) -> None:
            stack.callback(handle.remove)

        def count(_module: Any, inputs: Any, named: dict[str, Any]) -> None:
            states = inputs[0] if inputs else named["hidden_states"]
            moments.n_tokens += states[..., 0].numel()
            if coming is not None:
                moments.roots = next(coming).reshape(-1, 1).sqrt().to(states.device, torch.float32)

        hook(block.register_forward_pre_hook(count, with_kwargs=True))
        roles = [role for role in HEADS if role in sources]
        for module in dict.fromkeys(architecture.projection(block, role) for role in roles):
            held = [role for role in roles if architecture.projection(block, role) is module]

            def add_heads(_module: Any, _inputs: Any, output: Tensor, held: list[str] = held) -> None:
                for role in held:
                    moments.update(role, layout.states(role, output))

            hook(module.register_forward_hook(add_heads))
        for source, role in (("mlp", "down"), ("context", "output")):
            if source in sources:

                def add_inputs(_module: Any, inputs: Any, source: str = source) -> None:
                    moments.update(source, inputs[0])

                hook(architecture.projection(block, role).register_forward_pre_hook(add_inputs))
        if "logits" in sources:
            stack.enter_context(record_logits(block, layout, moments.sums["logits"]))
        yield
