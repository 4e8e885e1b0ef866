"""Kimi Linear, and Ling 3, which is built like it."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .deepseek import DEEPSEEK_V3
from .spec import Architecture


@dataclass(frozen=True)
class KimiLinearArchitecture(Architecture):
    """Its linear attention has the name of the latent one of other layers."""

    def mixing(self, block: nn.Module) -> list[tuple[Any, bool]]:
        """Return every module of a block that mixes tokens: linear attention puts out a tensor, and no pair."""
        return [(module, not hasattr(module, "forget_gate")) for module, _as_pair in super().mixing(block)]


KIMI_LINEAR = KimiLinearArchitecture(
    model_type="kimi_linear",
    name="KimiLinear",
    whole_attention=True,
    key=DEEPSEEK_V3.key,
    value=DEEPSEEK_V3.key,
    upcast_mixers=True,
    experts=DEEPSEEK_V3.experts,
    n_experts="num_experts",
    shared_experts="num_shared_experts",
    shared_down=DEEPSEEK_V3.shared_down,
    width=DEEPSEEK_V3.width,
    buffers=DEEPSEEK_V3.buffers,
    float32=(*DEEPSEEK_V3.float32, "forget_gate.dt_bias"),
    file_names=(
        (".mlp.", ".block_sparse_moe."),
        (".forget_gate.", "."),
    ),
    expert_files=(
        "block_sparse_moe.experts.{}.w1",
        "block_sparse_moe.experts.{}.w3",
        "block_sparse_moe.experts.{}.w2",
    ),
    joined_files=((".conv1d.", (".q_conv1d.", ".k_conv1d.", ".v_conv1d.")),),
    notes="Kimi Linear 48B-A3B; the experts alone: linear and latent attention, the MLP of the first layer and the "
    "shared expert stay whole",
)

LING_3 = replace(
    KIMI_LINEAR,
    model_type="bailing_hybrid",
    name="BailingHybrid",
    float32=(*KIMI_LINEAR.float32, "forget_gate.A_log", "self_attn.conv1d.weight"),
    file_names=(
        (".self_attn.", ".attention."),
        (".o_proj.", ".dense."),
        (".forget_gate.", "."),
        (".e_score_correction_bias", ".expert_bias"),
        (".embed_tokens.", ".word_embeddings."),
    ),
    expert_files=DEEPSEEK_V3.expert_files,
    notes="Ling 3 Flash; as `kimi_linear`, with a gate on the latent attention's output",
)
