"""A tiny random model with the switches of a large one: what is checked on it holds for the large one's code path."""

import contextlib
import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..architectures import Architecture

VOCABULARY = 101
D_HEAD = 16
D_INT = 80
MIN_LAYERS = 3
BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "attention_layers", "layer_rope_theta", "indexer_types")
"""What configs list by layer; the second is 1 where a layer does have the rotary embedding, the fifth 0 where not."""
WINDOW = 6
"""Sliding window and trained length: shorter than what the checks run, so that they are passed."""
TRAINED = 16


def tiny_config(config: PreTrainedConfig, architecture: Architecture) -> PreTrainedConfig:
    """Return a config of the same class with every switch as it is and small sizes.

    Kept in kind are: grouped, multi-query or plain heads; whether the heads are together as wide as the model; the
    part of a head that is rotated and how; each type of layer; tied embeddings.

    Args:
        config: of a dense model; left as it is.
        architecture: its family, resolved.
    """
    dims, small = architecture.dimensions(config), copy.deepcopy(config)
    n_heads = 4
    d_head = D_HEAD
    sizes: dict[str, Any] = {
        "hidden_size": n_heads * d_head if dims.d_head * dims.n_heads == dims.d_model else 48,
        "num_attention_heads": n_heads,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "max_position_embeddings": 4 * TRAINED,
        "original_max_position_embeddings": TRAINED,
        "sliding_window": WINDOW,
        "window_size": WINDOW,
        architecture.n_experts: 4,
        architecture.experts_per_token: 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "shared_expert_intermediate_size": D_INT // 2,
        "shared_intermediate_size": D_INT // 2,
        "intermediate_size": D_INT,
        "intermediate_size_mlp": D_INT,
        "attention_chunk_size": WINDOW,
        "floor_scale": WINDOW,
        architecture.width: D_INT // 2 if architecture.experts else D_INT,
        "head_dim": d_head,
        "rotary_dim": d_head // 2,
        "qk_rope_head_dim": d_head,
        "q_lora_rank": 2 * d_head,
        "kv_lora_rank": 2 * d_head,
        "index_head_dim": 2 * d_head,
        "index_n_heads": 2,
        "word_embed_proj_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": n_heads,
        "linear_key_head_dim": d_head // 2,
        "linear_value_head_dim": d_head,
        "linear_num_heads": n_heads,
        "linear_head_dim": d_head,
        "num_attention_heads_per_layer": None,  # then they have these alike
        "mamba_n_heads": n_heads,
        "mamba_d_state": d_head,
        "mamba_num_heads": n_heads,
        "mamba_head_dim": d_head,
        "ssm_state_size": d_head,
        "n_groups": 2,
        "chunk_size": TRAINED,
        "moe_shared_expert_intermediate_size": D_INT // 2,
    }
    if hasattr(config, "mamba_d_head"):
        sizes["mamba_d_ssm"] = config.mamba_expand * sizes["hidden_size"]
        sizes["mamba_d_head"] = sizes["mamba_d_ssm"] // n_heads
    if getattr(config, "word_embed_proj_dim", None) == dims.d_model:
        sizes["word_embed_proj_dim"] = sizes["hidden_size"]
    if isinstance(architecture.kv_heads, str):
        n_kv_heads = _known(config, architecture.kv_heads) or dims.n_heads
        sizes[architecture.kv_heads] = {1: 1, dims.n_heads: n_heads}.get(n_kv_heads, 2)
    kinds = {name: list(dict.fromkeys(getattr(config, name, None) or ())) for name in BY_LAYER}
    n_layers = max(MIN_LAYERS, *map(len, kinds.values()))
    if architecture.hands_on:  # one layer of each kind with keys and values of its own, and one without
        n_kinds = len(kinds["layer_types"])
        n_layers, sizes["num_kv_shared_layers"] = 2 * n_kinds, n_kinds
    small.num_hidden_layers = n_layers
    for name, known in kinds.items():
        if known:
            _set(small, name, (known * n_layers)[:n_layers])
    if kinds["attention_layers"]:  # of GPT-Neo, whose config is written as runs of them
        small.attention_types = [[[kind], 1] for kind in small.attention_layers]
    for name, value in sizes.items():
        if _known(config, name):  # none is a switch, too: of experts, say
            _set(small, name, value)
    # No end token, so that every generation has the length that was asked for.
    for name, token in {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "unk_token_id": 2}.items():
        if hasattr(config, name):
            setattr(small, name, token)
    small.rope_parameters = _scaled(getattr(config, "rope_parameters", None), d_head)
    small.dtype, small._name_or_path = torch.float32, ""
    fields = small.to_dict()
    if fields.pop("per_layer_config", None):  # of Gemma 4, by the numbers of the layers; it follows from these
        fields |= {"head_dim": d_head, "num_key_value_heads": 2, "global_head_dim": 2 * d_head}
        fields["num_global_key_value_heads"] = 1
    return type(config).from_dict(fields)


def _known(config: Any, name: str) -> Any:
    """Return a field of a config; None where it lacks it, or where layers differ in it (Gemma 4)."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return getattr(config, name)
    return None


def _set(config: Any, name: str, value: Any) -> None:
    # A property follows from the others, as Falcon's head_dim.
    with contextlib.suppress(AttributeError):
        setattr(config, name, value)


def _scaled(rope: Any, d_head: int) -> Any:
    """Return rotary parameters for small heads and a short trained length."""
    if not isinstance(rope, dict):
        return rope
    if any(isinstance(value, dict) for value in rope.values()):  # one set for each type of layer
        return {name: _scaled(value, d_head) for name, value in rope.items()}
    small, n_pairs = dict(rope), max(1, -(-int(d_head * rope.get("partial_rotary_factor", 1.0)) // 2))
    if "partial_rotary_factor" in small:
        small["partial_rotary_factor"] = 2 * n_pairs / d_head  # a third of a small head need not be even
    for name in ("short_factor", "long_factor"):
        if name in small:
            small[name] = [small[name][pair * len(small[name]) // n_pairs] for pair in range(n_pairs)]
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = TRAINED
    return small


def random_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """Return a float32 model whose every parameter is random: biases and norms too, which start at 0 and 1.

    So is what Gemma 4 multiplies each block's output by.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = "norm" in name and name.endswith("weight")
            # Strong embeddings and weak biases: the next token must depend on the tokens before it.
            std = 0.1 if name.endswith("bias") else 1.0 if "embed" in name else 0.3
            parameter.normal_(mean=1.0 if gain else 0.0, std=std)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(mean=1.0, std=0.3)
    return model.eval()
