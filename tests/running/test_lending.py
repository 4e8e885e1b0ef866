"""A model in memory is given back as it was, and compressed as if it were in its usual state."""

import threading

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

import modegpt
from modegpt import CompressionConfig
from modegpt.errors import InputError

WINDOWS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))


def tiny_mistral() -> MistralForCausalLM:
    """Attention to the last four tokens, which a kernel without a mask would have to be told otherwise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=4)
    return MistralForCausalLM(config).eval()


def compressed(model: PreTrainedModel, **settings: object) -> dict[str, Tensor]:
    return modegpt.compress(model, WINDOWS, CompressionConfig(sparsity=0.3, **settings)).state_dict()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_whatever_kernel_attention_runs_on_the_result_is_the_same():
    model = tiny_mistral()
    expected = compressed(model)
    model.set_attn_implementation("flex_attention")
    assert_same(compressed(model), expected)
    assert model.config._attn_implementation == "flex_attention"


def test_a_model_made_in_inference_mode_and_a_call_from_there():
    expected = compressed(tiny_mistral())
    with torch.inference_mode():
        model = tiny_mistral()
        assert_same(compressed(model), expected)
    assert_same(compressed(model), expected)


def test_one_thread_has_a_model_at_a_time():
    model, begun, go_on = tiny_mistral(), threading.Event(), threading.Event()

    def progress(*_told: object) -> None:
        begun.set()
        assert go_on.wait(60)

    settings = CompressionConfig(sparsity=0.3)
    first = threading.Thread(target=modegpt.compress, args=(model, WINDOWS, settings), kwargs={"progress": progress})
    first.start()
    try:
        assert begun.wait(60)
        with pytest.raises(InputError, match="at work in another thread: wait for that, or give a copy"):
            compressed(model)
    finally:
        go_on.set()
        first.join()
    assert_same(compressed(model), compressed(tiny_mistral()))


def test_an_interrupted_run_puts_the_blocks_back_though_its_traceback_is_kept(monkeypatch: pytest.MonkeyPatch):
    model = tiny_mistral()
    with torch.no_grad():
        expected = model(WINDOWS).logits

    def interrupted(_expected: Tensor, _logits: Tensor) -> float:
        raise KeyboardInterrupt  # while a generator that holds the model without its blocks waits to be asked again

    monkeypatch.setattr("modegpt.running.damage.divergence", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        compressed(model, allocation="error")
    with torch.no_grad():
        assert torch.equal(model(WINDOWS).logits, expected)
    assert kept.tb is not None
