"""gpt-oss."""

from .spec import Architecture

GPT_OSS = Architecture(
    model_type="gpt_oss",
    name="GptOss",
    experts="mlp.experts",
    expert_biases=True,
    n_experts="num_local_experts",
    sinks="sinks",
    notes="gpt-oss 20B and 120B; attention with its sinks and every expert are cut, 4-bit files are unpacked",
)
