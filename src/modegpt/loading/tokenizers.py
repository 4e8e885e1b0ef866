"""Opens and saves the tokenizer of what a user calls MODEL."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoTokenizer

from ..errors import InputError
from .places import VOCABULARY, locate, opening

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def has_tokenizer(name: str) -> bool:
    """Whether a local folder holds a tokenizer; hub names and `.gguf` files are taken to have one."""
    path = Path(name)
    return not path.is_dir() or any((path / file).is_file() for file in TOKENIZER_FILES)


def open_tokenizer(name: str) -> Any:
    """Open a model's tokenizer.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    location, arguments = locate(name)
    if not has_tokenizer(name):
        # transformers would make up an empty tokenizer for some families.
        raise InputError(f"model folder '{name}' has no tokenizer; save the tokenizer beside the model")
    with opening(f"the tokenizer of '{name}'"):
        return without_mistral_common(AutoTokenizer.from_pretrained(location, trust_remote_code=False, **arguments))


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

    Raises:
        OSError: the disk refused a file; the tokenizers' own writer says so in an exception of no class.
    """
    try:
        without_mistral_common(tokenizer).save_pretrained(folder)
    except Exception as problem:
        if (number := re.search(r"\(os error (\d+)\)", str(problem))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from problem
    if source is None:
        return
    place: Any = Path(source) / VOCABULARY
    if not Path(source).exists():
        place = try_to_load_from_cache(source, VOCABULARY)
    if isinstance(place, (str, Path)) and Path(place).is_file():
        shutil.copyfile(place, folder / VOCABULARY)
