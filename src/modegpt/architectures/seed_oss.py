"""ByteDance's Seed-OSS."""

from .spec import Architecture

SEED_OSS = Architecture(
    model_type="seed_oss",
    name="SeedOss",
    output_dropout="residual_dropout",
    notes="Seed-OSS 36B; biases of query, key and value, heads wider than the model",
)
