"""The compressed model for transformers: a stock decoder whose projections are narrower, layer by layer.

This file is self-contained (torch and transformers only): it is a module of `modegpt` and is also shipped inside every
compressed checkpoint, where `auto_map` names it for `trust_remote_code=True`. It holds no table of families. What it
must know of one (the names of its projections, its rotary layout) stands in the checkpoint's `config.json` under
`modegpt.architecture`, and the stock classes are found by name: `ModegptLlamaForCausalLM` is made from
`transformers.LlamaForCausalLM`.
"""

import functools
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

OLDEST = "5.16"
"""The first transformers that runs this file in all families: before, some weights have other names, or it fails."""

if [int(part) for part in transformers.__version__.split(".")[:2]] < [int(part) for part in OLDEST.split(".")]:
    # Before the imports below, which older ones do not all know.
    raise ImportError(
        f"a modegpt model needs transformers {OLDEST} or newer, and this is {transformers.__version__}: "
        f"pip install --upgrade transformers"
    )

from transformers import Cache, PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

PREFIX = "Modegpt"
MODEL_TYPE_PREFIX = "modegpt_"
FORMAT_VERSION = 1
ROLES = ("query", "key", "value", "output")
ATTENTION_DEFAULTS = {
    "kv_heads": "num_key_value_heads",
    "by_group": False,
    "fused_parts": 0,
    "fused_order": "query key value",
    "query_norm": "",
    "key_norm": "",
    "norm_input": "heads",
    "rotary_first": False,
    "upcast_rotary": False,
    "sines_first": False,
    "query_growth": "",
    "scaling": "scaling",
    "upcast_scores": False,
    "mask_buffer": "",
    "position_bias": "",
    "adds_attention": False,
    "sinks": "",
    "softcap": "",
    "dropout": "attention_dropout",
    "output_dropout": "",
}
"""What holds where the description of the family does not say otherwise."""

# The mixins below stand in front of stock classes, which are found by name at run time: type checkers see their bases.
_ConfigBase, _ModelBase = (PreTrainedConfig, PreTrainedModel) if TYPE_CHECKING else (object, object)


