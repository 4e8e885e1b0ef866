"""Models measured in turn: on which text, and what they write."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BatchEncoding

from modegpt.calibration import load_text, tokenize
from modegpt.comparing.in_turn import _continue, open_texts


def test_a_known_data_set_is_measured_on_what_no_model_was_calibrated_on(tiny_llama_dir: Path, tiny_tokenizer: Any):
    found = open_texts(["python-docs"], AutoConfig.from_pretrained(tiny_llama_dir), tiny_tokenizer, 64)
    assert list(found) == ["python-docs"]
    assert torch.equal(found["python-docs"], tokenize(load_text("python-docs", "evaluation"), tiny_tokenizer))


@pytest.mark.parametrize(
    "own", [{"do_sample": True, "temperature": 5.0}, {"repetition_penalty": 0.05}, {"num_beams": 3}]
)
def test_a_model_that_would_take_other_tokens_is_continued_with_the_likeliest(own: dict, tiny_llama_dir: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.generation_config.update(**own, eos_token_id=None)
    ids = torch.arange(1, 6)[None]
    expected = ids
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), dim=1)
    inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert torch.equal(_continue(model, inputs, 8), expected[0, 5:])
