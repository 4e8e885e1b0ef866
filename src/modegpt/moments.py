"""Streaming second moments of one decoder block, taken by hooks on its linear layers.

Products are float32, or as exact (`exact_products`), and are added into float64, so many batches lose nothing to the
order of summation. Which moments are taken is up to the solvers: each names those it reads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Architecture, Dimensions
from .architectures.access import HEADS, Layout
from .decompose.psd import all_finite
from .errors import NumericalError
from .observing.attention_logits import record_logits
from .observing.experts import Routed, watched
from .sums.exact_products import left_factor, product, right_factors, weighted
from .sums.token_weights import weighed_by_norm
from .sums.triangle import add_lower, fill_upper

SHAPES: dict[str, Callable[[Dimensions], tuple[int, ...]]] = {
    "mlp": lambda d: (d.d_int, d.d_int),
    "experts": lambda d: (d.n_experts, d.d_int, d.d_int),
    "mlp_sum": lambda d: (d.d_int,),
    "mlp_energy": lambda d: (d.d_int,),
    "mlp_target": lambda d: (d.d_int, d.d_model),
    "gate": lambda d: (d.d_int, d.d_int),
    "fisher": lambda d: (3, d.d_int),
    "target_sum": lambda d: (d.d_model,),
    "target_energy": lambda d: (),
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
have to put out for the block's output to be the dense model's, or, where a norm follows it, what the dense one does put
out. Over all tokens, each times its weight: `mlp = Σ z zᵀ`, `mlp_sum = Σ z`, `mlp_target = Σ z yᵀ`, `target_sum = Σ y`,
`target_energy = Σ ‖y‖²`, over all heads `context = Σ u uᵀ`, `context_sum = Σ u`, and of each expert, over the tokens
sent to it, with its shares `g` in them, `experts = Σ g² z zᵀ`. Over all tokens alike, by head: `query = Σ q²`,
`key = Σ k²`, `query_moment = Σ q qᵀ`, `key_moment = Σ k kᵀ`, `key_sum = Σ k`, `value = Σ v vᵀ`; and `logits`, the
covariance of the coordinates' shares in the attention logits (`decompose.logits`). Of a gated MLP, `gate = Σ a aᵀ` over
every `GATES_EVERY`-th of the tokens, with `z = a ∘ up(x)`. Where only every so manieth token is counted,
`mlp_energy = Σ z²` is still over all of them. What the logits feel of neurons, `fisher`, is added by
`FisherProbe.record`."""

GATES_EVERY = 4
"""The moment of the gates tells which of them open together: a few thousand tokens are enough (docs/log.md)."""

ENERGY_ROWS = {"cpu": 128, "cuda": 8192}
"""Tokens whose activations are squared at once, by device type: as many as a processor's cache holds."""

SYMMETRIC = ("mlp", "experts", "context", "gate")
"""The large second moments: their lower triangles alone are summed."""

WEIGHTED = ("mlp", "experts", "context", "gate")
"""The sources whose tokens have weights: those that a refit reads. Query-key measures every window's logits alike."""

MEANINGS = {
    "mlp": "MLP activations",
    "experts": "experts' activations",
    "target": "hidden states",
    "gate": "gates' activations",
    "fisher": "gradients of the logits",
    "context": "contexts",
    "logits": "attention logits",
}


