"""Qwen 2 and 2.5."""

from .spec import Architecture

QWEN2 = Architecture(
    model_type="qwen2", name="Qwen2", notes="Qwen 2 and 2.5; query, key and value biases, sliding window by layer"
)
