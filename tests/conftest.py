"""Small models and texts that the tests share; everything is made here, in the process, from fixed seeds."""

import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 384
"""The 256 bytes and some merges: enough that words become several tokens, few enough to train in a moment."""


@pytest.fixture(scope="session")
def small_text() -> str:
    """About 60,000 characters of English prose about Python."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))[:60_000]


@pytest.fixture(scope="session")
def tiny_tokenizer(small_text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, so that any text has tokens and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([small_text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A random Llama with grouped queries, saved with its tokenizer. Read it, do not write into it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_text_file(tmp_path_factory: pytest.TempPathFactory, small_text: str) -> Path:
    """The small text as a `.txt` file."""
    file = tmp_path_factory.mktemp("text") / "small.txt"
    file.write_text(small_text, encoding="utf-8")
    return file