class CompressedAttention:
    """One attention forward for every family, put in front of the stock attention class.

    The head dims of queries/keys and of values may differ from each other and from layer to layer. A query or key
    head is laid out as the first halves of the kept rotary pairs, their second halves, then unrotated coordinates.
    The softmax scale stays that of the dense model. Values and cache are never padded.
    """

    rope_index: Tensor
    config: Any
    layer_idx: int
    training: bool
    _eager: Any
    _names: dict[str, Any]
    _projections: list[tuple[str, Any, Any]]
    _n_heads: int
    _n_kv_heads: int
    _n_parts: int
    _head_dim: int
    _qk_dim: int
    _value_dim: int
    _rope_pairs: int
    _place: int

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are those of the stock attention.

        The cache has three names: `cache` since transformers 5.24, `past_key_values` before, `layer_past` in some
        families. Where the attention puts out the residual stream, too, that stands in place of the cosines and sines.
        """
        names, scaling = self._names, softmax_scale(self, self._names["scaling"], self._head_dim)
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa") and (names["mask_buffer"] or kwargs.get("alibi") is not None):
            raise ValueError(
                f"attention by '{implementation}' leaves out what this model adds to its scores: use 'eager' or 'sdpa'"
            )
        query, key, value = self._project(hidden_states)
        if names["scale_query"]:
            query, scaling = query * scaling, 1.0
        if not names["rotary_first"]:
            query, key = self._normalise(query, "query_norm"), self._normalise(key, "key_norm")
        if self._rope_pairs:
            if names["sines_first"]:
                position_embeddings = cosines_first(self, position_embeddings, kwargs.get("position_ids"))
            assert position_embeddings is not None
            cos, sin = self._tables(*position_embeddings)
            query = self._rotate(query.view(*key.shape[:-1], -1, self._qk_dim), cos, sin).flatten(-3, -2)
            key = self._rotate(key.unsqueeze(-2), cos, sin).squeeze(-2)
        if names["rotary_first"]:
            query, key = self._normalise(query, "query_norm"), self._normalise(key, "key_norm")
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if names["query_growth"]:
            query = query * query_growth(self.config, names["query_growth"], kwargs["position_ids"]).to(query.dtype)

        cache = _only_cache((cache, past_key_values, layer_past), kwargs)
        if cache is not None:
            if not isinstance(cache, Cache):  # pages of a continuous batch: of the dense head dim in every layer
                query, key, value = _pad(query, key, value, self._head_dim)
            key, value = cache.update(key, value, self.layer_idx, kwargs)
        if names["position_bias"]:
            attention_mask = _biased(attention_mask, kwargs.pop(names["position_bias"]), self._n_heads, key.shape[-2])
        if names["mask_buffer"]:
            attention_mask = _seen(attention_mask, getattr(self, names["mask_buffer"]), query, key.shape[-2])
        residual = position_embeddings if names["adds_attention"] else None
        if implementation == "sdpa" and self._copies_the_cache(query, key, value):
            return self._leave(_attend_once(query, key, value, attention_mask, scaling), None, residual)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self._eager)
        if _needs_equal_dims(implementation, query.shape[-2]):
            query, key, value = _pad(query, key, value, _equal_dim(key.shape[-1], value.shape[-1], self._head_dim))
        if names["softcap"]:
            kwargs["softcap"] = getattr(self, names["softcap"])
        if names["sinks"]:
            kwargs["s_aux"] = getattr(self, names["sinks"])
        if names["upcast_scores"]:
            query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        context, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self._dropout if self.training else 0.0,
            scaling=scaling,
            sliding_window=None if implementation == "sdpa" else self._window(),  # there the mask holds it
            **kwargs,
        )
        if context.shape[-1] > self._value_dim:  # padded
            context = context[..., : self._value_dim]
        if names["upcast_scores"]:
            context = context.to(hidden_states.dtype)
        return self._leave(context, weights, residual)

    def _leave(self, context: Tensor, weights: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Pass contexts, `(batch, tokens, heads, dim)`, through the output projection, and add a residual stream."""
        output = getattr(self, self._names["output"])(context.flatten(-2))
        name = self._names["output_dropout"]
        dropout: Any = getattr(self, name) if name else 0.0  # a module, or a share
        if isinstance(dropout, nn.Module):
            output = dropout(output)
        elif dropout:
            output = nn.functional.dropout(output, dropout, self.training)
        return output if residual is None else residual + output, weights

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each `(batch, tokens, heads, dim)`, from fused or separate projections."""
        groups, states = self._n_kv_heads, {}
        for name, roles, widths in self._projections:
            output = getattr(self, name)(hidden_states)
            if len(roles) == 1:
                states[roles[0]] = output
                continue
            if self._n_parts > 1:
                output = output.unflatten(-1, (self._n_parts, -1))
            states |= zip(roles, output.split(widths, dim=-1), strict=True)
        shape = hidden_states.shape[:-1]
        query = states["query"].reshape(*shape, self._n_heads, self._qk_dim)
        return query, states["key"].reshape(*shape, groups, -1), states["value"].reshape(*shape, groups, -1)

    def _normalise(self, states: Tensor, which: str) -> Tensor:
        """Apply the family's norm of queries or keys, if this layer has one; their dims are then the dense ones."""
        name = self._names[which]
        norm = getattr(self, name, None) if name else None
        if norm is None:
            return states
        if self._names["norm_input"] == "flat":
            return norm(states.flatten(-2)).view(states.shape)
        if self._names["norm_input"] == "heads first":
            return norm(states.transpose(1, 2)).transpose(1, 2)
        return norm(states)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so pickle cannot find it by name; the stock class it can.
        return _empty, (compressed_attention_class, type(self).__mro__[2]), self.__dict__

    def _tables(self, cos: Tensor, sin: Tensor, shared: Any = None) -> tuple[Tensor, Tensor]:
        """Return this layer's cosines and signed sines, to broadcast over `(batch, tokens, heads, queries, 2, pairs)`.

        When decoding, `CompressedRotary` has gathered them for all layers at once.
        """
        if shared is not None:
            return shared[self._place]
        # On a CPU some times faster than index_select, which reads an entry at a time on one core.
        index = self.rope_index.flatten().expand(*cos.shape[:-1], -1)
        cos, sin = (table.gather(-1, index).unflatten(-1, self.rope_index.shape) for table in (cos, sin))
        # Both halves in full, so that long prompts are rotated over contiguous memory.
        cos, sin = torch.stack((cos, cos), dim=-2), torch.stack((-sin, sin), dim=-2)
        return cos.unsqueeze(-3), sin.unsqueeze(-3)

    def _copies_the_cache(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether SDPA would do so to decode one token: for dims of keys and values that differ, or a group."""
        if query.shape[-2] != 1 or self.training or self._names["softcap"] or self._names["sinks"]:
            return False
        # With equal dims, only compiled stock code repeats what a group shares.
        unequal = key.shape[-1] != value.shape[-1]
        return unequal or (key.shape[1] != query.shape[1] and torch.compiler.is_compiling())

    def _window(self) -> int | None:
        """The layer's sliding window: its own where the family sets one by layer, else the config's."""
        if not getattr(self, "is_sliding", True):  # EXAONE 4 sets a window in every layer, and passes it in some
            return None
        owner = self if hasattr(self, "sliding_window") else self.config
        kinds = getattr(self.config, "layer_types", None)
        if owner is self.config and kinds and kinds[self.layer_idx] == "full_attention":
            return None  # Qwen 2 with experts sets it in the layers that have one
        return getattr(owner, "sliding_window", None) or None

    def _rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `(batch, tokens, heads, queries, dim)`; each pair is multiplied with its cosine and signed sine."""
        n_rotated = 2 * self._rope_pairs
        turned = states if n_rotated == self._qk_dim else states[..., :n_rotated]
        pairs = turned.view(*turned.shape[:-1], 2, self._rope_pairs)
        if self._names["upcast_rotary"]:
            pairs = pairs.float()
        # Both swap the halves; the one is faster on a single token, the other on prompts.
        swapped = pairs.flip(-2) if states.shape[1] == 1 else pairs.roll(1, -2)
        turned = (pairs * cos).add_(swapped * sin).flatten(-2)  # rounded as stock code rounds
        turned = turned.to(states.dtype)  # some families' tables are float32 whatever the model's dtype
        return turned if n_rotated == self._qk_dim else torch.cat((turned, states[..., n_rotated:]), dim=-1)

    @property
    def _dropout(self) -> float:
        own: Any = getattr(self, self._names["dropout"], 0.0)
        return getattr(own, "p", own)


def softmax_scale(attention: Any, scaling: float | str, head_dim: int) -> float:
    """Return what the scores are multiplied by: itself, an attribute of the attention, or the usual root without it."""
    return getattr(attention, scaling, head_dim**-0.5) if isinstance(scaling, str) else scaling


def cosines_first(attention: Any, tables: Any, positions: Tensor | None) -> Any:
    """Return rotary tables that come with their sines first (GPT-J) in the common order.

    Args:
        attention: holds them itself until transformers 5.23.
        tables: as it gets them, with the views of `CompressedRotary` behind them when one token is decoded; or None.
        positions: `(1 or batch, tokens)`, read where there are no tables.
    """
    sin, cos, *views = attention.embed_positions[positions].chunk(2, dim=-1) if tables is None else tables
    return cos, sin, *views


def query_growth(config: Any, slope: str, positions: Tensor) -> Tensor:
    """Return `1 + β log(1 + ⌊p/L⌋)`, by which queries far into a text grow, `(1 or batch, 1, tokens, 1)`.

    Args:
        config: its `rope_parameters` hold `β`, and the length `L` that the model first knew.
        slope: what they call `β`.
        positions: `(1 or batch, tokens)`.
    """
    rope = config.rope_parameters
    lengths = torch.floor(positions / rope["original_max_position_embeddings"])
    return (1 + rope[slope] * torch.log(1 + lengths))[:, None, :, None]


def _biased(mask: Tensor | None, bias: Tensor, n_heads: int, n_keys: int) -> Tensor:
    """Return a mask that also adds ALiBi's biases to the scores, `(1 or batch, n_heads, 1 or queries, n_keys)`.

    Args:
        mask: as the stock attention gets it; one of booleans (MPT's) says which keys are hidden.
        bias: `(n_heads or batch · n_heads, 1, keys)`, which may begin with those of keys before the first.
        n_heads: query heads.
        n_keys: keys there are.
    """
    bias = bias.view(-1, n_heads, 1, bias.shape[-1])[..., -n_keys:]
    if mask is None:
        return bias
    return bias.masked_fill(mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _seen(mask: Tensor | None, allowed: Tensor, query: Tensor, n_keys: int) -> Tensor:
    """Return an additive mask that also hides what a buffer does not allow the last queries to see of `n_keys` keys."""
    if mask is None:
        mask = query.new_zeros(())
    allowed = allowed[:, :, n_keys - query.shape[-2] : n_keys, :n_keys]
    return mask.masked_fill(~allowed, torch.finfo(query.dtype).min)


def _only_cache(known: tuple[Any, ...], others: dict[str, Any]) -> Any:
    """Return the cache among the arguments that may hold it, or None; refuse one that comes by another name.

    A model that let it pass would go on without it, and write nonsense.
    """
    # Even where one is known: until transformers 5.23 a model makes an empty one beside a cache that it does not know.
    unknown = [name for name, value in others.items() if isinstance(value, Cache)]
    if unknown:
        raise TypeError(
            f"transformers {transformers.__version__} hands the cache over as '{unknown[0]}', which this code does "
            f"not know: upgrade modegpt, or use transformers 5.24"
        )
    return next((cache for cache in known if cache is not None), None)


def _needs_equal_dims(implementation: str, n_queries: int) -> bool:
    """Whether query/key and value dims must agree: always for flash kernels; for SDPA when it is faster.

    With unequal dims SDPA falls to its unfused path, which costs several times more in prefill; when decoding one
    token, padding would copy the cache.
    """
    if implementation == "sdpa":
        return n_queries > 1
    return implementation != "eager"


def _attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attend with one query a head, those of a group side by side against its keys: the cache is read, not copied.

    The softmax is in float32 at least, as in stock attention. Returns contexts, `(batch, 1, heads, value_dim)`.
    """
    batch, groups = key.shape[:2]
    query, key, value = query.reshape(batch * groups, -1, query.shape[-1]), key.flatten(0, 1), value.flatten(0, 1)
    scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scaling)
    if mask is not None:
        scores, mask = scores.unflatten(0, (batch, groups)), mask.flatten(1, 2)  # the latter is by head, or for all
        mask = mask.unflatten(1, (groups, -1) if mask.shape[1] > 1 else (1, 1))
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
        scores = scores.flatten(0, 1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return torch.bmm(weights, value).view(batch, 1, -1, value.shape[-1])


def _as_pairs(cos: Tensor, sin: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """View `(batch, 1, n)` cosines, `(batch, 1, 2, n)` signed sines as `(batch, 1, ..., heads, 1, 1 or 2, pairs)`."""
    return cos.unflatten(-1, shape)[..., None, None, :], sin.unflatten(-1, shape).movedim(2, -2).unsqueeze(-3)


def _one_axis(table: Tensor, sections: list[int]) -> Tensor:
    """Return the table of a text, `(batch, tokens, d_head)`, of one by axes, `(3, batch, tokens, d_head)`.

    So many pairs as `sections` says go by each axis.
    """
    parts = table.split(sections * 2, dim=-1)
    return torch.cat([part[place % 3] for place, part in enumerate(parts)], dim=-1)


class _Buffers(list[dict[str, Any]]):
    """A list that `torch.export` leaves as it is: plain lists and dicts it writes back as copies, full of fakes."""


class CompressedRotary:
    """Mixin in front of a stock rotary embedding: when one token is decoded, gathers for all layers at once."""

    config: Any
    _indices: list[dict[str, Any]]
    """The buffers of each attention, and not the attentions, which would outlive layers that someone drops."""
    _sines_first: bool
    _interleaved: bool
    """Whether the stock tables have each number twice side by side, and those of the language model alone do not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stock tables; for one token, also each layer's views of its own cosines and signed sines.

        The views are those of `CompressedAttention._tables`. Layers of one shape, as uniform ranks make them, get them
        from one call, and a step has that many fewer to wait for.
        """
        tables: Any = super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if tables[0].dim() == 4:  # in older transformers Qwen 2 VL's attention chooses the axis by which a pair turns
            tables = [_one_axis(table, self.config.rope_parameters["mrope_section"]) for table in tables]
        if self._interleaved:
            tables = [table[..., ::2].repeat(1, 1, 2) for table in tables]
        indices = [buffers["rope_index"] for buffers in self._indices]
        # Long prompts would need this memory by layers; and the layers may be spread over devices.
        if tables[0].shape[-2] != 1 or any(index.device != tables[0].device for index in indices):
            return tables
        flat = torch.cat([index.flatten() for index in indices])
        cos, sin = (table.index_select(-1, flat) for table in (tables[::-1] if self._sines_first else tables))
        sin = torch.stack((-sin, sin), dim=-2)
        shape = indices[0].shape
        if all(index.shape == shape for index in indices):
            by_layer = (table.unbind(2) for table in _as_pairs(cos, sin, (len(indices), *shape)))
            return *tables, list(zip(*by_layer, strict=True))
        sizes = [index.numel() for index in indices]
        parts = zip(cos.split(sizes, -1), sin.split(sizes, -1), indices, strict=True)
        return *tables, [_as_pairs(cos, sin, index.shape) for cos, sin, index in parts]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (compressed_rotary_class, type(self).__mro__[2]), self.__dict__


def _equal_dim(key_dim: int, value_dim: int, limit: int) -> int:
    """Return what both are padded to: a multiple of 16 up to `limit`.

    On a CPU the fused kernel takes an eighth longer for 46 or 62 dims than for 48 or 64.
    """
    dim = max(key_dim, value_dim)
    return max(dim, min(dim + -dim % 16, limit))


def _pad(query: Tensor, key: Tensor, value: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Pad all three to `dim` with zeros, which change no logit and no leading dim of a context."""
    return tuple(nn.functional.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in (query, key, value))


class CompressedConfig(_ConfigBase):
    """Mixin in front of a stock config class."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as stock configs do."""
        # PEFT asks for this before it looks up the default modules of a model type: a moment when it is sure to be
        # imported, whichever of it and the model came first.
        share_peft_defaults(self.model_type)
        return super().to_dict()


def share_peft_defaults(model_type: str) -> None:
    """Give a compressed model type what PEFT has for the dense one, if PEFT is imported.

    That is its default target modules, and which targets are parts of its fused experts.
    """
    dense = model_type.removeprefix(MODEL_TYPE_PREFIX)
    constants = sys.modules.get("peft.utils.constants")
    tables = [] if constants is None else vars(constants).items()
    for name, table in tables:
        if name.endswith("_MODULES_MAPPING") and isinstance(table, dict) and dense in table:
            table.setdefault(model_type, table[dense])
    experts = getattr(sys.modules.get("peft.utils.transformers_weight_conversion"), "_MODEL_TO_CONVERSION_PATTERN", {})
    if dense in experts and model_type not in experts:
        from transformers.conversion_mapping import register_checkpoint_conversion_mapping

        # PEFT heeds its table only for types with a list of conversions on loading, be it empty.
        register_checkpoint_conversion_mapping(model_type, [], overwrite=True)
        experts[model_type] = experts[dense]


class CompressedModel(_ModelBase):
    """Mixin in front of a stock model class: builds the stock skeleton, then shrinks its projections."""

    _stock: type
    config_class: Any

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the model that `config.modegpt` describes; inside `from_pretrained` this happens on the meta device."""
        super().__init__(config, *args, **kwargs)
        description, text = config.modegpt, config.get_text_config()  # of a multimodal model its language model's
        check_version(description)
        decoder = language_model(self, description)
        layers, described = decoder_layers(decoder, description["architecture"]), description["layers"]
        if len(layers) > len(described):
            raise ValueError(f"the config asks for {len(layers)} layers, and the checkpoint has {len(described)}")
        if len(layers) < len(described):  # stock models, too, leave out the last ones where they are told to
            config.modegpt = description = {**description, "layers": described[: len(layers)]}
        for block, layer in zip(layers, description["layers"], strict=True):
            shrink_block(block, description["architecture"], layer, text)
        attentions: list[Any] = [module for module in layers.modules() if hasattr(module, "rope_index")]
        rotary: Any = getattr(decoder, "rotary_emb", None)
        if rotary is not None and attentions and not isinstance(rotary, CompressedRotary):
            rotary.__class__ = compressed_rotary_class(type(rotary))
            rotary._indices = _Buffers(attention._buffers for attention in attentions)
            rotary._sines_first = bool(description["architecture"].get("sines_first"))
            # By this method, which GLM 4.1V lacks in transformers 5.16.
            interleaves = hasattr(rotary, "recomposition_frequencies")
            rotary._interleaved = interleaves and bool(description.get("multimodal", {}).get("interleaved_tables"))
            for place, attention in enumerate(attentions):
                attention._place = place

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """Save as stock models do, with this file beside the weights so that the folder loads on its own."""
        self.config.auto_map = auto_map(self.config)
        folder = Path(save_directory)
        if is_main_process and not folder.is_file():  # stock models say what is wrong with a file
            # First, since the stock method may go on to upload the folder.
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / "modeling_modegpt.py"
            if not (target.exists() and target.samefile(__file__)):
                shutil.copyfile(__file__, target)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return whether other code than transformers' own initialises what the files lack, such as some buffers."""
        share_peft_defaults(cls.config_class.model_type)  # PEFT comes by here before it looks up fused experts
        return cls._stock.is_custom_code()  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # the stock check looks for an attention class in this file's source, and finds none

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls._stock._can_set_experts_implementation()  # as above; the experts are the stock ones

    def _get_static_cache_init_shape(self) -> None:
        # Layers differ in head dims and keys differ from values: let the cache take its shapes from the first update.
        return None


def check_version(description: dict[str, Any]) -> None:
    """Refuse a checkpoint that a later, incompatible version of the format wrote."""
    if description["version"] > FORMAT_VERSION:
        raise ValueError(
            f"this checkpoint has modegpt format version {description['version']}, and this code reads up to "
            f"{FORMAT_VERSION}: load it with trust_remote_code=True, or upgrade modegpt"
        )


def base_of(model: Any) -> Any:
    """Return the model without its head: Llama 4's class names an attribute for it that is not there."""
    base = model.base_model
    return getattr(model, "model", model) if base is model else base


def language_model(model: PreTrainedModel, description: dict[str, Any]) -> Any:
    """Return the base model of a compressed one, inside a multimodal one that of its language model."""
    return base_of(model).get_submodule(description.get("multimodal", {}).get("language_model", ""))


def decoder_layers(model: PreTrainedModel, architecture: dict[str, Any]) -> nn.ModuleList:
    """Return the list of decoder blocks of a causal language model or of its base model."""
    layers = base_of(model).get_submodule(architecture["layers"])
    assert isinstance(layers, nn.ModuleList)
    return layers


def shrink_block(
    block: nn.Module, architecture: dict[str, Any], layer: dict[str, int], config: PreTrainedConfig
) -> None:
    """Narrow the projections of one stock decoder block in place, keeping the leading rows and columns of its weights.

    A block that is narrow already stays as it is.

    Args:
        block: the block, on any device.
        architecture: names and layout of the family, as stored under `modegpt.architecture`.
        layer: `rope_pairs`, `qk_plain`, `value_dim` and `mlp_width` of this layer.
        config: the model's config; only its head counts and dim are read.
    """
    if not architecture.get("whole_attention"):
        names = {**ATTENTION_DEFAULTS, **architecture}
        attention = block.get_submodule(names["attention"])
        # The model under a classification head may come from `AutoModel`, and is then compressed already.
        if not isinstance(attention, CompressedAttention):
            shrink_attention(attention, names, layer, config)
    shrink_mlp(block, architecture, layer["mlp_width"])


def shrink_attention(attention: Any, names: dict[str, Any], layer: dict[str, int], config: PreTrainedConfig) -> None:
    """Narrow the heads of a stock attention, in place; `names` is the architecture with all defaults."""
    n_heads, n_kv_heads = config.num_attention_heads, names["kv_heads"]
    n_kv_heads = (getattr(config, n_kv_heads, None) if isinstance(n_kv_heads, str) else n_kv_heads) or n_heads
    qk_dim, value_dim = 2 * layer["rope_pairs"] + layer["qk_plain"], layer["value_dim"]
    # A fused projection appears under several names, and has the rows of all.
    rows: Counter[Any] = Counter()
    sizes = {"query": n_heads * qk_dim, "key": n_kv_heads * qk_dim, "value": n_kv_heads * value_dim}
    for role, size in sizes.items():
        rows[attention.get_submodule(names[role])] += size
    for module, size in rows.items():
        resize(module, rows=size)
    resize(attention.get_submodule(names["output"]), columns=n_heads * value_dim)

    attention.__class__ = compressed_attention_class(type(attention))
    attention._names = {name: names[name] for name in (*ATTENTION_DEFAULTS, *ROLES, "scale_query")}
    attention._n_heads, attention._n_kv_heads = n_heads, n_kv_heads
    attention._n_parts = names["fused_parts"] or (n_kv_heads if names["by_group"] else 1)
    attention._projections = plan_projections(names, sizes, attention._n_parts)
    attention._qk_dim, attention._value_dim, attention._rope_pairs = qk_dim, value_dim, layer["rope_pairs"]
    if not hasattr(attention, "config"):  # older code gets along without, or has another name
        attention.config = config
    if not hasattr(attention, "layer_idx"):
        attention.layer_idx = attention.layer_id
    attention._head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
    attention.num_key_value_groups = n_heads // n_kv_heads  # kernels read it; not every stock class sets it
    if layer["rope_pairs"]:
        device = attention.get_submodule(names["query"]).weight.device
        index = torch.arange(layer["rope_pairs"], device=device).repeat(n_kv_heads, 1)
        attention.register_buffer("rope_index", index)


def shrink_mlp(block: nn.Module, architecture: dict[str, Any], width: int) -> None:
    """Narrow the MLP alone, in place; arguments as for `shrink_block`."""
    inside, down = dict(block.named_modules()), architecture["down"]
    # There are experts in its place, or, in blocks of one module, another one.
    if down and (down in inside or not architecture.get("whole_attention")):
        rows: Counter[Any] = Counter()
        for name in architecture["up"]:
            rows[block.get_submodule(name)] += width
        for module, size in rows.items():
            resize(module, rows=size)
        resize(block.get_submodule(down), columns=width)
    experts = architecture.get("experts")
    if experts and experts in inside:
        shrink_experts(inside[experts], width)


def shrink_experts(experts: Any, width: int) -> None:
    """Narrow every expert of a mixture, fused as `(experts, 2·width, d_model)` and `(experts, d_model, width)`.

    Or, in some families, with the last two swapped, with a gate and its up side by side, with biases, or without a
    gate: transformers notes these on the module.
    """
    # On those of Llama 4 nothing: they have the last two swapped.
    by_input, in_turn = getattr(experts, "is_transposed", True), not getattr(experts, "is_concatenated", True)
    if experts.down_proj.shape[1 if by_input else 2] == width:
        return

    def narrow(name: str, dim: int, both: bool) -> None:
        old = getattr(experts, name)
        if both:  # gates and ups
            kept = old.unflatten(dim, (-1, 2) if in_turn else (2, -1)).narrow(dim + (not in_turn), 0, width)
            kept = kept.flatten(dim, dim + 1)
        else:
            kept = old.narrow(dim, 0, width)
        setattr(experts, name, nn.Parameter(kept.detach().clone(), requires_grad=old.requires_grad))

    gated = getattr(experts, "has_gate", True)
    narrow("gate_up_proj" if gated else "up_proj", 2 if by_input else 1, both=gated)
    narrow("down_proj", 1 if by_input else 2, both=False)
    if getattr(experts, "gate_up_proj_bias", None) is not None:
        narrow("gate_up_proj_bias", 1, both=True)
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if hasattr(experts, name):
            setattr(experts, name, width)


def plan_projections(names: dict[str, Any], sizes: dict[str, int], parts: int) -> list[tuple[str, Any, Any]]:
    """Return, for each module that projects queries, keys or values, its name, the roles it plays and their widths.

    Planned once, so that a step asks no names: `parts` is their number in a fused projection that comes in several.
    """
    order = names["fused_order"].split()
    roles = {name: [role for role in order if names[role] == name] for name in dict.fromkeys(names[r] for r in sizes)}
    return [(name, played, [sizes[role] // parts for role in played]) for name, played in roles.items()]


def resize(linear: Any, rows: int | None = None, columns: int | None = None) -> None:
    """Keep the first `rows` outputs and `columns` inputs of a linear layer, in place and in its own class."""
    transposed = isinstance(linear, Conv1D)
    weight = linear.weight[:columns, :rows] if transposed else linear.weight[:rows, :columns]
    if weight.shape == linear.weight.shape:
        return
    linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=linear.weight.requires_grad)
    if transposed:
        linear.nx, linear.nf = weight.shape
    else:
        linear.out_features, linear.in_features = weight.shape
    if linear.bias is not None and rows is not None:
        linear.bias = nn.Parameter(linear.bias[:rows].detach().clone(), requires_grad=linear.bias.requires_grad)


@functools.cache
def compressed_attention_class(stock: type) -> type:
    """Return the subclass of a stock attention class that carries `CompressedAttention.forward`."""
    members = {
        "__module__": __name__,
        "__doc__": stock.__doc__,
        # Found here, once: a family's own eager attention (soft capping, say) serves the compressed heads too.
        "_eager": staticmethod(_eager_attention(stock)),
    }
    return type(PREFIX + stock.__name__, (CompressedAttention, stock), members)


def _eager_attention(stock: type) -> Any:
    own = getattr(sys.modules[stock.__module__], "eager_attention_forward", None)
    if own is not None:
        return own
    # It is inside the stock forward (Falcon). The common one does the same, but adds a mask as it is.
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def eager(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        return eager_attention_forward(module, query, key, value, mask, **options)

    return eager


@functools.cache
def compressed_rotary_class(stock: type) -> type:
    """Return the subclass of a stock rotary embedding that carries `CompressedRotary.forward`."""
    return type(PREFIX + stock.__name__, (CompressedRotary, stock), {"__module__": __name__, "__doc__": stock.__doc__})


def _empty(make: Any, stock: type) -> Any:
    """Return a module without attributes of the class that `make` derives from `stock`, for pickle and `deepcopy`."""
    return object.__new__(make(stock))


@functools.cache
def compressed_class(stock_name: str) -> type:
    """Make the compressed counterpart of a transformers class: a config, or a model of any head.

    Args:
        stock_name: for example `LlamaConfig` or `LlamaForCausalLM`.
    """
    stock = getattr(transformers, stock_name)
    members: dict[str, Any] = {"__module__": __name__, "__qualname__": PREFIX + stock_name, "__doc__": stock.__doc__}
    if issubclass(stock, PreTrainedConfig):
        # The plans shard by whole heads of equal size, which is not what these layers have; that of FSDP does not.
        plans = {"base_model_tp_plan": None, "base_model_pp_plan": None}
        members |= plans | {"model_type": MODEL_TYPE_PREFIX + stock.model_type}
        return type(PREFIX + stock_name, (CompressedConfig, stock), members)
    members |= {"_stock": stock, "config_class": compressed_class(stock.config_class.__name__)}
    if getattr(stock.config_class, "attn_logit_softcapping", None):
        members["_supports_sdpa"] = False  # torch's kernel has no cap; until transformers 5.21 not every class said so
    # Without a plan for the rest, sharding the head alone would tear it from the embedding that it is tied to.
    members["_tp_plan"] = None
    if stock_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        # By this table `Trainer` knows which models predict the next token, and pipelines which generate text.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[members["config_class"].model_type] = PREFIX + stock_name
    return type(PREFIX + stock_name, (CompressedModel, stock), members)


def auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """Return the `auto_map` entries by which transformers finds the classes of this file in a checkpoint."""
    module, whole = "modeling_modegpt", config.modegpt.get("multimodal")
    stock = (whole or config.modegpt["architecture"])["name"]
    names = {"AutoConfig": f"{stock}Config", "AutoModel": f"{stock}Model"}
    if whole:
        if not hasattr(transformers, f"{stock}Model"):
            names["AutoModel"] = whole["generates"]  # Llama 4 has no class without a head
        names |= dict.fromkeys(("AutoModelForImageTextToText", "AutoModelForMultimodalLM"), whole["generates"])
    else:
        names["AutoModelForCausalLM"] = config.modegpt["architecture"].get("causal_lm") or f"{stock}ForCausalLM"
    return {auto: f"{module}.{PREFIX}{name}" for auto, name in names.items()}


def __getattr__(name: str) -> type:
    """Make `Modegpt<StockName>` on first use."""
    if name.startswith(PREFIX) and hasattr(transformers, name.removeprefix(PREFIX)):
        return compressed_class(name.removeprefix(PREFIX))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