@dataclass
class BlockMoments:
    """The sums over calibration tokens from which a block is decomposed; unnormalised, float64 but for the gates'."""

    sums: dict[str, Tensor]
    """By the names of `SHAPES`. Of those in `SYMMETRIC`, what stands above the diagonal is of no use: see `[]`."""
    n_tokens: float = field(default=0)
    """What the weights of all tokens sum to."""
    every: int = 1
    """Of the tokens of a batch, every so manieth is counted, but all in `mlp_energy`."""
    places: Tensor | None = field(default=None, repr=False)
    """Places of the tokens that count in the batch that comes next; None for every so manieth from its first one."""
    gate_places: Tensor | None = field(default=None, repr=False)
    """Places among these of the tokens whose gates count; None for every `GATES_EVERY`-th."""
    roots: Tensor | None = field(default=None, repr=False)
    """`(counted, 1)` square roots of the weights of those that count; None where all count alike."""
    weights: Tensor | None = field(default=None, repr=False)
    """`(tokens,)` weights of all tokens that come next; None where all count alike."""
    _mlp_input: Tensor | None = field(default=None, repr=False)
    _half: set[str] = field(default_factory=set, repr=False)
    """The sums whose upper triangles do not hold what their lower ones do."""

    @classmethod
    def zeros(
        cls, dims: Dimensions, names: Iterable[str], device: torch.device | str = "cpu", every: int = 1
    ) -> "BlockMoments":
        """Return the named moments of no tokens."""
        shapes = {name: SHAPES[name](dims) for name in names}
        kinds = {name: torch.float32 if name == "gate" else torch.float64 for name in names}
        sums = {name: torch.zeros(shape, dtype=kinds[name], device=device) for name, shape in shapes.items()}
        return cls(sums, every=every)

    def __getitem__(self, name: str) -> Tensor:
        """Return a sum, whole."""
        total = self.sums[name]
        if name in self._half:
            for square in total if total.ndim == 3 else [total]:
                fill_upper(square)
            self._half.remove(name)
        return total

    def mean(self, name: str) -> Tensor:
        """Return the mean of some states whose sum was taken; 0 where no token has any weight."""
        return self.sums[f"{name}_sum"] / (self.n_tokens or 1.0)

    def expert(self, number: int) -> "BlockMoments":
        """Return those of one expert, as of an MLP."""
        return BlockMoments({"mlp": self["experts"][number]}, self.n_tokens)

    def _add_square(self, name: str, left: Tensor, roots: Tensor | None) -> None:
        add_lower(self.sums[name], left, roots)
        self._half.add(name)

    def update(self, source: str, states: Tensor) -> None:
        """Add the states of more tokens to every moment of one source.

        Args:
            source: `mlp`, `query`, `key`, `value` or `context`.
            states: `(..., width)`: what the down projection reads, what a projection gives, heads side by side, or
                what the output projection reads. Cost: about `d_int²` operations a token for `mlp`.
        """
        roots = self.roots if source in WEIGHTED else None
        rows = self.counted(states)
        left = left_factor(rows, roots)
        if source == "mlp" and "mlp_energy" in self.sums:
            self._add_energy(states.flatten(0, -2))
        if source == "mlp" and "mlp_target" in self.sums:
            self._mlp_input = left
        for name in self.sums.keys() & {source, f"{source}_sum", f"{source}_moment"}:
            total = self.sums[name]
            if name in SYMMETRIC:
                self._add_square(name, left, roots)
            elif name.endswith("_sum"):
                total += weighted(rows, roots).sum(0, dtype=torch.float64).view_as(total)
            else:
                heads = left.float().unflatten(-1, (len(total), -1)).transpose(0, 1)
                total += heads.square().sum(1) if total.ndim == 2 else heads.mT @ heads

    def _add_energy(self, rows: Tensor) -> None:
        """Add `Σ w z²` of all `(tokens, d_int)` rows, in parts. On a CPU small ones take a quarter."""
        weights = rows.new_ones(len(rows), dtype=torch.float32) if self.weights is None else self.weights
        size = ENERGY_ROWS[rows.device.type]
        for part, weight in zip(rows.split(size), weights.split(size), strict=True):
            self.sums["mlp_energy"] += weight @ part.float().square()

    def update_gates(self, activations: Tensor, up: Tensor) -> None:
        """Add some tokens' gates `a = z / u`, from `(..., d_int)` `z` and `u`. Cost: `d_int²/4` operations a token."""
        some = slice(None, None, GATES_EVERY) if self.gate_places is None else self.gate_places.to(up.device)
        z, u = (self.counted(states)[some] for states in (activations, up))
        roots = None if self.roots is None else self.roots[some]
        # The gates were numbers of this dtype before they were multiplied.
        a = torch.where(u != 0, z.float() / u.float(), 0).to(u.dtype)
        self._add_square("gate", left_factor(a, roots), roots)

    def update_experts(self, sent: Sequence[Routed]) -> None:
        """Add the tokens of a pass to the moments of the experts they are sent to.

        Cost: `d_int²` operations for each expert of a token.
        """
        for each in sent:
            shares = each.shares.float()
            roots = shares if self.roots is None else self.roots[each.places] * shares
            add_lower(self.sums["experts"][each.number], left_factor(each.activations, roots), roots)
        self._half.add("experts")

    def update_target(self, wanted: Tensor) -> None:
        """Add `(..., d_model)` targets of the tokens whose MLP input was added last. Cost: `2·d_int·d_model` each."""
        assert self._mlp_input is not None
        y = self.counted(wanted)
        self.sums["mlp_target"] += product(self._mlp_input, right_factors(self._mlp_input, y, self.roots))
        if "target_energy" in self.sums:
            energies = y.float().square().sum(1, dtype=torch.float64)
            counts = torch.ones_like(energies) if self.roots is None else self.roots[:, 0].double().square()
            self.sums["target_energy"] += counts @ energies
        if "target_sum" in self.sums:
            self.sums["target_sum"] += weighted(y, self.roots).sum(0, dtype=torch.float64)
        self._mlp_input = None

    def begin(self, batch: int, length: int, offsets: Tensor | None) -> None:
        """Choose the tokens that count in the next `batch` windows of `length` tokens; see `Calibration.offsets`."""
        starts = length * torch.arange(batch) if offsets is None else offsets
        places = (starts[:, None] + torch.arange(length)).flatten()
        counted = (places % self.every == 0).nonzero()[:, 0]
        self.places = counted if self.every > 1 else None
        self.gate_places = (places[counted] % (self.every * GATES_EVERY) == 0).nonzero()[:, 0]

    def counted(self, states: Tensor) -> Tensor:
        """Return the `(tokens, width)` states of those tokens of a batch that count."""
        rows = states.flatten(0, -2)
        return rows[:: self.every] if self.places is None else rows.index_select(0, self.places.to(rows.device))

    def merge(self, other: "BlockMoments") -> None:
        """Add the moments of other tokens of the same block: sums of disjoint batches merge exactly."""
        self.n_tokens += other.n_tokens
        self._half |= other._half
        for name, total in self.sums.items():
            total += other.sums[name]

    def check_finite(self, layer: int) -> None:
        """Raise `NumericalError` naming the layer and the matrix if a sum is NaN or infinite."""
        for name, total in self.sums.items():
            if not all_finite(total):
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
    by_norm: bool = False,
    offsets: Iterable[Tensor] | None = None,
    rms: Sequence[Tensor] | None = None,
) -> Iterator[None]:
    """While the context is open, every forward of a dense `block` adds its tokens to `moments`.

    Where only the MLP's are asked for, the block may already be a compressed one. `weights` are those of
    the tokens of each forward, in turn. With `by_norm` they are divided by the norms of what the block puts out
    (`weighed_by_norm`), so its tokens are added as it ends, by when the last of `rms` is that of this forward (see
    `NormedOutputs`; none where nothing is normed). `offsets` are those of `Calibration`.
    """
    layout = Layout.dense(architecture, architecture.block_dims(block, dims))
    coming = None if weights is None else iter(weights)
    starts = None if offsets is None else iter(offsets)
    sources = {name.split("_")[0] for name in moments.sums}
    with ExitStack() as stack:

        def hook(handle: Any) -> None:
            stack.callback(handle.remove)

        pending: list[Callable[[], None]] = []

        def begin(states: Tensor) -> None:
            weights = None if coming is None else next(coming)
            if by_norm:
                weights = weighed_by_norm(weights, states, rms[-1] if rms else None)
            moments.begin(len(states), states.shape[1], None if starts is None else next(starts))
            if weights is None:
                moments.n_tokens += len(moments.counted(states))
                return
            moments.weights = weights.flatten().to(states.device, torch.float32)
            weights = moments.counted(weights[..., None])
            moments.n_tokens += weights.sum().item()
            moments.roots = weights.sqrt().to(states.device, torch.float32)

        def at_start(_module: Any, inputs: Any, named: dict[str, Any]) -> None:
            begin(inputs[0] if inputs else named["hidden_states"])

        def at_end(_module: Any, _inputs: Any, output: Any) -> None:
            begin(output[0] if isinstance(output, tuple) else output)
            while pending:
                pending.pop(0)()

        def add(update: Callable[..., None], *states: Any) -> None:
            if by_norm:
                pending.append(partial(update, *states))
            else:
                update(*states)

        hook(
            block.register_forward_hook(at_end)
            if by_norm
            else block.register_forward_pre_hook(at_start, with_kwargs=True)
        )
        roles = [role for role in HEADS if role in sources]
        for module in dict.fromkeys(architecture.projection(block, role) for role in roles):
            held = [role for role in roles if architecture.projection(block, role) is module]

            def add_heads(_module: Any, _inputs: Any, output: Tensor, held: list[str] = held) -> None:
                for role in held:
                    add(moments.update, role, layout.states(role, output))

            hook(module.register_forward_hook(add_heads))
        for source, role in (("mlp", "down"), ("context", "output")):
            if source in sources:

                def add_inputs(_module: Any, inputs: Any, source: str = source) -> None:
                    add(moments.update, source, inputs[0])

                hook(architecture.projection(block, role).register_forward_pre_hook(add_inputs))
        if "experts" in sources:
            mixture = architecture.mixture(block)
            stack.enter_context(watched(mixture, lambda *seen: add(moments.update_experts, seen[-1])))
        if "gate" in sources:
            up, rows = layout.ups(block)[1]
            seen: list[Tensor] = []
            hook(up.register_forward_hook(lambda _m, _i, output: seen.append(output[..., rows])))
            down = architecture.projection(block, "down")
            hook(down.register_forward_pre_hook(lambda _m, inputs: add(moments.update_gates, inputs[0], seen.pop())))
        if "logits" in sources:
            stack.enter_context(record_logits(block, layout, moments.sums["logits"]))
        yield
