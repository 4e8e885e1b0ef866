"""Tencent's dense HunYuan."""

from .spec import Architecture

HUNYUAN_V1_DENSE = Architecture(
    model_type="hunyuan_v1_dense",
    name="HunYuanDenseV1",
    query_norm="query_layernorm",
    key_norm="key_layernorm",
    rotary_first=True,
    notes="HunYuan 0.5B to 7B, dense; norms on each query and key head, after the rotary embedding: query-key stays "
    "whole",
)
