"""Opens what a user calls MODEL: a hub name, a local folder, or a `.gguf` file; dense or compressed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from ..architectures import ARCHITECTURES, Architecture, architecture_of
from ..blocks import tied_tensors
from ..checkpoint import assemble
from ..errors import InputError, refused
from ..formats.checkpoint_files import find_tensors
from ..formats.packed import Packing, packing, plain
from ..formats.text_part import CONVERTED, KEY_MAPPING, has_text_part, text_part
from .places import check_no_adapter, local_folder, locate, opening
from .shards import open_shards
from .stored_tensors import check_packing


def resolve_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:1` means here.

    Raises:
        InputError: it is malformed, or there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise InputError(f"device '{name}' is unknown; give auto, cpu, cuda or cuda:N") from problem
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device '{name}' is not supported; give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device '{name}' is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def own_dtype(config: Any) -> torch.dtype:
    """Return the dtype that a model's config says its weights have; float32 where it says none."""
    own = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, own) if isinstance(own, str) else own  # saving a model leaves its config with the name


def compute_dtype(device: torch.device, own: torch.dtype) -> torch.dtype:
    """Return the dtype to run a model in: its own on a GPU, float32 or more on a CPU, where half precision crawls."""
    return torch.float32 if device.type == "cpu" and own.itemsize < torch.float32.itemsize else own


def open_config(name: str) -> PreTrainedConfig:
    """Read a model's config, and nothing else of it; of a multimodal model that of its language model.

    Of a model whose weights are packed it is that of the unpacked one (`formats.packed.plain`).

    Raises:
        InputError: there is no such model, or its config cannot be read.
    """
    return plain(text_part(outer_config(name)))


def outer_config(name: str) -> PreTrainedConfig:
    """Read a model's config as it is, that of a multimodal model whole; see `open_config`."""
    location, arguments = locate(name)
    with opening(f"model '{name}'"):
        if arguments:
            return copy.deepcopy(_gguf_config(location, **arguments, written=Path(name).stat().st_mtime_ns))
        return AutoConfig.from_pretrained(location, trust_remote_code=False)


@lru_cache(maxsize=1)
def _gguf_config(folder: str, gguf_file: str, written: int) -> PreTrainedConfig:
    """Read the config of a `.gguf` file once in a run: with its whole vocabulary, transformers takes seconds to."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, gguf_file=gguf_file)


def check_model(name: str) -> tuple[PreTrainedConfig, Architecture]:
    """Return the config and architecture of a model that can be compressed.

    Raises:
        InputError: it cannot be read, is already compressed, is of an unsupported family, or has an adapter beside it.
    """
    config = open_config(name)
    check_no_adapter(name)
    return config, architecture_of(config)


def open_model(name: str, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu") -> PreTrainedModel:
    """Load a dense or compressed causal language model in evaluation mode; of a multimodal one its language model.

    Args:
        name: hub name, folder or `.gguf` file. Quantized weights of the latter are unpacked; floats of 8 or 4
            bits of a supported family are, too (`formats.packed`).
        dtype: of the weights in memory; `auto` keeps the stored one, float32 on a CPU.
        device: where to put the model.

    Raises:
        InputError: it cannot be read, or its files lack a weight (which transformers would fill with random numbers).
    """
    return load_model(name, dtype, device)[0]


def load_model(
    name: str, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model as `open_model` does, and return beside it the tensors in its files that have no place in it."""
    location, arguments = locate(name)
    device = torch.device(device)
    config = outer_config(name)
    if arguments:
        from transformers import GgufConfig

        arguments |= {"quantization_config": GgufConfig(dequantize=True), "config": config}
    said = text_part(config)
    packed, language = packing(said), plain(said)
    if dtype == "auto":
        dtype = compute_dtype(device, own_dtype(language))
    if (packed is not None or config.model_type in CONVERTED) and language.model_type in ARCHITECTURES:
        model = _open_by_tensor(name, language, packed, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model.to(device), []  # pyright: ignore[reportArgumentType]
    if packed is None and Path(name).is_dir():
        check_packing(find_tensors(Path(name)), None)
    if has_text_part(config):
        arguments |= {"config": said, "key_mapping": KEY_MAPPING}
    # It would list every weight of the towers.
    with quietly(and_silently=has_text_part(config)), refused(f"model '{name}' cannot be loaded"):
        # With the loading info it returns a pair, which transformers' types do not say.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
        model, loading = loaded
    if unlike := sorted(loading["mismatched_keys"]):
        key, stored, wanted = unlike[0][:3]
        raise InputError(
            f"the files of model '{name}' hold '{key}' in shape {tuple(stored)}, and its config asks for "
            f"{tuple(wanted)}: fetch it again, or mend its config"
        )
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"the files of model '{name}' lack the weight '{missing[0]}'{more}: fetch it again, or mend its config"
        )
    scales = [key for key in loading["unexpected_keys"] if key.endswith(("weight_scale", "weight_scale_inv"))]
    if packed is None and scales:
        raise InputError(
            f"the files of model '{name}' hold '{scales[0]}', and its config does not say how it is quantized"
        )
    if "key_mapping" in arguments:
        model._weight_conversions = None  # with which `save_pretrained` would turn the names round, into nonsense
    if not tied_tensors(model):
        model.config.tie_word_embeddings = False  # its files say so
    return model.to(device).eval(), [] if "key_mapping" in arguments else sorted(loading["unexpected_keys"])


@contextmanager
def quietly(and_silently: bool) -> Iterator[None]:
    """While the context is open, transformers shows no bars; and tells nothing but errors, if that is asked for."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    if and_silently:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _open_by_tensor(name: str, config: PreTrainedConfig, packed: Packing | None, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model tensor by tensor, as in a run: of weights in 8 or 4 bits, unpacked, or of a type in `CONVERTED`.

    transformers leaves some formats packed, and takes blocks that do not divide a weight to be smaller than they are.
    """
    folder = local_folder(name)
    config.dtype = dtype
    shards = "it is a file" if folder is None else open_shards(folder, config, dtype, torch.device("cpu"), packed)
    if isinstance(shards, str) or folder is None:
        these = "these weights are read" if packed is None else f"weights in {packed.bits} bits are unpacked"
        raise InputError(f"{these} tensor by tensor, and this model cannot be read so: {shards}")
    model = assemble(type(shards.model), config, shards.whole())
    model.config._name_or_path = name
    model.generation_config = read_generation_config(folder, model)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def read_generation_config(folder: Path, model: PreTrainedModel) -> GenerationConfig | None:
    """Return the generation settings in a model folder; without any, those of a model made of its config."""
    if (folder / "generation_config.json").is_file():
        with refused(f"transformers refuses '{folder / 'generation_config.json'}'"):
            return GenerationConfig.from_pretrained(folder)
    return model.generation_config


def beyond_vocabulary(ids: Tensor, model: PreTrainedModel) -> tuple[int, int, int] | None:
    """Return the least and greatest of some token ids and how many the model knows, if it does not know them all."""
    low, high = (int(bound) for bound in ids.aminmax())
    rows = len(_embedding(model))
    return (low, high, rows) if low < 0 or high >= rows else None


def device_of(model: PreTrainedModel) -> torch.device:
    """Return where token ids go: to the embedding; where accelerate keeps that elsewhere, to the first weight in place.

    From there, or from the CPU if no weight is in place, accelerate moves them itself.
    """
    weights = (_embedding(model), *model.parameters())
    return next((weight.device for weight in weights if not weight.is_meta), torch.device("cpu"))


def _embedding(model: PreTrainedModel) -> Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight
