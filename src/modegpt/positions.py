"""How many positions a model knows."""

from typing import Any


def position_limit(config: Any) -> int | None:
    """Return the longest sequence that the model of a config takes; None where it names none (BLOOM)."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
