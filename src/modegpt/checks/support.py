"""What a model's config says about how it can be compressed, in plain words and without its weights."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..allocation import allocate
from ..architectures import ARCHITECTURES, Architecture, Dimensions, architecture_of
from ..config import NAMES
from ..errors import InputError
from ..loading.models import own_dtype
from ..loading.shards import skeleton
from ..modeling_modegpt import decoder_layers
from ..ranks.limits import why_whole
from ..ranks.whole import LayerSizes, aligned
from ..running.sizes import EXPERT_STEP, cached_numbers, layer_sizes

GUIDE = "docs/adding-an-architecture.md"
UNITS = {"mlp": "neurons", "qk": "coordinates a head", "vo": "coordinates a head"}
NOTES = {2: ", in pairs", EXPERT_STEP: f" an expert, in multiples of {EXPERT_STEP}"}
"""On ranks of such steps."""
CACHE_BYTES = 2
"""Of a cached number in bfloat16 or float16."""


def supported(config: PreTrainedConfig) -> Architecture:
    """Return the architecture of a config, or say what to do about a family that is not there.

    Raises:
        InputError: it is not supported.
    """
    try:
        return architecture_of(config)
    except InputError as problem:
        if config.model_type in ARCHITECTURES or getattr(config, "modegpt", None):
            raise
        raise InputError(f"{problem}; {GUIDE} says how to add a family") from problem


def facts(config: PreTrainedConfig, architecture: Architecture, sparsity: float) -> dict[str, str]:
    """Return what is true of the models of one config, by topic.

    Args:
        config: of a dense model.
        architecture: its family, resolved.
        sparsity: for which the ranks and the cache are told.

    Raises:
        InputError: so much cannot be removed; says the largest sparsity that can.
    """
    dims = architecture.dimensions(config)
    blocks = decoder_layers(skeleton(config), architecture.describe())
    sizes = [layer_sizes(block, architecture, dims) for block in blocks]
    ranks = allocate("uniform", aligned(sizes, own_dtype(config).itemsize), sparsity).ranks
    return {
        "family": f"{architecture.model_type} ({architecture.causal_class}): {architecture.notes}",
        **_attention(config, architecture, dims, blocks, sizes),
        "projections": _projections(architecture, next(filter(architecture.cuts_mlp, blocks), blocks[0])),
        "attention window": _window(config, dims),
        **{f"{NAMES[module]} ranks": _rank(module, sizes, ranks, sparsity) for module in NAMES},
        "removable": _removable(sizes, ranks, sparsity),
        "KV cache": _cache(cached_numbers(blocks, architecture, dims, ranks), sparsity),
    }


def _attention(
    config: Any, architecture: Architecture, dims: Dimensions, blocks: Iterable[nn.Module], sizes: list[LayerSizes]
) -> dict[str, str]:
    """Tell of heads and positions; of an attention that stays as it is, which layers have it, and what others have."""
    if not architecture.whole_attention:
        return {"heads": _heads(dims), "positions": _positions(config, architecture, dims, sizes)}
    known = (architecture.attention, *architecture.mixers)
    counts: Counter[str] = Counter()
    for block in blocks:
        mixing, inside = [module for module, _as_pair in architecture.mixing(block)], dict(block.named_modules())
        here = {path: type(inside[path]).__name__ for path in known if inside.get(path) in mixing}
        counts[" and ".join(f"{path} ({name})" for path, name in here.items())] += 1
    found = ", ".join(f"{name or 'none'} in {count} layers" for name, count in counts.items())
    cut = "experts" if architecture.experts else "MLPs"
    return {"what mixes tokens": f"stays as it is ({found}): the {cut} alone are cut"}


def _heads(dims: Dimensions) -> str:
    wide = f"{dims.n_heads} query heads of {dims.d_head} coordinates"
    if dims.n_kv_heads == dims.n_heads:
        return f"{wide}, each with its own key and value head"
    if dims.n_kv_heads == 1:
        return f"{wide} share one key and value head (multi-query): they share its choice of coordinates"
    return (
        f"{wide} in {dims.n_kv_heads} groups with a key and value head each: a group shares its choice of coordinates"
    )


def _projections(architecture: Architecture, block: Any) -> str:
    heads = (architecture.query, architecture.key, architecture.value)
    told = []
    if architecture.roles and len(set(heads)) == 1:
        order = "alternating by key head" if architecture.by_group else "one after another"
        order = f"in {architecture.fused_parts} parts" if architecture.fused_parts else order
        told.append(f"query, key and value are fused in {architecture.query} ({order}), which is cut in place")
    if len(architecture.up) > len(set(architecture.up)):
        told.append(f"gate and up are fused in {architecture.up[0]}, which is cut in place")
    if architecture.experts:
        what = "gate and up" if architecture.gated_experts else "the projections up"
        told.append(f"{what} of all experts are fused in {architecture.experts}, which is cut in place")
    biased = [role for role in architecture.roles if architecture.projection(block, role).bias is not None]
    if architecture.has_mlp(block) and architecture.projection(block, "down").bias is not None:
        biased.append("MLP")
    if architecture.expert_biases:
        biased.append("experts")
    told.append(f"biases: {', '.join(biased) or 'none'}")
    if architecture.parallel:
        told.append("attention and MLP are parallel: both read the block's input")
    return "; ".join(told)


def _positions(config: Any, architecture: Architecture, dims: Dimensions, sizes: list[LayerSizes]) -> str:
    n_without = sum(size.step["qk"] == 1 for size in sizes)  # where there are pairs, they stay together
    if n_without == dims.n_layers:
        return "no rotary embedding: query and key may be cut to any subspace"
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {name: value for name, value in rope.items() if isinstance(value, dict)} or {"": rope}
    kinds = [f"{value.get('rope_type', 'default')}{f' in {name}' if name else ''}" for name, value in by_type.items()]
    part = (
        "whole heads" if dims.rotary_dim == dims.d_head else f"{dims.rotary_dim} of a head's {dims.d_head} coordinates"
    )
    laid = "stored side by side, reordered once" if architecture.interleaved else "half a head apart"
    told = f"rotary ({', '.join(kinds)}) on {part}; its pairs ({laid}) are kept or dropped whole"
    if n_without:
        told += f"; {n_without} of {dims.n_layers} layers have none"
        if "qk" not in sizes[0].whole:
            told += ": there query and key may be cut to any subspace"
    return told


def _window(config: Any, dims: Dimensions) -> str:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if local := getattr(config, "attention_layers", []).count("local"):
        window, types = config.window_size, ["sliding_attention"] * local
    counts = Counter(types) if types else Counter({"sliding_attention" if window else "full_attention": dims.n_layers})
    if counts["indexed_attention"]:
        return f"every layer attends to the {config.index_topk:,} tokens before it that are picked; kept as it is"
    full, sliding = counts["full_attention"], counts["sliding_attention"] if window else 0
    if sliding:
        return f"{sliding} of {dims.n_layers} layers attend to the last {window:,} tokens; kept as it is"
    where = "every layer attends" if full in (0, dims.n_layers) else f"{full} of {dims.n_layers} layers attend"
    return f"{where} to all tokens before it"


def _rank(
    module: str,
    sizes: list[LayerSizes],
    ranks: list[dict[str, int]],
    sparsity: float,
) -> str:
    first: dict[tuple[int, int], int] = {}  # by step and full rank of its kind of layer
    whole = [size for size in sizes if module in size.whole]
    for size, rank in zip(sizes, ranks, strict=True):
        if module not in size.whole:
            first.setdefault((size.step[module], size.full[module]), rank[module])
    told = [
        f"{step} to {full:,} {UNITS[module]}{NOTES.get(step, '')}; {rank:,} at sparsity {sparsity:g}"
        for (step, full), rank in first.items()
    ]
    if whole and not told:
        return f"stays whole: {why_whole(module, whole)}"
    if whole:
        told.append(f"in {len(whole)} of {len(sizes)} layers it stays whole: {why_whole(module, whole)}")
        return "; ".join(told)
    return "; in the other layers ".join(told)


def _removable(sizes: list[LayerSizes], ranks: list[dict[str, int]], sparsity: float) -> str:
    free = sum(size.weight(module) for size in sizes for module in size.full if module not in size.whole)
    total = sum(size.total for size in sizes)
    removed = sum(size.removed(rank) for size, rank in zip(sizes, ranks, strict=True))
    return (
        f"{free / total:.1%} of the {total:,} parameters of the decoder blocks have a rank to cut; "
        f"the uniform rule at sparsity {sparsity:g} takes {removed / total:.1%}"
    )


def _cache(numbers: dict[str, int], sparsity: float) -> str:
    dense, left = (CACHE_BYTES * numbers[name] for name in ("dense", "compressed"))
    return f"{dense:,} bytes a token in 16 bits, {left:,} at sparsity {sparsity:g}"
