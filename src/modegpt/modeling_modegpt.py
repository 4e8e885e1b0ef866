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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

PREFIX = "Modegpt"
MODEL_TYPE_PREFIX = "modegpt_"
FORMAT_VERSION = 1
ROLES = ("query", "key", "value", "output")
ATTENTION_DEFAULTS = {
    "kv_heads": "num_key_value_heads",
    "by_group": False,
    "query_norm": "",
    "key_norm": "",
    "norm_input": "heads",
    "upcast_rotary": False,
    "scaling": "scaling",
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
    _n_heads: int
    _n_kv_heads: int
    _qk_dim: int
    _value_dim: int
    _rope_pairs: int

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results are those of the stock attention."""
        names, scaling = self._names, getattr(self, self._names["scaling"])
        query, key, value = self._project(hidden_states)
        if names["scale_query"]:
            query, scaling = query * scaling, 1.0
        query, key = self._normalise(query, names["query_norm"]), self._normalise(key, names["key_norm"])
        if self._rope_pairs:
            assert position_embeddings is not None
            cos, sin = (self._gather(table) for table in position_embeddings)
            query = query.unflatten(-2, (self._n_kv_heads, -1))
            query = self._rotate(query, cos.unsqueeze(-2), sin.unsqueeze(-2)).flatten(-3, -2)
            key = self._rotate(key, cos, sin)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

        past_key_values = layer_past if past_key_values is None else past_key_values
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        if _needs_equal_dims(self.config._attn_implementation, query.shape[-2]):
            query, key, value = _pad_to_equal_dims(query, key, value)
        if names["softcap"]:
            kwargs["softcap"] = getattr(self, names["softcap"])
        context, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self._dropout if self.training else 0.0,
            scaling=scaling,
            sliding_window=self._window(),
            **kwargs,
        )
        context = context[..., : self._value_dim].reshape(*hidden_states.shape[:-1], -1).contiguous()
        output = getattr(self, names["output"])(context)
        return getattr(self, names["output_dropout"])(output) if names["output_dropout"] else output, weights

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each `(batch, tokens, heads, dim)`, from fused or separate projections."""
        names, groups = self._names, self._n_kv_heads
        widths = {
            "query": self._n_heads * self._qk_dim,
            "key": groups * self._qk_dim,
            "value": groups * self._value_dim,
        }
        states: dict[str, Tensor] = {}
        for name in dict.fromkeys(names[role] for role in widths):
            parts = [role for role in widths if names[role] == name]
            output = getattr(self, name)(hidden_states)
            if names["by_group"]:
                split = output.unflatten(-1, (groups, -1)).split([widths[role] // groups for role in parts], dim=-1)
            else:
                split = output.split([widths[role] for role in parts], dim=-1)
            states |= zip(parts, split, strict=True)
        shape = hidden_states.shape[:-1]
        query = states["query"].reshape(*shape, self._n_heads, self._qk_dim)
        return query, states["key"].reshape(*shape, groups, -1), states["value"].reshape(*shape, groups, -1)

    def _normalise(self, states: Tensor, name: str) -> Tensor:
        """Apply the family's norm of queries or keys, if this layer has one; their dims are then the dense ones."""
        norm = getattr(self, name, None)
        if norm is None:
            return states
        if self._names["norm_input"] == "flat":
            return norm(states.flatten(-2)).view(states.shape)
        if self._names["norm_input"] == "heads first":
            return norm(states.transpose(1, 2)).transpose(1, 2)
        return norm(states)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so pickle cannot find it by name; the stock class it can.
        return _empty_attention, (type(self).__mro__[2],), self.__dict__

    def _gather(self, table: Tensor) -> Tensor:
        """Cosines or sines of each key head's own pairs: `(batch, tokens, r)` to `(batch, tokens, heads, pairs)`."""
        return table.index_select(-1, self.rope_index.flatten()).unflatten(-1, self.rope_index.shape)

    def _window(self) -> int | None:
        """The layer's sliding window: its own where the family sets one by layer, else the config's."""
        owner = self if hasattr(self, "sliding_window") else self.config
        return getattr(owner, "sliding_window", None)

    def _rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = self._rope_pairs
        first, second, plain = states.split([pairs, pairs, self._qk_dim - 2 * pairs], dim=-1)
        if self._names["upcast_rotary"]:
            first, second = first.float(), second.float()
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, plain), dim=-1)
        return rotated.to(states.dtype)  # some families' tables are float32 whatever the model's dtype

    @property
    def _dropout(self) -> float:
        own: Any = getattr(self, self._names["dropout"], 0.0)
        return getattr(own, "p", own)


def _needs_equal_dims(implementation: str, n_queries: int) -> bool:
    """Whether query/key and value dims must agree: always for flash kernels; for SDPA when it is faster.

    With unequal dims SDPA falls to its unfused path, which costs several times more in prefill; when decoding one
    token, that path is the faster one and padding would copy the cache.
    """
    if implementation == "sdpa":
        return n_queries > 1
    return implementation != "eager"


def _pad_to_equal_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    missing = value.shape[-1] - key.shape[-1]
    if missing > 0:
        return nn.functional.pad(query, (0, missing)), nn.functional.pad(key, (0, missing)), value
    return query, key, nn.functional.pad(value, (0, -missing))


class CompressedConfig(_ConfigBase):
    """Mixin in front of a stock config class."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as stock configs do."""
        # PEFT asks for exactly this before it looks up the default modules of a model type: the one moment when it is
        # sure to be imported, whichever of it and the model came first.
        share_peft_defaults(self.model_type)
        return super().to_dict()


def share_peft_defaults(model_type: str) -> None:
    """Give a compressed model type the default target modules that PEFT has for the dense one, if PEFT is imported."""
    constants = sys.modules.get("peft.utils.constants")
    tables = [] if constants is None else vars(constants).items()
    for name, table in tables:
        dense = model_type.removeprefix(MODEL_TYPE_PREFIX)
        if name.endswith("_MODULES_MAPPING") and isinstance(table, dict) and dense in table:
            table.setdefault(model_type, table[dense])


class CompressedModel(_ModelBase):
    """Mixin in front of a stock model class: builds the stock skeleton, then shrinks its projections."""

    _stock: type

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the model that `config.modegpt` describes; inside `from_pretrained` this happens on the meta device."""
        super().__init__(config, *args, **kwargs)
        description = config.modegpt
        check_version(description)
        layers = decoder_layers(self, description["architecture"])
        for block, layer in zip(layers, description["layers"], strict=True):
            shrink_block(block, description["architecture"], layer, config)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save as stock models do, with this file beside the weights so that the folder loads on its own."""
        self.config.auto_map = auto_map(self.config)
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            target = Path(save_directory) / "modeling_modegpt.py"
            if not (target.exists() and target.samefile(__file__)):
                shutil.copyfile(__file__, target)

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


def decoder_layers(model: PreTrainedModel, architecture: dict[str, Any]) -> nn.ModuleList:
    """Return the list of decoder blocks of a causal language model or of its base model."""
    layers = model.base_model.get_submodule(architecture["layers"])
    assert isinstance(layers, nn.ModuleList)
    return layers


def shrink_block(
    block: nn.Module, architecture: dict[str, Any], layer: dict[str, int], config: PreTrainedConfig
) -> None:
    """Narrow the projections of one stock decoder block in place, keeping the leading rows and columns of its weights.

    Args:
        block: the block, on any device.
        architecture: names and layout of the family, as stored under `modegpt.architecture`.
        layer: `rope_pairs`, `qk_plain`, `value_dim` and `mlp_width` of this layer.
        config: the model's config; only its head counts are read.
    """
    names = {**ATTENTION_DEFAULTS, **architecture}
    n_heads, n_kv_heads = config.num_attention_heads, names["kv_heads"]
    n_kv_heads = (getattr(config, n_kv_heads, None) if isinstance(n_kv_heads, str) else n_kv_heads) or n_heads
    attention: Any = block.get_submodule(names["attention"])
    qk_dim, value_dim = 2 * layer["rope_pairs"] + layer["qk_plain"], layer["value_dim"]
    # A fused projection appears under several names, and has the rows of all.
    rows: Counter[Any] = Counter()
    for role, size in (("query", n_heads * qk_dim), ("key", n_kv_heads * qk_dim), ("value", n_kv_heads * value_dim)):
        rows[attention.get_submodule(names[role])] += size
    for module, size in rows.items():
        resize(module, rows=size)
    resize(attention.get_submodule(names["output"]), columns=n_heads * value_dim)
    shrink_mlp(block, architecture, layer["mlp_width"])

    attention.__class__ = compressed_attention_class(type(attention))
    attention._names = {name: names[name] for name in (*ATTENTION_DEFAULTS, *ROLES, "scale_query")}
    attention._n_heads, attention._n_kv_heads = n_heads, n_kv_heads
    attention._qk_dim, attention._value_dim, attention._rope_pairs = qk_dim, value_dim, layer["rope_pairs"]
    attention.num_key_value_groups = n_heads // n_kv_heads  # kernels read it; not every stock class sets it
    if layer["rope_pairs"]:
        device = attention.get_submodule(names["query"]).weight.device
        index = torch.arange(layer["rope_pairs"], device=device).repeat(n_kv_heads, 1)
        attention.register_buffer("rope_index", index)


def shrink_mlp(block: nn.Module, architecture: dict[str, Any], width: int) -> None:
    """Narrow the MLP alone, in place; arguments as for `shrink_block`."""
    rows: Counter[Any] = Counter()
    for name in architecture["up"]:
        rows[block.get_submodule(name)] += width
    for module, size in rows.items():
        resize(module, rows=size)
    if architecture["down"]:
        resize(block.get_submodule(architecture["down"]), columns=width)


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
    if own is None:  # it is inside the stock forward (Falcon); the common one does the same
        from transformers.models.llama.modeling_llama import eager_attention_forward

        return eager_attention_forward
    return own


def _empty_attention(stock: type) -> Any:
    """Return an attention module without attributes, for pickle and `copy.deepcopy` to fill."""
    return object.__new__(compressed_attention_class(stock))


@functools.cache
def compressed_class(stock_name: str) -> type:
    """Make the compressed counterpart of a transformers class: a config, or a model of any head.

    Args:
        stock_name: for example `LlamaConfig` or `LlamaForCausalLM`.
    """
    stock = getattr(transformers, stock_name)
    members: dict[str, Any] = {"__module__": __name__, "__qualname__": PREFIX + stock_name, "__doc__": stock.__doc__}
    if issubclass(stock, PreTrainedConfig):
        # The plans shard by whole heads of equal size, which is not what these layers have.
        plans = {"base_model_tp_plan": None, "base_model_pp_plan": None, "base_model_fsdp_plan": None}
        members |= plans | {"model_type": MODEL_TYPE_PREFIX + stock.model_type}
        return type(PREFIX + stock_name, (CompressedConfig, stock), members)
    members |= {"_stock": stock, "config_class": compressed_class(stock.config_class.__name__)}
    return type(PREFIX + stock_name, (CompressedModel, stock), members)


def auto_map(config: PreTrainedConfig) -> dict[str, str]:
    """Return the `auto_map` entries by which transformers finds the classes of this file in a checkpoint."""
    module = "modeling_modegpt"
    stock = config.modegpt["architecture"]["name"]
    causal = config.modegpt["architecture"].get("causal_lm") or f"{stock}ForCausalLM"
    names = {"AutoConfig": f"{stock}Config", "AutoModel": f"{stock}Model", "AutoModelForCausalLM": causal}
    return {auto: f"{module}.{PREFIX}{name}" for auto, name in names.items()}


def __getattr__(name: str) -> type:
    """Make `Modegpt<StockName>` on first use."""
    if name.startswith(PREFIX) and hasattr(transformers, name.removeprefix(PREFIX)):
        return compressed_class(name.removeprefix(PREFIX))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
