"""The supported model families: one declarative file each, gathered here."""

from typing import Any

from ..errors import InputError
from ..formats.packed import packing, quantization
from ..formats.text_part import MULTIMODAL, has_text_part
from .afmoe import AFMOE
from .apertus import APERTUS
from .arcee import ARCEE
from .bloom import BLOOM
from .cohere import COHERE, COHERE2, COHERE2_MOE
from .cwm import CWM
from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32
from .dimensions import Dimensions
from .dots1 import DOTS1
from .ernie import ERNIE4_5, ERNIE4_5_MOE
from .exaone4 import EXAONE4, EXAONE_MOE, KOLIBRI1
from .falcon import FALCON
from .falcon_h1 import FALCON_H1
from .flint import FLINT
from .gemma import GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT, VAULTGEMMA
from .glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN
from .glm_moe_dsa import GLM_MOE_DSA
from .gpt2 import GPT2, GPT_BIGCODE
from .gpt_neo import GPT_NEO
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .gptj import CODEGEN, GPTJ
from .granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA, GRANITE_SWA
from .helium import HELIUM
from .hunyuan import HUNYUAN_V1_DENSE, HY_V3
from .hyperclovax import HYPERCLOVAX
from .jais2 import JAIS2
from .kimi import KIMI_LINEAR, LING_3
from .laguna import LAGUNA
from .lfm2 import LFM2, LFM2_MOE, LFM3
from .llama import EXAONE, INTERNLM3, IQUESTCODER, LLAMA
from .llama4 import LLAMA4_TEXT
from .mellum import MELLUM
from .mimo import MIMO_V2_FLASH
from .minicpm3 import MINICPM3
from .mistral import MINISTRAL, MINISTRAL3, MISTRAL
from .mixtral import MINIMAX_M2, MIXTRAL
from .mpt import MPT
from .nanochat import NANOCHAT
from .nemotron import NEMOTRON, NEMOTRON_H
from .olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMO_HYBRID, OLMOE
from .opt import OPT
from .phi import PHI, PHI3, PHIMOE
from .qwen2 import QWEN2, QWEN2_MOE
from .qwen3 import QWEN3, QWEN3_MOE
from .qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .spec import Architecture
from .stablelm import STABLELM
from .starcoder2 import STARCODER2

ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (
        LLAMA,
        LLAMA4_TEXT,
        INTERNLM3,
        IQUESTCODER,
        EXAONE,
        SMOLLM3,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_5_TEXT,
        QWEN3_5_MOE_TEXT,
        QWEN3_NEXT,
        FLINT,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        GEMMA4_TEXT,
        GEMMA4_UNIFIED_TEXT,
        VAULTGEMMA,
        OLMO,
        OLMO2,
        OLMO3,
        OLMOE,
        FLEX_OLMO,
        OLMO_HYBRID,
        STABLELM,
        GRANITE,
        GRANITE_MOE,
        GRANITE_MOE_SHARED,
        GRANITE_HYBRID,
        GRANITE_SWA,
        GRANITE_MOE_SWA,
        PHI,
        PHI3,
        PHIMOE,
        OPT,
        GPT2,
        GPT_BIGCODE,
        GPTJ,
        CODEGEN,
        GPT_NEO,
        GPT_NEOX,
        FALCON,
        FALCON_H1,
        BLOOM,
        MPT,
        COHERE,
        COHERE2,
        COHERE2_MOE,
        GLM,
        GLM4,
        GLM4_MOE,
        GLM4_MOE_LITE,
        SOLAR_OPEN,
        ERNIE4_5,
        ERNIE4_5_MOE,
        NEMOTRON,
        NEMOTRON_H,
        ARCEE,
        APERTUS,
        EXAONE4,
        EXAONE_MOE,
        KOLIBRI1,
        SEED_OSS,
        HUNYUAN_V1_DENSE,
        HY_V3,
        HYPERCLOVAX,
        HELIUM,
        JAIS2,
        CWM,
        LFM2,
        LFM2_MOE,
        LFM3,
        MIXTRAL,
        MINIMAX_M2,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        KIMI_LINEAR,
        LING_3,
        DOTS1,
        AFMOE,
        LAGUNA,
        MELLUM,
        MIMO_V2_FLASH,
        MINICPM3,
        NANOCHAT,
        STARCODER2,
    )
}


def architecture_of(config: Any) -> Architecture:
    """Return the architecture of a dense model's config.

    Raises:
        InputError: the model is already compressed or quantized, or its family or something in its config is not
            supported; the message says what.
    """
    model_type = config.model_type
    if getattr(config, "modegpt", None):
        raise InputError(f"the model is already compressed (model_type '{model_type}'): give the dense model")
    if about := quantization(config):
        what = f"the model is quantized ({about.get('quant_method', 'by a method that its config does not name')})"
        if packing(config) is not None:
            raise InputError(
                f"{what} and is given as an object: give its folder or hub name, whose weights are unpacked when read"
            )
        raise InputError(f"{what}: give its checkpoint in 16 or 32 bits, and quantize the compressed model")
    if has_text_part(config):
        raise InputError(
            f"the model is multimodal ('{model_type}') and is given as an object: give its folder or hub name, of "
            "which the language model is taken"
        )
    if model_type not in ARCHITECTURES:
        raise InputError(
            f"model type '{model_type}' is not supported; supported are: {', '.join(sorted(ARCHITECTURES))}, "
            f"and such language models in: {', '.join(MULTIMODAL)}"
        )
    return ARCHITECTURES[model_type].resolve(config)


__all__ = ["ARCHITECTURES", "Architecture", "Dimensions", "architecture_of"]
