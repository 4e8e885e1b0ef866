"""Llama (1 to 3.3, and what copies it: SmolLM, TinyLlama, Yi, Vicuna)."""

from .spec import Architecture

LLAMA = Architecture(
    model_type="llama",
    name="Llama",
    notes="Llama 1 to 3.3, SmolLM, TinyLlama, Vicuna; grouped queries, projection biases, scaled rotary embeddings",
)
