"""What the compressor must know of a model family, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..modeling_modegpt import ROLES
from .dimensions import Dimensions


@dataclass(frozen=True)
class Architecture:
    """One family: where its projections are and how its heads are laid out.

    Paths are those of transformers' modules. `describe` gives the part that a checkpoint carries. What a config can
    switch is written as the config's name of the switch; `resolve` replaces it by what the config says.
    """

    model_type: str
    """`config.model_type` of the dense model."""
    name: str
    """Prefix of the stock class names: `Llama` for `LlamaConfig` and `LlamaModel`."""
    causal_lm: str = ""
    """The stock class with a language head; `<name>ForCausalLM` where empty."""
    layers: str = "layers"
    """The list of decoder blocks, from the base model."""
    attention: str = "self_attn"
    """The attention module, from the block."""
    whole_attention: bool = False
    """Whether attention stays as it is, of whatever kind it is: MLPs alone have a rank. A block may then be without."""
    mixers: tuple[str, ...] = ()
    """What mixes tokens in place of attention or beside it (linear attention, convolutions), from the block: modules
    that some blocks have, that put out a tensor, and that stay whole."""
    upcast_mixers: bool = False
    """Whether these compute in float32 whatever the states' dtype."""
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    """The projections, from the attention module. One name for several: they are fused, one after another."""
    by_group: bool = False
    """Whether a fused projection alternates by key head instead: its queries, its key, its value."""
    fused_parts: int = 0
    """In how many parts, each with its share of the heads, a fused projection comes instead; 0 for none of that."""
    fused_order: str = "query key value"
    """What stands before what in a fused projection, or in a part of it."""
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Every projection into the MLP's intermediate space, from the block; a fused one is named once for each part. Of
    two, the first opens the gate and the second is multiplied by it."""
    down: str = "mlp.down_proj"
    """The projection out of it. A block may be without an MLP, if its attention stays whole."""
    experts: str = ""
    """The experts of a mixture, from the block, one narrow MLP each, fused as `(experts, 2·d_int, d_model)`
    `gate_up_proj` and `(experts, d_model, d_int)` `down_proj`, or as `fused` says; it empties `up` and `down`. A block
    may be without: its MLP stays whole."""
    gated_experts: bool = True
    """Whether experts have a gate beside the projection up."""
    expert_biases: bool = False
    """Whether the projections of experts have biases."""
    n_experts: str = "num_experts"
    """The config's name for their number."""
    experts_per_token: str = "num_experts_per_tok"
    """The config's name for how many of them a token is sent to."""
    shared_experts: str = ""
    """The config's name for how many experts wide an MLP beside them is, where its width is told so."""
    shared_down: str = ""
    """Of an MLP beside the experts that all tokens pass, and that stays whole: the projection out of it, from the
    block."""
    expert_files: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    """What checkpoint files, which hold each expert apart, call the gate, up and down projections of one by its number,
    from the block; the first is empty where there is no gate."""
    query_norm: str = ""
    key_norm: str = ""
    """Norms of queries and keys, from the attention module; a block without such a module has none."""
    norm_input: str = "heads"
    """What these norms take: `heads` (batch, tokens, heads, d_head), `heads first`, or `flat`, all heads as one."""
    rotary_first: bool = False
    """Whether these norms stand behind the rotary embedding."""
    middle: str = "post_attention_layernorm"
    """The module whose input is the residual stream between attention and MLP, from the block."""
    parallel: bool | str = False
    """Whether attention and MLP read the same input, so that there is no such stream; or the config's switch."""
    adds_mlp: bool | str = True
    """Whether a block puts out the residual stream plus what its MLP adds, and no norm of that sum; or the config's
    switch."""
    sum_factor: str = ""
    """A block's buffer of one number by which it multiplies that sum, from the block; empty for none."""
    mlp_norm: str = ""
    """The RMS norm that the MLP's output passes before it is added, from the block; empty for none. That of experts may
    pass it together with that of an MLP beside them."""
    mlp_factor: float | str = 1.0
    """What the MLP's output is multiplied by before it is added, or the config's name for that."""
    kv_heads: int | str = "num_key_value_heads"
    """The config's name for the number of key heads, or the number; 0 where each query head has its own."""
    width: str = "intermediate_size"
    """The config's name for the MLP width; four times the model's where that is unset, or this is empty."""
    caches_all: bool = False
    """Whether the stock attention caches a key and a value for each query head, whatever the number of key heads."""
    rotary: bool = True
    """Whether query and key pass a rotary embedding."""
    rotary_switch: tuple[str, ...] = ()
    """Where only some layers have it: the attention's attributes of which one says that this one has."""
    partial_rotary: bool = False
    """Whether the config can keep the end of each head from it."""
    interleaved: bool = False
    """Whether the pairs are coordinates `2j` and `2j + 1` of a head, and not `j` and `j + r/2`."""
    interleaved_tables: bool = False
    """Whether a pair's cosine and sine are repeated side by side in their tables, too."""
    sines_first: bool = False
    """Whether its tables are sines and then cosines, of each pair once."""
    upcast_rotary: bool = False
    """Whether the embedding is computed in float32 whatever the states' dtype."""
    query_growth: str = ""
    """What the config's `rope_parameters` call the slope with which queries far into a text grow; empty for none."""
    position_bias: str = ""
    """The argument of the attention that holds what ALiBi adds to its scores, by query head and key, unless the mask
    does; empty for none."""
    scale_query: bool = False
    """Whether the query is scaled before the attention, which then scales by 1 (OPT)."""
    scaling: float | str = "scaling"
    """The attention's attribute for the softmax scale, or the scale; by the root of the head dim where it has none."""
    upcast_scores: bool = False
    """Whether the attention computes in float32 whatever the states' dtype."""
    mask_buffer: str = ""
    """The attention's buffer of which keys a query may see beside what the mask says, `(1, 1, tokens, tokens)`; empty
    for none."""
    softcap: str = ""
    """The attention's attribute for the cap of the scores that it hands to the kernel."""
    sinks: str = ""
    """The attention's attribute for the logits of its sinks: one a query head, which every softmax has beside those of
    the keys, and which brings no value; empty for none."""
    dropout: str = "attention_dropout"
    """The attention's attribute for the dropout of its weights, a number or a module; empty for none."""
    output_dropout: str = ""
    """The attention's attribute for the dropout after the output projection, a number or a module; empty for none."""
    adds_attention: bool = False
    """Whether the attention itself puts out the residual stream behind it: its second argument is that before it."""
    attention_outputs: int = 2
    """How much the attention returns: its output and its weights, and in some families more."""
    tuple_output: bool = False
    """Whether a block returns a tuple."""
    token_arguments: tuple[str, ...] = ()
    """Arguments of a block that every token has of its own, beside its hidden state: `(batch, tokens, width)` each."""
    hands_on: bool = False
    """Whether blocks read the keys and values of earlier ones, which these put into a mapping that is an argument."""
    also_cached: tuple[str, ...] = ()
    """Modules of an attention that stays whole whose outputs are cached, too, beside keys and values."""
    start_token: bool = False
    """Whether every window of a text must begin with the tokenizer's `bos` token, without which the model is lost."""
    file_names: tuple[tuple[str, str], ...] = ()
    """Where checkpoint files name tensors otherwise than the modules do: a part of the name, and that in the files. One
    of them may hold for a name, or several in turn."""
    joined_files: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """What files hold in parts that stand one after another in a tensor: a part of its name, and those in the files."""
    buffers: tuple[str, ...] = ()
    """Tensors of a block in the files that are no parameters, from the block."""
    float32: tuple[str, ...] = ()
    """Ends of the names of a block's tensors that stay in float32 whatever the model's dtype."""
    notes: str = ""
    """One line for the table of supported architectures."""

    def __post_init__(self) -> None:
        """Leave no MLP where there are experts."""
        if self.experts:
            object.__setattr__(self, "up", ())
            object.__setattr__(self, "down", "")

    @property
    def causal_class(self) -> str:
        """Name of the stock class with a language head."""
        return self.causal_lm or f"{self.name}ForCausalLM"

    @property
    def roles(self) -> tuple[str, ...]:
        """The projections of the attention that have a rank: all four, or none of one that stays whole."""
        return () if self.whole_attention else ROLES

    @property
    def makes_up(self) -> bool:
        """Whether MLPs can be refitted to the dense model: of a resolved architecture.

        To its stream, or to what the norm that follows them reads there.
        """
        if not self.experts:
            return bool(self.adds_mlp)
        return bool(self.mlp_norm) or (bool(self.adds_mlp) and not self.sum_factor)

    def resolve(self, config: Any) -> "Architecture":
        """Return what holds for the models of one config.

        Raises:
            InputError: the config asks for what is not supported; the message says why.
        """

        def said(field: Any) -> Any:
            return getattr(config, field) if isinstance(field, str) else field

        rope = getattr(config, "rope_parameters", None) or {}
        for key in (self.query_growth, "original_max_position_embeddings") if self.query_growth else ():
            if key not in rope:
                raise InputError(f"the config's rope_parameters lack '{key}', by which queries grow: mend the config")

        return replace(
            self,
            parallel=bool(said(self.parallel)),
            adds_mlp=bool(said(self.adds_mlp)),
            mlp_factor=float(said(self.mlp_factor)),
        )

    def dimensions(self, config: Any) -> Dimensions:
        """Read the sizes from a dense model's config."""
        n_heads = config.num_attention_heads
        d_head, n_kv_heads, rotary_dim = config.hidden_size // n_heads, n_heads, 0
        if not self.whole_attention:  # else heads may differ from layer to layer, and nothing asks
            d_head = getattr(config, "head_dim", None) or d_head
            n_kv_heads = getattr(config, self.kv_heads, None) if isinstance(self.kv_heads, str) else self.kv_heads
            rotary_dim = d_head if self.rotary else 0
        rope = config.rope_parameters if self.partial_rotary else {}
        # Proportional tables span the whole head, with angles of 0 behind the part that turns.
        if rope.get("rope_type") != "proportional" and "partial_rotary_factor" in rope:
            turned = int(d_head * rope["partial_rotary_factor"])
            rotary_dim = turned + turned % 2  # half a pair is a whole one in transformers' tables
        return Dimensions(
            n_layers=config.num_hidden_layers,
            d_model=config.hidden_size,
            d_int=self.mlp_width(config),
            d_head=d_head,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads or n_heads,
            rotary_dim=rotary_dim,
            n_experts=getattr(config, self.n_experts) if self.experts else 0,
        )

    def mlp_width(self, config: Any) -> int:
        """Return the width of a dense model's MLPs."""
        return (self.width and getattr(config, self.width)) or 4 * config.hidden_size

    def layer_width(self, config: Any, index: int) -> int:
        """Return the width of the MLP, or of each expert, of one of a dense model's layers."""
        return self.mlp_width(config)

    def beside_states(self, config: Any) -> tuple[int, int]:
        """Return how many numbers blocks read of a token beside its hidden state.

        Those of all `token_arguments` of all blocks, which do not change, and the keys and values that are handed on.
        """
        return 0, 0

    def set_mlp_width(self, config: Any, width: int) -> None:
        """Give a dense model's config another width of its MLPs: what `mlp_width` returns of it from then on.

        An MLP beside experts whose width follows from theirs stays as wide, or becomes wider by less than one expert.
        Where the config has no name for the width, it stays what it is.
        """
        if self.shared_experts:
            shared = self.mlp_width(config) * (getattr(config, self.shared_experts) or 0)
            setattr(config, self.shared_experts, -(-shared // width))
        if self.width:
            setattr(config, self.width, width)

    def describe(self) -> dict[str, Any]:
        """Return what the shipped modeling file needs to rebuild the family, for `config.json`."""
        data = {name: getattr(self, name) for name in DESCRIBED}
        for field in fields(self):
            if field.name in DESCRIBED_IF_SET and getattr(self, field.name) != field.default:
                data[field.name] = getattr(self, field.name)
        return {**data, "up": list(self.up)}

    def projection(self, block: nn.Module, role: str) -> Any:
        """Return the module that holds `query`, `key`, `value`, `output` or `down` of a block, fused or not."""
        if role == "down":
            return block.get_submodule(self.down)
        return block.get_submodule(f"{self.attention}.{getattr(self, role)}")

    def linears(self, block: nn.Module) -> list[Any]:
        """Return every linear module of a block that has a rank, each once."""
        roles = [self.projection(block, role) for role in self.roles]
        paths = (self.down, *self.up) if self.has_mlp(block) else ()
        return list(dict.fromkeys(roles + [block.get_submodule(path) for path in paths]))

    def stored_dtype(self, name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a block's tensor in a model of `dtype`; `own` is what it is in now."""
        if not own.is_floating_point:
            return own
        return torch.float32 if name.endswith(self.float32) else dtype

    def mixture(self, block: nn.Module) -> Any:
        """Return the module of a block's experts; None where it has none."""
        return _inside(block, self.experts)

    def mlp_outputs(self, block: nn.Module) -> list[str]:
        """Return what puts out a block's MLP, or its experts and the MLP beside them: the paths of those it has."""
        paths = (self.down, self.experts, self.shared_down)
        return [path for path in paths if _inside(block, path) is not None]

    def has_mlp(self, block: nn.Module) -> bool:
        """Whether a block has an MLP that is no mixture of experts and that has a rank.

        Where attention is compressed every block has one, so that a wrong path is an error and not a block without.
        """
        return bool(self.down) and (not self.whole_attention or _inside(block, self.down) is not None)

    def cuts_mlp(self, block: nn.Module) -> bool:
        """Whether a block's MLP, or its experts, have a rank: not an MLP among layers of experts."""
        return self.has_mlp(block) or self.mixture(block) is not None

    def unranked(self, cuts_mlp: bool) -> frozenset[str]:
        """Return the modules that have no rank in a block: its MLP unless it has one, attention that stays as it is."""
        return frozenset(({"qk", "vo"} if self.whole_attention else set()) | (set() if cuts_mlp else {"mlp"}))

    def whole_mlp(self, block: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of an MLP among layers of experts, which has no rank; none where a block has no MLP."""
        module = _inside(block, self.experts.rpartition(".")[0])
        mixing = [mixer for mixer, _as_pair in self.mixing(block)]
        return [] if module is None or module in mixing else list(module.parameters())

    def any_mlp(self, block: nn.Module) -> bool:
        """Whether a block has an MLP or experts, with a rank or without."""
        return bool(self.mlp_outputs(block) or self.whole_mlp(block))

    def narrowed(self, block: nn.Module) -> list[Any]:
        """Return every module of a block whose weights have a rank, each once: linear ones, and experts."""
        mixture = self.mixture(block)
        return self.linears(block) + ([] if mixture is None else [mixture])

    def rank_costs(self, dims: Dimensions, has_bias: Callable[[str], bool]) -> dict[str, int]:
        """Return the parameters that one unit of rank holds, by module; 0 for what has no rank.

        Args:
            dims: the dense model's sizes.
            has_bias: tells of a linear module, by its path from the block, whether it has a bias.
        """

        def inputs(path: str) -> int:
            return dims.d_model + has_bias(path)

        mlp = sum(inputs(path) for path in self.up) + (dims.d_model if self.down else 0)
        if self.experts:
            n_ups = 1 + self.gated_experts
            mlp = dims.n_experts * ((n_ups + 1) * dims.d_model + n_ups * self.expert_biases)
        if self.whole_attention:
            return {"mlp": mlp, "qk": 0, "vo": 0}
        query, key, value = (f"{self.attention}.{name}" for name in (self.query, self.key, self.value))
        return {
            "mlp": mlp,
            "qk": dims.n_heads * inputs(query) + dims.n_kv_heads * inputs(key),
            "vo": dims.n_kv_heads * inputs(value) + dims.n_heads * dims.d_model,
        }

    def biases_of(self, block: nn.Module) -> Callable[[str], bool]:
        """Return what tells of a linear module, by its path from the block, whether it has a bias."""
        missing = () if self.cuts_mlp(block) else (self.down, *self.up)
        return lambda path: path not in missing and block.get_submodule(path).bias is not None

    def block_dims(self, block: nn.Module, dims: Dimensions) -> Dimensions:
        """Return the sizes of one dense block, or of that which a compressed one came from.

        They are those of the model, less a rotary part that it lacks.
        """
        attention = block.get_submodule(self.attention) if self.rotary_switch else None
        if attention is None or any(getattr(attention, name) for name in self.rotary_switch):
            return dims
        return replace(dims, rotary_dim=0)

    def cached(self, dims: Dimensions, ranks: dict[str, int], outputs: Mapping[str, int]) -> int:
        """Return how many numbers a token puts into the key-value cache in one compressed block.

        Args:
            dims: the dense model's sizes.
            ranks: of the block.
            outputs: of the linear modules of the block that there are, by their paths.
        """
        if self.whole_attention:
            names = (self.query, self.key, self.value)  # a fused one has parts of one size
            keys = sum(outputs.get(f"{self.attention}.{name}", 0) // names.count(name) for name in names[1:])
            return keys + sum(outputs.get(f"{self.attention}.{name}", 0) for name in self.also_cached)
        return dims.n_kv_heads * (ranks["qk"] + ranks["vo"])

    @property
    def reads_back(self) -> str:
        """What later blocks read of earlier ones beside the stream, so that none can be left out; empty for nothing."""
        return "keys and values of" if self.hands_on else ""

    def block_arguments(self, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a block is called with where blocks run one by one; `given` is what the model calls it with."""
        return dict(given)

    def dense_cached(self, dims: Dimensions, outputs: Mapping[str, int]) -> int:
        """Return the same of the dense block."""
        numbers = self.cached(dims, dims.full_ranks, outputs)
        return numbers * dims.n_heads // dims.n_kv_heads if self.caches_all else numbers

    def mixing(self, block: nn.Module) -> list[tuple[Any, bool]]:
        """Return every module of a block that mixes tokens, and whether it puts out a pair, as attention does."""
        paths = {self.attention: True, **dict.fromkeys(self.mixers, False)}
        return [(module, paths[name]) for name, module in block.named_modules() if name in paths]

    def norms(self, block: nn.Module) -> list[Any]:
        """Return the norms of queries and keys that decide what can be cut of a block."""
        if self.whole_attention:
            return []
        attention = block.get_submodule(self.attention)
        return [getattr(attention, name) for name in (self.query_norm, self.key_norm) if hasattr(attention, name)]

    @torch.no_grad()
    def put_out(self, block: nn.Module, stream: Tensor, output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return what a block puts out.

        Args:
            block: dense or compressed.
            stream: the residual stream behind its attention, `(batch, tokens, d_model)`.
            output: of its MLP, likewise.
            arguments: what it is called with beside the hidden states.
        """
        norm = self.output_norm(block)
        if norm is not None:
            output = norm(output)
        total = stream + (output if self.mlp_factor == 1 else output * float(self.mlp_factor))
        total = self.behind_mlp(block, total, arguments)
        return total * block.get_buffer(self.sum_factor) if self.sum_factor else total

    def behind_mlp(self, block: nn.Module, total: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return what a block makes of the sum of its stream and of what its MLP adds; arguments as for `put_out`."""
        return total

    @torch.no_grad()
    def lacking(self, block: nn.Module, wanted: Tensor, stream: Tensor) -> Tensor:
        """Return the MLP's output with which a block without a norm behind it puts out what is wanted.

        The stream is that behind its attention, or holds a part of the MLP's output: then that which is lacking.
        """
        if self.sum_factor:
            wanted = wanted / block.get_buffer(self.sum_factor)
        return (wanted - stream) / float(self.mlp_factor)

    def output_norm(self, block: nn.Module) -> Any:
        """Return the norm that the output of a block's MLP passes before it is added; None where there is none."""
        return block.get_submodule(self.mlp_norm) if self.mlp_norm else None

    def middle_module(self, block: nn.Module) -> nn.Module:
        """Return the module whose input is the residual stream between attention and MLP."""
        return block.get_submodule(self.middle)


def _inside(block: nn.Module, path: str) -> Any:
    """Return a module of a block by its path; None where it has none, and for no path."""
    return dict(block.named_modules()).get(path) if path else None


DESCRIBED = ("name", "layers", "attention", "query", "key", "value", "output", "up", "down", "scale_query")
DESCRIBED_IF_SET = (
    "causal_lm",
    "whole_attention",
    "experts",
    "by_group",
    "fused_parts",
    "fused_order",
    "query_norm",
    "key_norm",
    "norm_input",
    "rotary_first",
    "kv_heads",
    "upcast_rotary",
    "sines_first",
    "query_growth",
    "scaling",
    "upcast_scores",
    "mask_buffer",
    "position_bias",
    "adds_attention",
    "sinks",
    "softcap",
    "dropout",
    "output_dropout",
)
"""What the modeling file has a default for."""
