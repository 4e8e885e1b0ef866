import math
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, LlamaForCausalLM, MptConfig, OPTConfig

from modegpt import evaluate
from modegpt.errors import InputError, NumericalError
from modegpt.evaluate import check_window, perplexity

VOCABULARY = 50


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        # Larger than usual, so that a prediction depends on its context and a wrong shift or window shows.
        initializer_range=0.5,
        attention_dropout=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (107,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def by_hand(model: LlamaForCausalLM, tokens: torch.Tensor, seq_len: int, windows: int) -> float:
    """Mean loss over predicted tokens, one at a time, from the logits of exactly its context in its window."""
    losses = []
    for start in range(0, windows * seq_len, seq_len):
        for end in range(start + 1, start + seq_len):
            logits = model(tokens[None, start:end]).logits[0, -1].double()
            losses.append(-math.log(logits.softmax(0)[tokens[end]].item()))
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize("max_windows", [None, 2, 99])
def test_perplexity_equals_that_of_one_token_at_a_time(model, tokens, max_windows):
    result = perplexity(model, tokens, 25, max_windows)
    windows = 2 if max_windows == 2 else 4
    # Float32 logits of size 10 carry errors of 1e-6; the mean loss is near 5.
    assert result.nll == pytest.approx(by_hand(model, tokens, 25, windows), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nll), rel=1e-12)
    assert result[2:] == (24 * windows, windows, 25)


def test_an_embedding_that_accelerate_keeps_on_disk(model, tokens, tmp_path: Path):
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu"}
    for device_map in (places, {"": "disk"}):
        apart = LlamaForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "disk")
        )
        assert apart.get_input_embeddings().weight.is_meta
        assert perplexity(apart, tokens, 25) == perplexity(model, tokens, 25)


def test_first_token_of_a_window_is_not_predicted_from_the_one_before(model, tokens):
    changed = tokens.clone()
    changed[100:] = (changed[100:] + 1) % VOCABULARY
    # The last, partial window does not count; the last token of the last whole one does.
    assert perplexity(model, changed, 25) == perplexity(model, tokens, 25)
    changed[99] = (changed[99] + 1) % VOCABULARY
    assert perplexity(model, changed, 25).nll != perplexity(model, tokens, 25).nll


@pytest.mark.parametrize("batch_size", [1, 3, 10, 100])
def test_batch_size_does_not_matter_and_progress_counts_windows(model, tokens, batch_size):
    calls = []
    result = perplexity(model, tokens, 10, batch_size=batch_size, progress=lambda *call: calls.append(call))
    # Batches change the order in which float32 products are summed, by a few units of 1e-7 of a loss near 5.
    assert result.nll == pytest.approx(perplexity(model, tokens, 10, batch_size=2).nll, abs=1e-5)
    assert calls == [("evaluate", min(done, 10), 10) for done in range(batch_size, 10 + batch_size, batch_size)]


@pytest.mark.parametrize(
    ("seq_len", "vocabulary"), [(512, 49152), (2048, 128_256), (2048, 256_000), (8, 50), (16384, 50)]
)
def test_default_batch_bounds_logits_and_tokens(seq_len, vocabulary):
    batch = evaluate._default_batch(seq_len, vocabulary)
    assert batch >= 1
    assert batch == 1 or (batch * seq_len * vocabulary * 4 <= 2**30 and batch * seq_len <= 8192)
    # And one more would not fit.
    assert (batch + 1) * seq_len * vocabulary * 4 > 2**30 or (batch + 1) * seq_len > 8192


def test_loss_of_a_half_precision_model_is_computed_in_float32(model, tokens):
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        logits = model(tokens[:100].view(4, 25)).logits.double()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:100].view(4, 25)[:, 1:].flatten())
    # Float32 rounding only; in bfloat16 the loss would be off by 1e-2.
    assert perplexity(model, tokens, 25).nll == pytest.approx(loss.item(), abs=1e-5)


def test_losses_are_summed_in_float64(model, tokens):
    window = tokens[:30].view(1, 30)
    with torch.no_grad():
        logits = model(window).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none")
    # A mean of float32 numbers, to float64's rounding; a float32 sum of 29 would be off by some 1e-7.
    assert losses.sum().item() != pytest.approx(losses.double().sum().item(), rel=1e-13)
    assert perplexity(model, window[0], 30).nll == pytest.approx(losses.double().mean().item(), rel=1e-13)


def test_model_is_evaluated_without_dropout_and_left_in_its_mode(model, tokens):
    expected = perplexity(model, tokens, 25)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert perplexity(model, tokens, 25) == expected
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2


def test_mode_is_restored_after_a_failure(model, tokens):
    model.train()
    model.lm_head.weight.data[0] = math.nan
    with pytest.raises(NumericalError, match="window 0 "):
        perplexity(model, tokens, 25)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loss_that_is_not_finite_names_its_window(model, tokens, batch_size):
    # Only a window that holds token 7 sees the broken embedding.
    tokens[tokens == 7] = 8
    tokens[60] = 7
    model.model.embed_tokens.weight.data[7] = math.inf
    with pytest.raises(NumericalError, match="window 2 "):
        perplexity(model, tokens, 25, batch_size=batch_size)


def test_overflowing_perplexity_is_infinite(model, tokens):
    model.lm_head.weight.data *= 1e4
    result = perplexity(model, tokens, 25)
    assert 710 < result.nll < math.inf
    assert result.perplexity == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 33}, "33 tokens is longer than the model's 32 positions; give --seq-len 32 or less"),
        ({"seq_len": 1}, "predicts nothing"),
        ({"seq_len": 25, "max_windows": 0}, "max_windows is 0"),
        ({"seq_len": 25, "batch_size": 0}, "batch_size is 0"),
        ({"seq_len": 25, "tokens": torch.arange(24)}, "the text has 24 tokens, fewer than one window of 25"),
        ({"seq_len": 5, "tokens": torch.arange(46, 51)}, "token 50 is outside the model's vocabulary of 50"),
        ({"seq_len": 5, "tokens": torch.arange(-1, 4)}, "token -1 is outside"),
        ({"seq_len": 5, "tokens": torch.zeros(2, 10, dtype=torch.long)}, r"shape \(2, 10\)"),
        ({"seq_len": 5, "tokens": list(range(10))}, "of type list; give a tensor"),
    ],
)
def test_bad_request_is_refused(model, tokens, arguments, message):
    with pytest.raises(InputError, match=message):
        perplexity(model, **{"tokens": tokens, **arguments})


def test_token_ids_may_be_of_any_integers(model, tokens):
    assert perplexity(model, tokens.int(), 25) == perplexity(model, tokens, 25)


def test_check_window_reads_the_positions_where_there_are_some():
    check_window(OPTConfig(max_position_embeddings=64), 64)
    with pytest.raises(InputError, match="64 positions"):
        check_window(OPTConfig(max_position_embeddings=64), 65)
    with pytest.raises(InputError, match="64 positions"):
        check_window(MptConfig(max_seq_len=64), 65)
    # Bloom's positions are slopes, not a table: any window will do.
    check_window(BloomConfig(), 10**6)
