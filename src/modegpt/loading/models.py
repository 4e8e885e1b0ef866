"""Opens what a user calls MODEL: a hub name, a local folder, or a `.gguf` file; dense or compressed."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from ..architectures import ARCHITECTURES, Architecture, architecture_of
from ..blocks import tied_tensors
from ..checkpoint import assemble
from ..errors import InputError, MissingExtraError, first_line, refused
from ..formats.packed import Packing, packing, plain
from ..formats.text_part import KEY_MAPPING, has_text_part, text_part
from .shards import open_shards
from .stored_tensors import check_packing, find_tensors

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


VOCABULARY = "tokenizer.model"
"""A SentencePiece model: transformers makes a `tokenizer.json` of it and leaves it out when it saves."""


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
    """Return the dtype to run a model in: its own on a GPU, float32 on a CPU, where half precision crawls."""
    return torch.float32 if device.type == "cpu" else own


def _where(name: str) -> tuple[str, dict[str, Any]]:
    """Split a MODEL into the path or hub name and the arguments that transformers' `from_pretrained` needs."""
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"model file '{name}' does not exist; give a .gguf file, a model folder or a hub name")
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtraError("opening a .gguf file", "gguf", "gguf")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"model folder '{name}' has no config.json; give a folder that save_pretrained wrote")
    if path.is_file():
        raise InputError(f"model '{name}' is a file; give a model folder, a .gguf file or a hub name")
    if not path.is_dir():
        try:
            validate_repo_id(name)
        except HFValidationError as problem:
            raise InputError(
                f"model '{name}' does not exist; give a model folder, a .gguf file or a hub name"
            ) from problem
    return name, {}


def local_folder(name: str) -> Path | None:
    """Return the folder of a model's files: a local one, or the hub's cache of it; None for a `.gguf` file."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return None
    try:
        # `consolidated*` of Mistral's repositories are the same weights once more.
        return Path(
            snapshot_download(
                name, allow_patterns=["*.safetensors", "*.json", VOCABULARY], ignore_patterns="consolidated*"
            )
        )
    except (OSError, ValueError, HfHubHTTPError) as problem:
        raise InputError(f"model '{name}' cannot be fetched: {first_line(problem)}") from problem


def open_config(name: str) -> PreTrainedConfig:
    """Read a model's config, and nothing else of it; of a multimodal model that of its language model.

    Of a model whose weights are packed it is that of the unpacked one (`formats.packed.plain`).

    Raises:
        InputError: there is no such model, or its config cannot be read.
    """
    return plain(text_part(outer_config(name)))


def outer_config(name: str) -> PreTrainedConfig:
    """Read a model's config as it is, that of a multimodal model whole; see `open_config`."""
    location, arguments = _where(name)
    with refused(f"model '{name}' cannot be opened"):
        return AutoConfig.from_pretrained(location, **arguments)


def check_model(name: str) -> tuple[PreTrainedConfig, Architecture]:
    """Return the config and architecture of a model that can be compressed.

    Raises:
        InputError: it cannot be read, is already compressed, or is of an unsupported family.
    """
    config = open_config(name)
    return config, architecture_of(config)


def has_tokenizer(name: str) -> bool:
    """Whether a local folder holds a tokenizer; hub names and `.gguf` files are taken to have one."""
    path = Path(name)
    return not path.is_dir() or any((path / file).is_file() for file in TOKENIZER_FILES)


def open_tokenizer(name: str) -> Any:
    """Open a model's tokenizer.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    location, arguments = _where(name)
    if not has_tokenizer(name):
        # transformers would make up an empty tokenizer for some families.
        raise InputError(f"model folder '{name}' has no tokenizer; save the tokenizer beside the model")
    with refused(f"the tokenizer of '{name}' cannot be opened"):
        return without_mistral_common(AutoTokenizer.from_pretrained(location, **arguments))


def without_mistral_common(tokenizer: Any) -> Any:
    """Return a tokenizer that mistral-common has taken over as one of transformers' own, any other as it is.

    Where that package is installed it opens a Mistral's `tekken.json`, and saves nothing else. transformers does not
    ask it for a compressed model, and reads neither special tokens nor a chat template out of that file.
    """
    if type(tokenizer).__name__ != "MistralCommonBackend" or tokenizer._tokenizer_path.suffix != ".json":
        return tokenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    own = convert_tekken_tokenizer(str(tokenizer._tokenizer_path))
    own.add_bos_token = True  # as mistral-common does
    return own


def save_tokenizer(tokenizer: Any, folder: Path, source: str | None) -> None:
    """Save a tokenizer, and the SentencePiece model that it was made from, which llama.cpp's converter asks for.

    Args:
        tokenizer: to be saved.
        folder: to save it to.
        source: the model whose tokenizer it is, as `open_tokenizer` gave it; None for one of unknown origin.
    """
    without_mistral_common(tokenizer).save_pretrained(folder)
    if source is None:
        return
    place: Any = Path(source) / VOCABULARY
    if not Path(source).exists():
        place = try_to_load_from_cache(source, VOCABULARY)
    if isinstance(place, (str, Path)) and Path(place).is_file():
        shutil.copyfile(place, folder / VOCABULARY)


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
    location, arguments = _where(name)
    device = torch.device(device)
    config = outer_config(name) if dtype == "auto" or not arguments else None  # of a .gguf file it takes seconds
    if arguments:
        from transformers import GgufConfig

        arguments["quantization_config"] = GgufConfig(dequantize=True)
    said = None if config is None else text_part(config)
    packed, language = packing(said), plain(said)
    if dtype == "auto":
        dtype = compute_dtype(device, own_dtype(language))
    if packed is not None and language.model_type in ARCHITECTURES:
        model = _open_packed(name, language, packed, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return model.to(device)  # pyright: ignore[reportArgumentType]
    if packed is None and Path(name).is_dir():
        check_packing(find_tensors(Path(name)), None)
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    if config is not None and has_text_part(config):
        arguments |= {"config": text_part(config), "key_mapping": KEY_MAPPING}
        transformers_logging.set_verbosity_error()  # it would list every weight of the towers
    try:
        with refused(f"model '{name}' cannot be loaded"):
            # With the loading info it returns a pair, which transformers' types do not say.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                location, dtype=dtype, output_loading_info=True, **arguments
            )
            model, loading = loaded
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
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
    return model.to(device).eval()


def _open_packed(name: str, config: PreTrainedConfig, packed: Packing, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model whose weights are in 8 or 4 bits, unpacked as in a run.

    transformers leaves some formats packed, and takes blocks that do not divide a weight to be smaller than they are.
    """
    folder = local_folder(name)
    config.dtype = dtype
    shards = "it is a file" if folder is None else open_shards(folder, config, dtype, torch.device("cpu"), packed)
    if isinstance(shards, str) or folder is None:
        raise InputError(
            f"weights in {packed.bits} bits are unpacked tensor by tensor, and this model cannot be read so: {shards}"
        )
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
