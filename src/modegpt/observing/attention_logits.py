"""Measures, in one block, what each query-key coordinate gives to the attention logits."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..architectures.access import Layout
from ..decompose.logits import gram
from ..modeling_modegpt import cosines_first, query_growth, softmax_scale

QUERIES = 6
"""Query positions of each sequence that are measured, evenly spread: each sees all its keys, and 38 sequences give 228
queries for a head's few dozen unknowns. With 12 of them the measuring took 9 % of a run's time (docs/log.md)."""

FIRST = 8
"""The first positions are left out: with so few keys their softmax says little."""

TOGETHER = 3
"""Neighbouring queries that are measured on the same keys: all that the last of them sees. One at a time would leave
out some more keys, in smaller matrix products."""

CHUNK = {"cpu": 2**22, "cuda": 2**28}
"""Features held at once, by device type: 16 MiB, and 1 GiB."""


@contextmanager
def record_logits(block: nn.Module, layout: Layout, total: Tensor) -> Iterator[None]:
    """While the context is open, every forward of a dense `block` adds to `total`.

    Args:
        block: a stock block whose queries and keys are not normalised.
        layout: of its family and sizes.
        total: `(n_heads, d_head, d_head)` float64: the sum of `decompose.logits.gram` by query head.
    """
    architecture = layout.architecture
    attention: Any = block.get_submodule(architecture.attention)
    seen: dict[str, Any] = {}

    def note(module: Any) -> Any:
        held = [role for role in ("query", "key") if architecture.projection(block, role) is module]

        def keep(_module: Any, _inputs: Any, output: Tensor) -> None:
            seen.update({role: layout.states(role, output) for role in held})

        return module.register_forward_hook(keep)

    def arguments(_module: Any, inputs: Any, named: dict[str, Any]) -> None:
        seen["arguments"] = named

    def add(_module: Any, _inputs: Any, _output: Any) -> None:
        _add(total, seen.pop("query"), seen.pop("key"), seen.pop("arguments"), attention, layout)

    modules = dict.fromkeys(architecture.projection(block, role) for role in ("query", "key"))
    handles = [note(module) for module in modules]
    handles.append(attention.register_forward_pre_hook(arguments, with_kwargs=True))
    handles.append(attention.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(total: Tensor, query: Tensor, key: Tensor, arguments: dict[str, Any], attention: Any, layout: Layout) -> None:
    """Add one batch: `(batch, tokens, heads·d_head)` queries and keys before the rotary embedding."""
    dims, architecture = layout.dims, layout.architecture
    query, key = (states.unflatten(-1, (-1, dims.d_head)).transpose(1, 2) for states in (query, key))
    key = key.float()
    n_tokens, device = query.shape[2], query.device
    count = min(QUERIES, max(1, n_tokens - FIRST))
    first = min(FIRST, n_tokens - 1)
    places = first + ((torch.arange(count, device=device) + 0.5) * (n_tokens - first) / count).long()
    query = query.index_select(2, places).float()  # of the others nothing is read
    if dims.rotary_dim:
        tables: Any = arguments.get("position_embeddings")
        if architecture.sines_first:
            tables = cosines_first(attention, tables, arguments.get("position_ids"))
        cos, sin = (_table(table, layout) for table in tables)
        key = _rotate(key, cos, sin, dims.rotary_dim)
        query = _rotate(query, cos[:, :, places], sin[:, :, places], dims.rotary_dim)
    query = query * softmax_scale(attention, architecture.scaling, dims.d_head)
    if architecture.query_growth:
        query = query * query_growth(attention.config, architecture.query_growth, arguments["position_ids"][:, places])
    allowed = _allowed(arguments.get("attention_mask"), places, n_tokens)
    cap = getattr(attention, architecture.softcap, None) if architecture.softcap else None
    sinks = getattr(attention, architecture.sinks).float()[:, None, None] if architecture.sinks else None
    last = (allowed.any(0) * torch.arange(n_tokens, device=device)).amax(1).tolist()  # key that a query may see
    parts = [slice(start, start + TOGETHER) for start in range(0, count, TOGETHER)]

    # Of one row as many heads as are held at once, of several rows all: sums whose order nothing but sizes decides.
    together = max(1, CHUNK[device.type] // (count * n_tokens * dims.d_head))
    rows, heads = max(1, together // dims.n_heads), min(together, dims.n_heads)
    owners = torch.arange(dims.n_heads, device=device) // (dims.n_heads // dims.n_kv_heads)
    for row, head in itertools.product(range(0, len(query), rows), range(0, dims.n_heads, heads)):
        here, those = slice(row, row + rows), slice(head, head + heads)
        all_q, all_k = query[here, those], key[here].index_select(1, owners[those])
        for part in parts:
            seen = max(last[part]) + 1
            q, k = all_q[:, :, part], all_k[:, :, :seen]
            scores = q @ k.mT
            if cap:
                scores = cap * torch.tanh(scores / cap)
            visible = allowed[here if len(allowed) > 1 else slice(0, 1), None, part, :seen]
            scores = scores.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                # A sink is a key of a fixed logit: none of its features changes.
                scores = torch.cat((scores, sinks[those].expand(*scores.shape[:-1], 1)), dim=-1)
                k = functional.pad(k, (0, 0, 0, 1))
            weights = scores.softmax(-1)
            total[those] += gram(q, k, weights, dims.rotary_dim).sum(0, dtype=total.dtype)


def _table(table: Tensor, layout: Layout) -> Tensor:
    """Return cosines or sines by pair, `(1 or batch, 1, tokens, r/2)`: every table holds each of them twice."""
    half = layout.dims.rotary_dim // 2
    table = table[..., ::2] if layout.architecture.interleaved_tables else table[..., :half]
    return table[:, None].float()


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    half = rotary_dim // 2
    first, second = states[..., :half], states[..., half:rotary_dim]
    turned = (first * cos - second * sin, second * cos + first * sin, states[..., rotary_dim:])
    return torch.cat(turned, dim=-1)


def _allowed(mask: Tensor | None, places: Tensor, n_tokens: int) -> Tensor:
    """Return which keys each measured query may see, `(1 or batch, queries, keys)`: causal where no mask is given."""
    if mask is None:
        return (torch.arange(n_tokens, device=places.device) <= places[:, None])[None]
    mask = mask[:, 0, places, :n_tokens]
    return mask if mask.dtype == torch.bool else mask == 0
