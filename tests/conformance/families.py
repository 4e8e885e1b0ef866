"""The families of the conformance suite: one entry each, a tiny random model that has all of the family's traps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from modegpt.architectures import Architecture, Dimensions, architecture_of
from modegpt.tiny import random_model

VOCAB = 101
PAD = 0
WINDOW = 6
"""Sliding window; shorter than every sequence of the suite, so that a lost window changes the logits."""
MIXED_WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

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
NO_WIDTH = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
OPT_SIZES = {**NO_WIDTH, "ffn_dim": 40}
WHOLE_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
HALF_ROTARY = {**WHOLE_ROTARY, "partial_rotary_factor": 0.5}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}


@dataclass(frozen=True)
class Family:
    """One row of the suite."""

    name: str
    config: Callable[[], PreTrainedConfig]
    whole: tuple[str, ...] = ()
    """Modules that must keep their full rank."""
    same_bits: bool = True
    """Whether the full-rank model does the stock operations in the stock order."""
    exact: float = 1e-11
    """Allowed difference of logits in float64: a few hundred operations, each rounding at 1e-16 of logits near 10."""

    @property
    def architecture(self) -> Architecture:
        return architecture_of(self.config())

    @property
    def dims(self) -> Dimensions:
        return Dimensions.of(self.architecture, self.config())

    def dense(self, seed: int = 0) -> Any:
        """Return the dense model, float32, every parameter random: biases and norms too, which start at 0 and 1."""
        return random_model(self.config(), seed)

    def ranks(self) -> list[dict[str, int]]:
        """Return ranks that differ by layer and module: qk above vo and below it, and modules left whole."""
        dims = self.dims
        shares = [(0.65, 0.75, 0.375), (0.5, 0.375, 0.625), (1.0, 1.0, 0.25)]
        step = 2 if dims.rotary_dim else 1
        ranks = [
            {
                "mlp": round(mlp * dims.d_int),
                "qk": -(-round(qk * dims.d_head) // step) * step,
                "vo": round(vo * dims.d_head),
            }
            for mlp, qk, vo in shares
        ]
        return [
            {**rank, **{module: full[module] for module in self.whole}}
            for rank, full in zip(ranks, self.full_ranks(), strict=True)
        ]

    def full_ranks(self) -> list[dict[str, int]]:
        dims = self.dims
        return [dims.full_ranks] * dims.n_layers


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
    Family("qwen3", lambda: Qwen3Config(**SIZES, **GROUPED, head_dim=16), whole=("qk",)),
    Family("gemma", lambda: GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16)),
    Family(
        "gemma2",
        lambda: Gemma2Config(
            **SIZES,
            **GROUPED,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            # Low enough that both caps bend what they cap.
            attn_logit_softcapping=5.0,
            final_logit_softcapping=20.0,
        ),
    ),
    Family(
        "gemma3_text",
        lambda: Gemma3TextConfig(
            **SIZES,
            **GROUPED,
            head_dim=16,
            query_pre_attn_scalar=24,
            **MIXED_WINDOWS,
            # Tied to embeddings as large as Gemma's, a random model says its last token for ever.
            tie_word_embeddings=False,
        ),
        whole=("qk",),
    ),
    Family("olmo2", lambda: Olmo2Config(**SIZES, **GROUPED), whole=("qk",)),
    Family("stablelm", lambda: StableLmConfig(**SIZES, **GROUPED, use_qkv_bias=True, rope_parameters=HALF_ROTARY)),
    Family(
        "stablelm-parallel-norm",
        lambda: StableLmConfig(
            **SIZES, **GROUPED, use_parallel_residual=True, qk_layernorm=True, rope_parameters=HALF_ROTARY
        ),
        whole=("qk",),
    ),
    Family(
        "granite",
        lambda: GraniteConfig(
            **SIZES,
            **GROUPED,
            attention_bias=True,
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.25,
            logits_scaling=2.0,
        ),
    ),
    Family("phi", lambda: PhiConfig(**SIZES, rope_parameters=HALF_ROTARY)),
    Family(
        "phi-norm", lambda: PhiConfig(**SIZES, **GROUPED, qk_layernorm=True, rope_parameters=HALF_ROTARY), whole=("qk",)
    ),
    Family("phi3", lambda: Phi3Config(**SIZES, **GROUPED, sliding_window=WINDOW)),
    Family("phi3-partial", lambda: Phi3Config(**SIZES, **GROUPED, rope_parameters=HALF_ROTARY)),
    Family("gpt2", lambda: GPT2Config(**NO_WIDTH, scale_attn_by_inverse_layer_idx=True)),
    Family("gpt_neox", lambda: GPTNeoXConfig(**SIZES, rope_parameters=HALF_ROTARY)),
    Family(
        "gpt_neox-sequential",
        lambda: GPTNeoXConfig(**SIZES, rope_parameters=HALF_ROTARY, use_parallel_residual=False),
    ),
    # Falcon's own attention divides by the root of the head dim, and leaves repeating the key heads to the kernel.
    Family("falcon", lambda: FalconConfig(**NO_WIDTH), same_bits=False),
    Family(
        "falcon-grouped",
        lambda: FalconConfig(**NO_WIDTH, new_decoder_architecture=True, num_kv_heads=2, bias=True),
        same_bits=False,
    ),
    Family(
        "falcon-sequential",
        lambda: FalconConfig(**NO_WIDTH, multi_query=False, parallel_attn=False, bias=True),
        same_bits=False,
    ),
    # A head's coordinates are added up in another order; and the stock model rotates in float32, in float64 too.
    Family("cohere", lambda: CohereConfig(**SIZES, **GROUPED, attention_bias=True), same_bits=False, exact=1e-4),
    Family(
        "cohere-norm",
        lambda: CohereConfig(**SIZES, **GROUPED, use_qk_norm=True),
        whole=("qk",),
        same_bits=False,
        exact=1e-4,
    ),
    Family(
        "mixtral",
        lambda: MixtralConfig(**SIZES, **GROUPED, num_local_experts=3, num_experts_per_tok=2, sliding_window=WINDOW),
        whole=("mlp",),
    ),
    Family(
        "ministral",
        lambda: MinistralConfig(
            **SIZES,
            **GROUPED,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    Family(
        "ministral3",
        # Beyond 8 tokens queries grow: to 1.9 times behind 64 of them.
        lambda: Ministral3Config(
            **SIZES,
            **GROUPED,
            head_dim=16,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.4,
            },
        ),
    ),
    Family("olmo", lambda: OlmoConfig(**SIZES, **GROUPED, attention_bias=True)),
    Family(
        "olmo3",
        lambda: Olmo3Config(**SIZES, **GROUPED, **MIXED_WINDOWS),
        whole=("qk",),
    ),
    # From here to ERNIE a head's coordinates are added up in another order, as Cohere's.
    Family(
        "glm",
        lambda: GlmConfig(**SIZES, **GROUPED, head_dim=16, attention_bias=True, rope_parameters=HALF_ROTARY),
        same_bits=False,
    ),
    Family(
        "glm4",
        lambda: Glm4Config(**SIZES, **GROUPED, head_dim=16, attention_bias=True, rope_parameters=HALF_ROTARY),
        same_bits=False,
    ),
    # And as Cohere's, they are rotated in float32.
    Family(
        "ernie4_5",
        lambda: Ernie4_5Config(**SIZES, **GROUPED, head_dim=16, use_bias=True),
        same_bits=False,
        exact=1e-4,
    ),
    Family(
        "nemotron",
        lambda: NemotronConfig(
            **SIZES, **GROUPED, head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters=HALF_ROTARY
        ),
    ),
    Family("arcee", lambda: ArceeConfig(**SIZES, **GROUPED, attention_bias=True, mlp_bias=True)),
    Family(
        "apertus",
        lambda: ApertusConfig(**SIZES, **GROUPED, attention_bias=True, rope_parameters=WHOLE_ROTARY),
        whole=("qk",),
    ),
    Family(
        "seed_oss",
        lambda: SeedOssConfig(
            **SIZES, **GROUPED, head_dim=16, attention_bias=True, attention_out_bias=True, mlp_bias=True
        ),
    ),
    # From here on some layers have no rotary embedding.
    Family("smollm3", lambda: SmolLM3Config(**SIZES, **GROUPED, attention_bias=True, no_rope_layers=[1, 0, 1])),
    Family(
        "cohere2",
        lambda: Cohere2Config(**SIZES, **GROUPED, **MIXED_WINDOWS, head_dim=16, attention_bias=True),
        same_bits=False,
        exact=1e-4,
    ),
    Family(
        "exaone4",
        lambda: Exaone4Config(**SIZES, **GROUPED, **MIXED_WINDOWS),
        whole=("qk",),
    ),
    Family(
        "exaone4-rotary",
        lambda: Exaone4Config(**SIZES, **GROUPED, sliding_window=None, layer_types=["full_attention"] * 3),
        whole=("qk",),
    ),
    Family("starcoder2", lambda: Starcoder2Config(**SIZES, **GROUPED, sliding_window=WINDOW)),
]


def tokens(rows: int = 2, length: int = 20, seed: int = 1) -> Tensor:
    """Return random token ids without the padding token."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
