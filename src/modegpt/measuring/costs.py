"""What a model costs by its shapes: parameters, multiply-accumulates and cache, read off the model by one short pass.

For `n` prompt tokens and one that attends to `c` positions, with a window `w` where a layer has one:

    prefill MACs = n * linear + head + sum over layers of a_l * sum over t = 1..n of min(t, w_l)
    decode MACs  =     linear + head + sum over layers of a_l * min(c, w_l) + e_l * (min(c, w_l) - 1)

`linear` is the sum of outputs times inputs over the linear layers and routers that a token passes, `head` that of the
output embedding, which only the last token of a prompt passes, and `a_l = n_heads * (qk_dim + value_dim)` is one query
against one position. Where latents are cached (multi-head latent attention), each step makes keys and values of all of
them anew: `e_l` is that of one position, the size of `kv_b_proj`; elsewhere it is 0. Where an indexer picks the `w`
positions, it scores all `c` of them, over its heads, and that is added. Layers behind which nothing reads the prompt's
other tokens, as those of Gemma 4 that read the keys and values of earlier ones, run for its last token alone: there `n`
is 1, and attention is that of the last token. Norms, biases, activations, softmax, the rotation, convolutions, and the
states of linear attention and Mamba are not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..architectures.fused import weighs_inputs
from ..cache_name import CACHE
from ..formats.checkpoint_files import find_tensors
from ..formats.text_part import has_text_part, is_text
from ..loading.models import device_of, outer_config
from ..loading.places import is_gguf, local_folder

PROBE_TOKENS = 2
"""Tokens of the short pass: few enough for any sliding window."""


@dataclass(frozen=True)
class Attention:
    """What one layer's attention costs."""

    macs: int
    """Of one query, over all heads, against one position."""
    window: int | None
    """Positions that a query attends to at most; None for all before it."""
    chunked: bool = False
    """Whether the window begins anew whenever it is full, as in Llama 4, and does not slide."""
    expansion: int = 0
    """Of making keys and values of one position's latents, where the cache holds these."""
    picking: int = 0
    """Of scoring one of all positions before a token, where those that it attends to, a window of them, are picked."""
    last_only: bool = False
    """Whether of a prompt the last token alone gets here."""

    def attended(self, context: int) -> int:
        """Return the MACs of a token that may attend to `context` positions, itself included.

        Those of its own latents are among its linear layers'.
        """
        if self.chunked and self.window:
            context = (context - 1) % self.window + 1
        seen = min(context, self.window or context)
        return self.macs * seen + self.expansion * (seen - 1) + self.picking * context

    def attended_by_all(self, n_tokens: int) -> int:
        """Return the MACs of `n_tokens` tokens, each attending to itself and those before it."""
        if self.last_only:
            return self.attended(n_tokens)
        full = min(n_tokens, self.window or n_tokens)
        if self.chunked:
            chunks, rest = divmod(n_tokens, full)
            return self.macs * (chunks * full * (full + 1) + rest * (rest + 1)) // 2
        picking = self.picking * (n_tokens * (n_tokens + 1) // 2)
        return self.macs * (full * (full + 1) // 2 + (n_tokens - full) * full) + picking


@dataclass(frozen=True)
class Costs:
    """The sizes that decide speed and memory."""

    parameters: int
    """Tied weights once."""
    parameters_per_token: int
    """What decoding a token reads: all weights but embedding tables, of which it reads a row; a tied head counts."""
    weight_bytes: int
    """Parameters and buffers, as they are in memory."""
    kv_bytes_per_token: int
    """Of the key and value tensors in the cache."""
    linear_macs: int
    """Of the linear layers for one token, without the head."""
    last_macs: int
    """Those of them that of a prompt the last token alone passes."""
    head_macs: int
    """Of the output embedding for one token."""
    attention: tuple[Attention, ...]
    """By layer."""

    def sizes(self) -> dict[str, int]:
        """Return what does not depend on batch and length, for JSON."""
        keys = ("parameters", "parameters_per_token", "weight_bytes", "kv_bytes_per_token")
        return {key: getattr(self, key) for key in keys}

    def prefill_macs(self, n_tokens: int) -> int:
        """Return the MACs of reading one prompt of `n_tokens` tokens."""
        linear = n_tokens * (self.linear_macs - self.last_macs) + self.last_macs
        return linear + self.head_macs + sum(a.attended_by_all(n_tokens) for a in self.attention)

    def decode_macs(self, context: int) -> int:
        """Return the MACs of one new token that attends to `context` positions, itself included."""
        return self.linear_macs + self.head_macs + sum(a.attended(context) for a in self.attention)


@torch.no_grad()
def costs_of(model: PreTrainedModel) -> Costs:
    """Run a few tokens through a causal language model and read its sizes off what really happened.

    Layers are counted as often as a token passes them, and of fused experts those that a token is sent to.
    """
    head = model.get_output_embeddings()
    ids = torch.ones(1, PROBE_TOKENS, dtype=torch.long, device=device_of(model))
    with _count_linear_macs(model, head) as (counted, idle):
        cache = model(ids, use_cache=True)[CACHE]
    last_macs = 0
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        with _count_linear_macs(model, head) as (of_a_prompt, _):
            model(ids, use_cache=True, logits_to_keep=1)
        last_macs = (sum(counted) - sum(of_a_prompt)) // (PROBE_TOKENS - 1)
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    read = {id(p): p.numel() for m in model.modules() if m not in tables for p in m.parameters(recurse=False)}
    return Costs(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameters_per_token=sum(read.values()) - sum(idle.values()),
        weight_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        kv_bytes_per_token=sum(tensor.nbytes for layer in layers for tensor in _grows(layer)) // PROBE_TOKENS,
        linear_macs=sum(counted) // PROBE_TOKENS,
        last_macs=last_macs,
        head_macs=0 if head is None else head.weight.numel(),  # pyright: ignore[reportAttributeAccessIssue]
        attention=_attention(model, layers, last_macs > 0),
    )


def _grows(layer: Any) -> list[torch.Tensor]:
    """Return what a layer of a cache holds of every position: keys, values, and keys by which positions are picked."""
    held = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    return [tensor for tensor in held if tensor is not None]


def _attention(model: PreTrainedModel, layers: list[Any], last_only: bool) -> tuple[Attention, ...]:
    """Return what attention costs in every layer that holds keys or latents in the cache, or reads those of another.

    Args:
        model: the model.
        layers: of its cache, those with keys.
        last_only: whether of a prompt the last token alone passes the layers that read those of another.
    """
    latent: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    if latent:
        queries = [getattr(module, "q_proj", None) or module.q_b_proj for module in latent]
        return tuple(
            Attention(
                query.weight.shape[0] + module.o_proj.weight.shape[1],
                getattr(module.config, "index_topk", None),
                expansion=module.kv_b_proj.weight.numel(),
                picking=_picking(getattr(module, "indexer", None)),
            )
            for query, module in zip(queries, latent, strict=True)
        )
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads_per_layer", None) or [config.num_attention_heads] * len(layers)
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    chunked = ["chunked" in kind for kind in kinds] if len(kinds) == len(layers) else [False] * len(layers)
    own = [
        Attention(
            n_heads * (layer.keys.shape[-1] + layer.values.shape[-1]), getattr(layer, "sliding_window", None), in_chunks
        )
        for n_heads, layer, in_chunks in zip(heads, layers, chunked, strict=True)
    ]
    if not getattr(config, "num_kv_shared_layers", 0):
        return tuple(own)
    last_of_kind = dict(zip(kinds, own, strict=False))  # a later layer of a kind replaces an earlier one
    return tuple(own + [replace(last_of_kind[kind], last_only=last_only) for kind in kinds[len(own) :]])


def _picking(indexer: Any) -> int:
    """Return the MACs by which an indexer, if there is one, scores a position: of its heads, and of their sum."""
    return 0 if indexer is None else indexer.n_heads * (indexer.head_dim + 1)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all that a transformers cache holds: keys and values, and states of fixed size."""
    held: list[Any] = [tensor for layer in cache.layers for tensor in _grows(layer)]
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None)  # by number, or in older versions of transformers one tensor
            held += states.values() if isinstance(states, dict) else [states]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


@contextmanager
def _count_linear_macs(model: nn.Module, head: Any) -> Iterator[tuple[list[int], dict[nn.Module, int]]]:
    """Collect the MACs of all linear layers that run in the context, but for the head, and what experts leave idle.

    Fused experts hold parameters of three dims, the first of them the experts, and in some families biases of two, and
    are called with the experts of each token, `(tokens, k)`. Llama 4's are called with all tokens for each of them, of
    which those that it is not sent are zeros; the stock class passes these, too, but no other engine does.
    """
    counted: list[int] = []
    idle: dict[nn.Module, int] = {}

    def count(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        states = inputs[0] if inputs else output  # a router may return several tensors
        n_tokens = states.numel() // states.shape[-1]
        counted.append(n_tokens * module.weight.numel())  # pyright: ignore[reportArgumentType, reportCallIssue]

    def count_experts(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        weights = list(module.parameters(recurse=False))
        chosen = next((x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point()), None)
        if chosen is not None:
            n_sent, per_token = chosen.numel(), chosen.shape[-1]
        elif hasattr(module, "down_proj") and weighs_inputs(module):
            n_sent = int(inputs[0].any(-1).sum())
            per_token = n_sent * len(weights[0]) // len(inputs[0])
        else:
            return
        counted.append(n_sent * sum(weight[0].numel() for weight in weights if weight.ndim == 3))
        idle[module] = (len(weights[0]) - per_token) * sum(weight[0].numel() for weight in weights)

    fused = [m for m in model.modules() if any(p.ndim == 3 for p in m.parameters(recurse=False))]
    linears = [module for module in model.modules() if _multiplies(module) and module is not head]
    handles = [module.register_forward_hook(count) for module in linears]
    handles += [module.register_forward_hook(count_experts) for module in fused]
    try:
        yield counted, idle
    finally:
        for handle in handles:
            handle.remove()


def _multiplies(module: nn.Module) -> bool:
    """Tell whether a module multiplies by a matrix: a linear layer, or a router, which in most families is no `Linear`.

    The gains of a norm have two dims where each head has its own (Cohere).
    """
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2
    return matrix and not isinstance(module, nn.Embedding) and "Norm" not in type(module).__name__


def file_bytes(name: str) -> int | None:
    """Return the bytes of a model's weight files, of a multimodal model those of its language model's tensors.

    None where they are in no format known here.
    """
    path = Path(name)
    if is_gguf(path):
        return path.stat().st_size
    folder = local_folder(name)
    if folder and has_text_part(outer_config(name)):
        return sum(entry.size for key, entry in find_tensors(folder).items() if is_text(key)) or None
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):  # others may hold the same weights once more
        files = list(folder.glob(pattern)) if folder else []
        if files:
            return sum(file.stat().st_size for file in files)
    return None
