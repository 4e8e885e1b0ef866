"""Llama (1 to 3.3, and what copies it: SmolLM, TinyLlama, Yi, Vicuna)."""

from dataclasses import replace

from .spec import Architecture

LLAMA = Architecture(
    model_type="llama",
    name="Llama",
    notes="Llama 1 to 3.3, SmolLM, TinyLlama, Vicuna; grouped queries, projection biases, scaled rotary embeddings",
)

INTERNLM3 = replace(LLAMA, model_type="internlm3", notes="InternLM 3 8B; the result is a `modegpt_llama`")
IQUESTCODER = replace(LLAMA, model_type="iquestcoder", notes="IQuest-Coder-V1; the result is a `modegpt_llama`")
EXAONE = replace(
    LLAMA,
    model_type="exaone",
    file_names=(
        ("model.embed_tokens.", "transformer.wte."),
        ("model.layers.", "transformer.h."),
        ("model.norm.", "transformer.ln_f."),
        (".self_attn.o_proj.", ".attn.attention.out_proj."),
        (".self_attn.", ".attn.attention."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
        (".mlp.gate_proj.", ".mlp.c_fc_0."),
        (".mlp.up_proj.", ".mlp.c_fc_1."),
        (".mlp.down_proj.", ".mlp.c_proj."),
    ),
    notes="EXAONE 3 and 3.5, with transformers 5.24 or newer; the result is a `modegpt_llama`",
)
"""Families of a config of their own that transformers runs with Llama's classes."""
