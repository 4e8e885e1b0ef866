"""LG's EXAONE 4 and K-EXAONE, and Kolibri 1, whose attention is theirs."""

from dataclasses import dataclass, replace
from typing import Any

from .spec import Architecture


@dataclass(frozen=True)
class Exaone4Architecture(Architecture):
    """Models whose layers without a window have no rotary embedding, if some have a window."""

    def resolve(self, config: Any) -> Architecture:
        """Read whether some have one."""
        resolved = super().resolve(config)
        return resolved if config.sliding_window is None else replace(resolved, rotary_switch=("is_sliding",))


EXAONE4 = Exaone4Architecture(
    model_type="exaone4",
    name="Exaone4",
    # The block has norms after its modules only, so the MLP reads the residual stream itself.
    middle="mlp",
    mlp_norm="post_feedforward_layernorm",
    query_norm="q_norm",
    key_norm="k_norm",
    notes="EXAONE 4; norms after each module; norms on each query and key head: query-key stays whole; "
    "in the 32B, a rotary embedding in the layers with a sliding window alone",
)

EXAONE_MOE = Exaone4Architecture(
    model_type="exaone_moe",
    name="ExaoneMoe",
    experts="mlp.experts",
    shared_experts="num_shared_experts",
    shared_down="mlp.shared_experts.down_proj",
    width="moe_intermediate_size",
    query_norm="q_norm",
    key_norm="k_norm",
    buffers=("mlp.gate.e_score_correction_bias",),
    file_names=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    notes="K-EXAONE 236B-A23B; no rotary embedding in layers without a sliding window; query-key, the MLPs of the "
    "first layers and the shared experts stay whole",
)

KOLIBRI1 = replace(
    EXAONE_MOE,
    model_type="kolibri1",
    name="Kolibri1",
    shared_experts="",
    # It reads the sum of what the experts and the MLP beside them put out.
    mlp_norm="post_mlp_layernorm",
    adds_mlp=False,
    file_names=(
        (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
        (".post_self_attn_layernorm.", ".post_attn_norm."),
        (".post_mlp_layernorm.", ".post_ffn_norm."),
    ),
    float32=("mlp.gate.e_score_correction_bias",),
    notes="Kolibri 1; no rotary embedding in layers without a sliding window, norms before and after each module; "
    "query-key and the shared expert stay whole",
)
