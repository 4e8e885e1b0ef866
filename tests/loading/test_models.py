"""What a model's files are opened as, where more than one tool can read them."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, MistralConfig

from modegpt import CompressionConfig, compress
from modegpt.checks.tiny import random_model
from modegpt.loading.tokenizers import open_tokenizer, save_tokenizer

SPECIAL = 32
"""Tokens before those of bytes: the package knows twenty, and names the rest by number."""
TEXT = "Ein Satz, 12 Zahlen\n  and l'été."


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mistral whose tokenizer, of bytes, is a `tekken.json` alone."""
    pytest.importorskip("mistral_common", reason="without it nothing but transformers opens a tokenizer")
    folder = tmp_path_factory.mktemp("mistral")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    random_model(MistralConfig(**sizes, num_hidden_layers=2, vocab_size=SPECIAL + 256)).save_pretrained(folder)
    config = {"pattern": r" ?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+", "version": "v3", "num_vocab_tokens": 256}
    config |= {"default_vocab_size": SPECIAL + 256, "default_num_special_tokens": SPECIAL}
    vocabulary = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary}))
    return folder


def reads(tokenizer: Any) -> list[Any]:
    """What a tokenizer makes of a text and of a chat, and its ends."""
    chat = [{"role": "user", "content": TEXT}]
    ids = [tokenizer(TEXT, add_special_tokens=added).input_ids for added in (False, True)]
    chat = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    return [*ids, chat, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_a_tokenizer_of_mistral_common_is_saved_whole(mistral: Path, tmp_path: Path):
    own = AutoTokenizer.from_pretrained(mistral)
    assert type(own).__name__ == "MistralCommonBackend"
    ids = own(TEXT * 20, return_tensors="pt", add_special_tokens=False).input_ids[:, :64].reshape(4, 16)
    for name, of_the_user in (("opened", None), ("given", own)):
        out = tmp_path / name
        compress(str(mistral), ids, CompressionConfig(sparsity=0.2), out=out, tokenizer=of_the_user)
        assert {"tokenizer.json", "chat_template.jinja"} <= {file.name for file in out.iterdir()}
        assert reads(AutoTokenizer.from_pretrained(out)) == reads(own)
        # By this `report` tells whether two models have one tokenizer.
        assert open_tokenizer(str(out)).get_vocab() == open_tokenizer(str(mistral)).get_vocab()


def test_what_the_disk_refuses_of_a_tokenizer_is_an_error_of_the_disk(tiny_llama_dir: Path, tmp_path: Path):
    """The tokenizers' own writer raises an exception of no class."""
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(IsADirectoryError):
        save_tokenizer(AutoTokenizer.from_pretrained(tiny_llama_dir), tmp_path, None)
