"""The texts that models are measured on."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from modegpt.calibration import load_text, tokenize
from modegpt.comparing.in_turn import open_texts


def test_a_known_data_set_is_measured_on_what_no_model_was_calibrated_on(tiny_llama_dir: Path, tiny_tokenizer: Any):
    found = open_texts(["python-docs"], AutoConfig.from_pretrained(tiny_llama_dir), tiny_tokenizer, 64)
    assert list(found) == ["python-docs"]
    assert torch.equal(found["python-docs"], tokenize(load_text("python-docs", "evaluation"), tiny_tokenizer))
