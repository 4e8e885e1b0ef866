"""The token that some families need before every window of text."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GemmaConfig, GemmaForCausalLM, PreTrainedTokenizerFast

import modegpt
from modegpt import CompressionConfig, InputError
from modegpt.calibration import begin_windows, load_text, start_token, tokenize
from modegpt.comparing.in_turn import measure, open_texts
from modegpt.running.text import open_text


@given(n_tokens=st.integers(0, 60), seq_len=st.integers(2, 9))
def test_begun_windows_hold_the_text_behind_the_start_token(n_tokens: int, seq_len: int):
    tokens = torch.arange(n_tokens)
    assert begin_windows(tokens, seq_len, None) is tokens
    windows = begin_windows(tokens, seq_len, 99).view(-1, seq_len)
    assert (windows[:, 0] == 99).all()
    assert torch.equal(windows[:, 1:].flatten(), tokens[: len(windows) * (seq_len - 1)])
    assert n_tokens - len(windows) * (seq_len - 1) < seq_len - 1


@pytest.mark.parametrize("model_type", ["gemma", "modegpt_gemma2", "gemma3_text", "llama", "modegpt_llama", "bert"])
def test_only_gemma_has_a_start_token(model_type: str):
    config, tokenizer = SimpleNamespace(model_type=model_type), SimpleNamespace(bos_token_id=2)
    assert start_token(config, tokenizer) == (2 if "gemma" in model_type else None)


def test_a_text_shorter_than_a_window_has_the_tokens_that_it_has(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|end|>"
    (tmp_path / "short.txt").write_text("a few words")
    n_tokens = len(tokenize("a few words", tokenizer))
    said = f"has {n_tokens} tokens, fewer than one window of {n_tokens + 2}, the model's first token among them"
    with pytest.raises(InputError, match=said):
        open_texts([str(tmp_path / "short.txt")], GemmaConfig(), tokenizer, n_tokens + 2)


def test_gemma_is_compressed_and_measured_on_windows_that_begin(
    tiny_tokenizer: PreTrainedTokenizerFast, small_text_file: Path, tmp_path: Path
):
    config = GemmaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    GemmaForCausalLM(config).save_pretrained(tmp_path / "dense")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|end|>"
    tokenizer.save_pretrained(tmp_path / "dense")
    settings = CompressionConfig(samples=4, seq_len=16, sampling="sequential")
    text = open_text(small_text_file, settings, str(tmp_path / "dense"), None)
    assert text.about["start_token"] == tokenizer.bos_token_id
    plain = tokenize(load_text(str(small_text_file), "calibration"), tokenizer)
    assert torch.equal(text.windows, begin_windows(plain, 16, tokenizer.bos_token_id)[: 4 * 16].view(4, 16))

    compressed = modegpt.compress(tmp_path / "dense", small_text_file, settings, out=tmp_path / "out")
    (result,), _ = measure([str(tmp_path / "out")], [str(small_text_file)], seq_len=16, max_windows=3)
    expected = modegpt.perplexity(compressed, begin_windows(plain, 16, tokenizer.bos_token_id), 16, 3).perplexity
    assert result["results"][0]["perplexity"] == pytest.approx(expected, rel=1e-6)  # the same weights, read back
    assert result["protocol"]["start_token"] == tokenizer.bos_token_id
