"""The families of the conformance suite: one entry each, a tiny random model that has all of the family's traps."""

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    BailingHybridConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    FalconConfig,
    FalconH1Config,
    FlexOlmoConfig,
    FlintConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    KimiLinearConfig,
    Kolibri1Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)

from modegpt.architectures import Architecture, Dimensions, architecture_of
from modegpt.checks.tiny import random_model
from modegpt.modeling_modegpt import ATTENTION_DEFAULTS
from modegpt.running.sizes import EXPERT_STEP

ExaoneConfig: Any = getattr(transformers, "ExaoneConfig", None)

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
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}

CAPPED: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    # Low enough that both caps bend what they cap.
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 20.0,
}
GEMMA_4: dict[str, Any] = {
    **GROUPED,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
GEMMA_4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}
STATES = 1e-4
"""Linear attention and Mamba compute in float32, chunk by chunk or token by token: 1e-5 of logits between 3 and 10,
which a state that was lost would change by their own size."""
ROUTED = 1e-5
"""Where the router computes in float32, in a float64 model too: its shares round at 6e-8, and the logits are near 10. A
token that was sent elsewhere would change them by their own size."""
SCORES = 1e-5
"""Where the stock scores, or their softmax, are float32, in a float64 model too: of size ten as logits are, they round
at 6e-7."""
SOFTMAX = 1e-4
"""Where the softmax is float32, in a float64 model too, as capped scores have no other kernel. A row of another length
may round otherwise, at 6e-8, of which three blocks make 1.2e-5 in logits near 10 (measured). A wrong key would change
them by their own size."""
MULTIPLIERS: dict[str, Any] = {
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 40, "num_experts": 3, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
GROUPED_EXPERTS: dict[str, Any] = {**ROUTED_EXPERTS, "first_k_dense_replace": 1}
LATENT: dict[str, Any] = {
    **GROUPED_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
LINEAR_HEADS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
LINEAR_EXPERTS: dict[str, Any] = {
    **NO_WIDTH,
    **GROUPED,
    **EXPERTS,
    "head_dim": 16,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **LINEAR_HEADS,
}
LLAMA_4: dict[str, Any] = {
    **SIZES,
    **GROUPED,
    "intermediate_size_mlp": 48,
    "head_dim": 16,
    "num_local_experts": 3,
    "moe_layers": [0, 2],
    "no_rope_layers": [1, 1, 0],
    "attention_chunk_size": WINDOW,
    "floor_scale": 5,
}
LINEAR_LATENT: dict[str, Any] = {
    **SIZES,
    **LATENT,
    "q_lora_rank": None,
    "num_experts": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
GRANITE_4: dict[str, Any] = {
    **SIZES,
    **GROUPED,
    **MULTIPLIERS,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "mamba_n_heads": 4,
}
NEMOTRON_H: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
    **GROUPED,
    **ROUTED_EXPERTS,
    "head_dim": 16,
    "mlp_bias": True,
    "moe_shared_expert_intermediate_size": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
GRANITE_SWASH: dict[str, Any] = {
    **SIZES,
    **GROUPED,
    **MULTIPLIERS,
    **MIXED_WINDOWS,
    "layer_rope_theta": [10000.0, 0, 500.0],
}


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

    stepwise: float = 1e-11
    """Allowed difference, in float64 as well, of logits read at once and piece by piece."""

    static: bool = True
    """Whether the stock model takes a static cache."""

    whole_mlps: tuple[int, ...] = ()
    """Layers whose MLP is not one of experts, and stays whole, or that have none."""

    def whole_in(self, layer: int) -> set[str]:
        """Return the modules that one layer keeps at their full rank."""
        return {*self.whole, *(["mlp"] if layer in self.whole_mlps else [])}

    def unranked_in(self, layer: int) -> set[str]:
        """Return those of them that have no rank: queries and keys behind norms have one, and keep it."""
        return self.whole_in(layer) - ({"qk"} if "vo" not in self.whole else set())

    @property
    def first_cut(self) -> int:
        """The first layer whose MLP has a rank."""
        return next(layer for layer in range(self.dims.n_layers) if layer not in self.whole_mlps)

    @property
    def n_attentions(self) -> int:
        """Layers with attention."""
        kinds = getattr(self.config(), "layer_types", None) or ["full_attention"] * self.dims.n_layers
        attending = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "hybrid")
        return sum(kind in attending for kind in kinds)

    @cached_property
    def architecture(self) -> Architecture:
        return architecture_of(self.config())

    @cached_property
    def dims(self) -> Dimensions:
        return self.architecture.dimensions(self.config())

    def dense(self, seed: int = 0) -> Any:
        """Return the dense model, float32, every parameter random: biases and norms too, which start at 0 and 1."""
        return random_model(self.config(), seed)

    def ranks(self) -> list[dict[str, int]]:
        """Return ranks that differ by layer and module: qk above vo and below it, and modules left whole."""
        dims = self.dims
        shares = [(0.65, 0.75, 0.375), (0.5, 0.375, 0.625), (1.0, 1.0, 0.25)]
        step, grain = 2 if dims.rotary_dim else 1, EXPERT_STEP if dims.n_experts else 1
        ranks = [
            {
                "mlp": round(mlp * full["mlp"] / grain) * grain,
                "qk": -(-round(qk * dims.d_head) // step) * step,
                "vo": round(vo * dims.d_head),
            }
            for (mlp, qk, vo), full in zip(itertools.cycle(shares), self.full_ranks(), strict=False)
        ]
        return [
            {**rank, **{module: full[module] for module in self.whole_in(layer)}}
            for layer, (rank, full) in enumerate(zip(ranks, self.full_ranks(), strict=True))
        ]

    def full_ranks(self) -> list[dict[str, int]]:
        """Return the ranks of the dense model, by layer."""
        widths = (self.architecture.layer_width(self.config(), layer) for layer in range(self.dims.n_layers))
        return [{**self.dims.full_ranks, "mlp": width} for width in widths]


FAMILIES = [
    # A head dim that is not hidden_size / heads, and every bias that the stock class offers.
    Family("llama-grouped", lambda: LlamaConfig(**SIZES, **GROUPED, head_dim=16, attention_bias=True, mlp_bias=True)),
    Family("llama-tied", lambda: LlamaConfig(**SIZES, tie_word_embeddings=True)),
    Family("internlm3", lambda: InternLM3Config(**SIZES, **GROUPED, head_dim=16, attention_bias=True, mlp_bias=True)),
    Family("iquestcoder", lambda: IQuestCoderConfig(**SIZES, **GROUPED, head_dim=16)),
    # Came with transformers 5.24.
    *([Family("exaone", lambda: ExaoneConfig(**SIZES, **GROUPED))] if ExaoneConfig else []),
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
        lambda: Gemma2Config(**SIZES, **GROUPED, **CAPPED),
        stepwise=SOFTMAX,
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
            **MULTIPLIERS,
            attention_bias=True,
        ),
    ),
    Family("phi", lambda: PhiConfig(**SIZES, rope_parameters=HALF_ROTARY)),
    Family(
        "phi-norm", lambda: PhiConfig(**SIZES, **GROUPED, qk_layernorm=True, rope_parameters=HALF_ROTARY), whole=("qk",)
    ),
    Family("phi3", lambda: Phi3Config(**SIZES, **GROUPED, sliding_window=WINDOW)),
    Family("phi3-partial", lambda: Phi3Config(**SIZES, **GROUPED, rope_parameters=HALF_ROTARY)),
    Family("gpt2", lambda: GPT2Config(**NO_WIDTH, scale_attn_by_inverse_layer_idx=True)),
    Family("gpt_bigcode", lambda: GPTBigCodeConfig(**NO_WIDTH)),
    Family("gpt_bigcode-heads", lambda: GPTBigCodeConfig(**NO_WIDTH, multi_query=False, scale_attn_weights=False)),
    # The stock scores, and their softmax, are float32. Half a head of GPT-J turns, and is added up in another order.
    Family("gptj", lambda: GPTJConfig(**NO_WIDTH, rotary_dim=4), same_bits=False, exact=SCORES, stepwise=SCORES),
    Family(
        "codegen",
        lambda: CodeGenConfig(**{**NO_WIDTH, "hidden_size": 64, "num_attention_heads": 8}, rotary_dim=4),
        same_bits=False,
        exact=SCORES,
        stepwise=SCORES,
    ),
    Family(
        "gpt_neo",
        lambda: GPTNeoConfig(**NO_WIDTH, attention_types=[[["global", "local", "local"], 1]], window_size=WINDOW),
        same_bits=False,
        exact=SCORES,
        stepwise=SCORES,
        static=False,
    ),
    Family("gpt_neox", lambda: GPTNeoXConfig(**SIZES, rope_parameters=HALF_ROTARY)),
    # Of 3 coordinates, 0.49 of a head, transformers turns 4.
    Family(
        "gpt_neox-odd", lambda: GPTNeoXConfig(**SIZES, rope_parameters={**WHOLE_ROTARY, "partial_rotary_factor": 0.49})
    ),
    Family(
        "gpt_neox-proportional",  # whose tables span whole heads all the same
        lambda: GPTNeoXConfig(**SIZES, rope_parameters={**HALF_ROTARY, "rope_type": "proportional"}),
    ),
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
    Family(
        "falcon-alibi",
        lambda: FalconConfig(**NO_WIDTH, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        same_bits=False,
        static=False,
    ),
    # Its own attention adds what ALiBi gives before it adds up a head's products, not behind.
    Family("bloom", lambda: BloomConfig(**NO_WIDTH), same_bits=False, stepwise=SCORES),
    Family(
        "bloom-normed",
        lambda: BloomConfig(**NO_WIDTH, apply_residual_connection_post_layernorm=True),
        same_bits=False,
        stepwise=SCORES,
    ),
    Family("mpt", lambda: MptConfig(**NO_WIDTH, max_seq_len=64, use_cache=True), stepwise=SCORES),
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
    ),
    Family(
        "minimax_m2",
        lambda: MiniMaxM2Config(
            **SIZES, **GROUPED, head_dim=16, num_local_experts=3, num_experts_per_tok=2, rope_parameters=HALF_ROTARY
        ),
        whole=("qk",),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    # Layers in turn with a window of 6, and an activation that its clamps bend.
    Family(
        "gpt_oss",
        lambda: GptOssConfig(
            **SIZES,
            **GROUPED,
            head_dim=16,
            num_local_experts=3,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            swiglu_limit=1.0,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    Family(
        "flint",
        lambda: FlintConfig(
            **SIZES,
            **GROUPED,
            **EXPERTS,
            **MIXED_WINDOWS,
            head_dim=16,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[0],
        ),
        whole=("qk",),
        whole_mlps=(0,),
        stepwise=SCORES,
    ),
    Family("qwen2_moe", lambda: Qwen2MoeConfig(**SIZES, **GROUPED, **EXPERTS, shared_expert_intermediate_size=24)),
    Family("qwen3_moe", lambda: Qwen3MoeConfig(**SIZES, **GROUPED, **EXPERTS, head_dim=16), whole=("qk",)),
    Family(
        "olmoe",
        lambda: OlmoeConfig(**SIZES, **GROUPED, num_experts=3, num_experts_per_tok=2),
        whole=("qk",),
    ),
    Family(
        "granitemoe",
        lambda: GraniteMoeConfig(**SIZES, **GROUPED, **MULTIPLIERS, num_local_experts=3, num_experts_per_tok=2),
    ),
    Family(
        "glm4_moe",
        lambda: Glm4MoeConfig(
            **SIZES, **GROUPED, **GROUPED_EXPERTS, head_dim=16, rope_parameters=HALF_ROTARY, attention_bias=True
        ),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "solar_open",
        lambda: SolarOpenConfig(
            **NO_WIDTH,
            **GROUPED,
            **ROUTED_EXPERTS,
            head_dim=16,
            attention_bias=True,
        ),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "glm4_moe-norm",
        lambda: Glm4MoeConfig(**SIZES, **GROUPED, **GROUPED_EXPERTS, head_dim=16, use_qk_norm=True),
        whole=("qk",),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "ernie4_5_moe",
        lambda: Ernie4_5_MoeConfig(
            **SIZES,
            **GROUPED,
            moe_intermediate_size=40,
            moe_num_experts=3,
            moe_k=2,
            moe_num_shared_experts=1,
            use_bias=True,
        ),
        same_bits=False,
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "deepseek_v2",
        lambda: DeepseekV2Config(**SIZES, **LATENT, topk_method="group_limited_greedy"),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "deepseek_v3",
        lambda: DeepseekV3Config(**SIZES, **LATENT),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "deepseek_v32",
        # Keys that share a score of 0 are picked as rounding has it: here all of them are.
        lambda: DeepseekV32Config(**SIZES, **LATENT, index_topk=64, index_head_dim=16, index_n_heads=2),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "glm_moe_dsa",
        # The last two layers attend to what the first has picked.
        lambda: GlmMoeDsaConfig(
            **SIZES,
            **LATENT,
            index_topk=64,
            index_head_dim=16,
            index_n_heads=2,
            indexer_types=["full", "shared", "shared"],
        ),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    # Linear attention, which has the name of the latent one of the layer between.
    Family(
        "kimi_linear",
        lambda: KimiLinearConfig(**LINEAR_LATENT, linear_num_heads=4, linear_head_dim=8),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=STATES,
    ),
    Family(
        "bailing_hybrid",
        lambda: BailingHybridConfig(**LINEAR_LATENT, head_dim=8),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=STATES,
    ),
    Family(
        "glm4_moe_lite",
        lambda: Glm4MoeLiteConfig(**SIZES, **LATENT),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "dots1",
        lambda: Dots1Config(**SIZES, **GROUPED, **GROUPED_EXPERTS, n_shared_experts=2, max_window_layers=3),
        whole=("qk",),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "exaone_moe",
        lambda: ExaoneMoeConfig(**SIZES, **GROUPED, **MIXED_WINDOWS, **EXPERTS, head_dim=16),
        whole=("qk",),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "kolibri1",
        lambda: Kolibri1Config(
            **NO_WIDTH, **GROUPED, **MIXED_WINDOWS, **EXPERTS, head_dim=16, shared_expert_intermediate_size=24
        ),
        whole=("qk",),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "hy_v3",
        lambda: HYV3Config(**SIZES, **GROUPED, **EXPERTS, head_dim=16, attention_bias=True),
        whole=("qk",),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "mellum",
        lambda: MellumConfig(
            **SIZES,
            **GROUPED,
            **MIXED_WINDOWS,
            **EXPERTS,
            head_dim=16,
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        whole=("qk",),
        whole_mlps=(0,),
    ),
    Family(
        "phimoe",
        lambda: PhimoeConfig(
            **SIZES,
            **GROUPED,
            num_local_experts=3,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.5,
        ),
    ),
    Family(
        "flex_olmo",
        lambda: FlexOlmoConfig(**SIZES, **GROUPED, num_experts=3, num_experts_per_tok=2),
        whole=("qk",),
    ),
    Family(
        "granitemoeshared",
        lambda: GraniteMoeSharedConfig(
            **SIZES,
            **GROUPED,
            **MULTIPLIERS,
            num_local_experts=3,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
        ),
    ),
    # A base of the rotary embedding for each layer, none for the one in the middle, and sinks.
    Family(
        "granite_swa",
        lambda: GraniteSWAConfig(**GRANITE_SWASH, attention_bias=True),
        exact=SCORES,
        stepwise=SCORES,
    ),
    Family(
        "granitemoe_swa",
        lambda: GraniteMoeSWAConfig(
            **GRANITE_SWASH, num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=24
        ),
        exact=SCORES,
        stepwise=SCORES,
    ),
    Family(
        "granitemoe_swa-alone",
        lambda: GraniteMoeSWAConfig(**GRANITE_SWASH, num_local_experts=3, num_experts_per_tok=2),
        exact=SCORES,
        stepwise=SCORES,
    ),
    # The first layer attends to all tokens and has positions by its MLP alone; the mean of experts and MLP beside them.
    Family(
        "cohere2_moe",
        lambda: Cohere2MoeConfig(
            **SIZES,
            **GROUPED,
            num_experts=3,
            num_experts_per_tok=2,
            num_shared_experts=1,
            prefix_dense_intermediate_size=24,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        same_bits=False,
        whole_mlps=(0,),
        exact=1e-4,
    ),
    Family(
        "afmoe",
        lambda: AfmoeConfig(**SIZES, **GROUPED, **MIXED_WINDOWS, **EXPERTS, head_dim=16, mup_enabled=True),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    # Experts whose sum is doubled, and a gate for each coordinate of the attention's output.
    Family(
        "laguna",
        lambda: LagunaConfig(
            **SIZES,
            **GROUPED,
            **MIXED_WINDOWS,
            **EXPERTS,
            head_dim=16,
            gating="per-element",
            shared_expert_intermediate_size=24,
            moe_routed_scaling_factor=2.0,
        ),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "mimo_v2_flash",
        lambda: MiMoV2FlashConfig(
            **SIZES,
            **GROUPED,
            **MIXED_WINDOWS,
            **ROUTED_EXPERTS,
            head_dim=16,
            v_head_dim=16,
            rope_parameters={"full_attention": HALF_ROTARY, "sliding_attention": HALF_ROTARY},
        ),
        whole=("qk", "vo"),
        whole_mlps=(0,),
        exact=ROUTED,
        stepwise=ROUTED,
    ),
    Family(
        "minicpm3",
        lambda: MiniCPM3Config(
            **SIZES,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
            dim_model_base=16,
            scale_emb=2,
            tie_word_embeddings=False,
        ),
        whole=("qk", "vo"),
    ),
    Family("nanochat", lambda: NanoChatConfig(**SIZES, **GROUPED), whole=("qk", "vo")),
    Family(
        "lfm2_moe",
        lambda: Lfm2MoeConfig(
            **SIZES,
            **GROUPED,
            **EXPERTS,
            num_dense_layers=1,
            layer_types=["conv", "full_attention", "conv"],
        ),
        whole=("qk", "vo"),
        whole_mlps=(0,),
    ),
    # Layers of all three kinds, and rotary tables of two.
    Family(
        "lfm3",
        lambda: Lfm3Config(
            **SIZES, **GROUPED, sliding_window=WINDOW, layer_types=["conv", "sliding_attention", "full_attention"]
        ),
        whole=("qk", "vo"),
    ),
    Family(
        "lfm3-plain",
        lambda: Lfm3Config(
            **SIZES,
            **GROUPED,
            layer_types=["conv", "full_attention", "conv"],
            use_sandwich_norm=False,
            use_attention_gate=False,
        ),
        whole=("qk", "vo"),
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
    # A block has one module: of the second model one has an MLP that is no mixture.
    Family(
        "nemotron_h",
        lambda: NemotronHConfig(**NEMOTRON_H, layers_block_type=["mlp", "linear_attention", "mlp", "full_attention"]),
        whole=("qk", "vo"),
        whole_mlps=(1, 3),
        stepwise=STATES,
    ),
    Family(
        "nemotron_h-experts",
        lambda: NemotronHConfig(
            **NEMOTRON_H, layers_block_type=["moe", "linear_attention", "moe", "full_attention", "mlp"]
        ),
        whole=("qk", "vo"),
        whole_mlps=(1, 3, 4),
        exact=ROUTED,
        stepwise=STATES,
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
    Family("hunyuan_v1_dense", lambda: HunYuanDenseV1Config(**SIZES, **GROUPED, head_dim=16), whole=("qk",)),
    Family(
        "hyperclovax",
        lambda: HyperCLOVAXConfig(**SIZES, **GROUPED, **MULTIPLIERS, attention_bias=True),
    ),
    Family(
        "hyperclovax-plain",
        lambda: HyperCLOVAXConfig(**SIZES, **GROUPED, **MULTIPLIERS, use_post_norm=False),
    ),
    Family("helium", lambda: HeliumConfig(**SIZES, **GROUPED, head_dim=8), same_bits=False),
    Family("jais2", lambda: Jais2Config(**SIZES, **GROUPED)),
    Family("cwm", lambda: CwmConfig(**SIZES, **GROUPED, **MIXED_WINDOWS, head_dim=16, rope_parameters=LLAMA_3)),
    Family(
        "vaultgemma",
        lambda: VaultGemmaConfig(**SIZES, **GROUPED, **CAPPED),
        stepwise=SOFTMAX,
    ),
    # From here to LFM2 what mixes tokens stays whole, and MLPs alone are cut.
    Family(
        "gemma4_text",
        # In the last layer, which has no window, heads are wider and keys are values, too.
        lambda: Gemma4TextConfig(**SIZES, **GEMMA_4, hidden_size_per_layer_input=0),
        whole=("qk", "vo"),
    ),
    Family(
        "gemma4_text-small",
        # Gemma 4 E2B: the last two layers read keys and values of the first two, and have MLPs twice as wide.
        lambda: Gemma4TextConfig(**{**SIZES, **GEMMA_4, **GEMMA_4_SMALL}),
        whole=("qk", "vo"),
    ),
    Family("gemma4_unified_text", lambda: Gemma4UnifiedTextConfig(**SIZES, **GEMMA_4), whole=("qk", "vo")),
    Family(
        "gemma4_text-experts",
        lambda: Gemma4TextConfig(
            **SIZES,
            **GEMMA_4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=3,
            top_k_experts=2,
            moe_intermediate_size=40,
        ),
        whole=("qk", "vo"),
    ),
    Family(
        "falcon_h1",
        # Attention and Mamba in every layer.
        lambda: FalconH1Config(
            **SIZES,
            **GROUPED,
            head_dim=16,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mlp_bias=True,
            mlp_multipliers=[0.5, 0.25],
            ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
            ssm_out_multiplier=0.5,
            attention_out_multiplier=0.7,
        ),
        whole=("qk", "vo"),
        stepwise=STATES,
    ),
    # From here on some layers mix tokens by something else than attention.
    Family(
        "qwen3_5_text",
        lambda: Qwen3_5TextConfig(
            **SIZES,
            **GROUPED,
            head_dim=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            **LINEAR_HEADS,
        ),
        whole=("qk", "vo"),
        stepwise=STATES,
    ),
    Family(
        "llama4_text",
        # The middle layer has an MLP in place of experts, the last one no rotary embedding and no chunks.
        lambda: Llama4TextConfig(**LLAMA_4),
        whole=("qk", "vo"),
        whole_mlps=(1,),
        exact=STATES,
        stepwise=STATES,
    ),
    Family("qwen3_5_moe_text", lambda: Qwen3_5MoeTextConfig(**LINEAR_EXPERTS), whole=("qk", "vo"), stepwise=STATES),
    Family("qwen3_next", lambda: Qwen3NextConfig(**LINEAR_EXPERTS), whole=("qk", "vo"), stepwise=STATES),
    Family(
        "granitemoehybrid",
        lambda: GraniteMoeHybridConfig(
            **GRANITE_4,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mamba_d_state=16,
        ),
        whole=("qk", "vo"),
        stepwise=STATES,
    ),
    Family(
        "olmo_hybrid",
        lambda: OlmoHybridConfig(
            **SIZES,
            **GROUPED,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            **LINEAR_HEADS,
            attention_bias=True,
        ),
        whole=("qk", "vo"),
        stepwise=STATES,
    ),
    Family(
        "granitemoehybrid-experts",
        lambda: GraniteMoeHybridConfig(
            **{**GRANITE_4, "num_local_experts": 3, "shared_intermediate_size": 24},
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            mamba_d_state=16,
        ),
        whole=("qk", "vo"),
        stepwise=STATES,
    ),
    Family(
        "granitemoehybrid-plain",
        lambda: GraniteMoeHybridConfig(
            **GRANITE_4, layer_types=["full_attention"] * 3, position_embedding_type="rope", attention_bias=True
        ),
    ),
    Family(
        "granitemoehybrid-nope",
        lambda: GraniteMoeHybridConfig(**GRANITE_4, layer_types=["full_attention"] * 3),
    ),
    Family(
        "lfm2",
        # Its MLPs are as wide as a multiple of 8 at two thirds of 58.
        lambda: Lfm2Config(
            **{**SIZES, "intermediate_size": 58},
            **GROUPED,
            layer_types=["conv", "full_attention", "conv"],
            block_multiple_of=8,
            tie_word_embeddings=False,
        ),
        whole=("qk", "vo"),
    ),
    Family("starcoder2", lambda: Starcoder2Config(**SIZES, **GROUPED, sliding_window=WINDOW)),
]


ONE_OF_EACH = "ONE_OF_EACH_ATTENTION"
"""The environment variable with which the suite runs those families alone."""
EVERY_FAMILY = "EVERY_FAMILY"
"""The environment variable with which all families stand for `covering`: for a new one, and before a release."""


def attention_way(family: Family) -> dict[str, Any]:
    """Return what decides which lines of the compressed attention a family runs; nothing where the stock one runs."""
    if family.architecture.whole_attention:
        return {}
    described, dims = ATTENTION_DEFAULTS | family.architecture.describe(), family.dims
    way: dict[str, Any] = {name: described[name] for name in (*ATTENTION_DEFAULTS, "scale_query")}
    way |= {f"{role} is query": described["query"] == described[role] for role in ("key", "value")}
    way |= {"no rotation": dims.rotary_dim == 0, "whole rotation": dims.rotary_dim == dims.d_head}
    return way | {"layer types": sorted(set(getattr(family.config(), "layer_types", None) or []))}


@cache
def one_of_each_attention() -> tuple[str, ...]:
    """Return the first family of each way in which the compressed attention runs, where it does.

    For what depends on that alone, and takes long: the others of a way run the same lines of it.
    """
    first: dict[str, str] = {}
    for family in FAMILIES:
        if way := attention_way(family):
            first.setdefault(repr(way), family.name)
    return tuple(first.values())


def traits(family: Family) -> set[str]:
    """Return what sets a family apart from others once it is compressed: of its attention, and of its block."""
    architecture, config = family.architecture, family.config()
    described = architecture.describe()
    block = {
        "whole attention": architecture.whole_attention,
        "mixers": architecture.mixers,
        "query": described["query"].rpartition(".")[2],
        "down": described["down"].rpartition(".")[2],
        "experts": bool(architecture.experts),
        "experts alone": bool(architecture.experts) and architecture.whole_attention,
        "inputs of the down projection": len(described["up"]),
        "gate and up in one": len(described["up"]) > len(set(described["up"])),
        "reads back": architecture.reads_back,
        "parallel": architecture.parallel,
        "what is added": (architecture.adds_mlp, bool(architecture.mlp_norm), architecture.mlp_factor == 1),
        "class": "causal_lm" in described,
        "tied": config.tie_word_embeddings,
    }
    return {f"{name}: {value!r}" for name, value in (attention_way(family) | block).items()}


@cache
def covering() -> tuple[str, ...]:
    """Return families that have each trait of any between them: some two dozen, found greedily.

    For what the libraries around do with a model (they copy, save, place, train and wrap it), which knows no family.
    """
    if os.environ.get(EVERY_FAMILY):
        return tuple(family.name for family in FAMILIES)
    having = {family.name: traits(family) for family in FAMILIES}
    left, chosen = set[str]().union(*having.values()), set[str]()
    while left:
        chosen.add(best := max(having, key=lambda name: len(having[name] & left)))
        left -= having[best]
    return tuple(name for name in having if name in chosen)


def among_covering(families: Iterable[Family]) -> list[Family]:
    """Return those of some families that `covering` names: for what the traits decide."""
    return [family for family in families if family.name in covering()]


@cache
def covering_attention() -> tuple[str, ...]:
    """Return those of them whose compressed attention runs: every trait of it, but not every combination."""
    return tuple(name for name in covering() if attention_way(next(f for f in FAMILIES if f.name == name)))


if os.environ.get(ONE_OF_EACH):
    FAMILIES = [family for family in FAMILIES if family.name in one_of_each_attention()]
    one_of_each_attention.cache_clear()


def tokens(rows: int = 2, length: int = 20, seed: int = 1) -> Tensor:
    """Return random token ids without the padding token."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
