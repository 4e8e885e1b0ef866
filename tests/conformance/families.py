"""The families of the conformance suite: one entry each, a tiny random model that has all of the family's traps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, OPTConfig, PreTrainedConfig, Qwen2Config

from modegpt.architectures import Architecture, Dimensions, architecture_of

VOCAB = 101
PAD = 0
WINDOW = 6
"""Sliding window; shorter than every sequence of the suite, so that a lost window changes the logits."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    # No end token: every generation has the length that was asked for.
    "eos_token_id": None,
}
OPT_SIZES = {name: value for name, value in SIZES.items() if name != "intermediate_size"} | {"ffn_dim": 40}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """One row of the suite."""

    name: str
    config: Callable[[], PreTrainedConfig]

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.config())

    @property
    def dims(self) -> Dimensions:
        return Dimensions.of(self.architecture, self.config())

    def dense(self, seed: int = 0) -> Any:
        """Return the dense model, float32, every parameter random: biases and norms too, which start at 0 and 1."""
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gain = "norm" in name and name.endswith("weight")
                # Strong embeddings and weak biases: the next token must depend on the tokens before it.
                std = 0.1 if name.endswith("bias") else 1.0 if "embed" in name else 0.3
                parameter.normal_(mean=1.0 if gain else 0.0, std=std)
        return model.eval()

    def ranks(self) -> list[dict[str, int]]:
        """Return ranks that differ by layer and module: qk above vo and below it, and modules left whole."""
        dims = self.dims
        shares = [(0.65, 0.75, 0.375), (0.5, 0.375, 0.625), (1.0, 1.0, 0.25)]
        step = 2 if dims.rotary_dim else 1
        return [
            {
                "mlp": round(mlp * dims.d_int),
                "qk": -(-round(qk * dims.d_head) // step) * step,
                "vo": round(vo * dims.d_head),
            }
            for mlp, qk, vo in shares
        ]

    def full_ranks(self) -> list[dict[str, int]]:
        dims = self.dims
        return [{"mlp": dims.d_int, "qk": dims.d_head, "vo": dims.d_head}] * dims.n_layers


FAMILIES = [
    # A head dim that is not hidden_size / heads, and every bias that the stock class offers.
    Family("llama-grouped", lambda: LlamaConfig(**SIZES, **GROUPED, head_dim=16, attention_bias=True, mlp_bias=True)),
    Family("llama-tied", lambda: LlamaConfig(**SIZES, tie_word_embeddings=True)),
    Family("mistral", lambda: MistralConfig(**SIZES, **GROUPED, sliding_window=WINDOW)),
    Family(
        "qwen2",
        lambda: Qwen2Config(
            **SIZES,
            **GROUPED,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
    ),
    Family("opt", lambda: OPTConfig(**OPT_SIZES)),
    # As OPT-350m: norms after the modules, embeddings narrower than the model.
    Family(
        "opt-post-norm",
        lambda: OPTConfig(**OPT_SIZES, do_layer_norm_before=False, word_embed_proj_dim=16, tie_word_embeddings=False),
    ),
]


def tokens(rows: int = 2, length: int = 20, seed: int = 1) -> Tensor:
    """Return random token ids without the padding token."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
