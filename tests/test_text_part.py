"""Multimodal checkpoints: their language model is opened alone, and gives the logits that the whole model gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typer.testing import CliRunner

import modegpt
from modegpt.cli import app
from modegpt.errors import InputError
from modegpt.models import open_config, open_model
from modegpt.text_part import MULTIMODAL

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CASES = [
    ("Gemma3", "Gemma3TextConfig", None),
    ("Mistral3", "MistralConfig", "PixtralVisionConfig"),
    ("Llava", "LlamaConfig", "CLIPVisionConfig"),
    ("LlavaNext", "MistralConfig", "CLIPVisionConfig"),
    ("LlavaOnevision", "Qwen2Config", "SiglipVisionConfig"),
    ("InternVL", "Qwen2Config", None),
    ("SmolVLM", "LlamaConfig", None),
    ("Idefics3", "LlamaConfig", None),
]
"""The outer family, the config of its language model, and that of its tower where it takes a config of any kind."""
TOKENS = torch.randint(384, (8, 32), generator=torch.Generator().manual_seed(0))
SETTINGS = modegpt.CompressionConfig(sparsity=0.3, samples=8, seq_len=32)


def multimodal(outer: str, text: str, vision: str | None, **changes: Any) -> Any:
    tower = VISION if vision is None else getattr(transformers, vision)(**VISION)
    config = getattr(transformers, outer + "Config")(
        text_config=getattr(transformers, text)(**SIZES), vision_config=tower, **changes
    )
    torch.manual_seed(0)
    return getattr(transformers, outer + "ForConditionalGeneration")(config).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


def test_every_family_is_tried():
    names = {getattr(transformers, outer + "Config").model_type for outer, _text, _vision in CASES}
    assert names == set(MULTIMODAL)


@pytest.mark.parametrize(("outer", "text", "vision"), CASES, ids=[case[0] for case in CASES])
def test_the_language_model_gives_the_same_logits_and_is_compressed(
    outer: str, text: str, vision: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    whole = multimodal(outer, text, vision)
    whole.save_pretrained(tmp_path / "whole")
    capfd.readouterr()
    opened = open_model(str(tmp_path / "whole"))
    assert capfd.readouterr() == ("", "")
    assert type(opened).__name__ == text.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    assert torch.equal(logits(opened), logits(whole))

    streamed: Any = modegpt.compress(str(tmp_path / "whole"), TOKENS, SETTINGS)
    told = [line for line in streamed.modegpt_report["warnings"] if "only the language model was taken" in line]
    assert len(told) == 1
    assert not [line for line in streamed.modegpt_report["warnings"] if "loaded whole" in line]
    assert torch.equal(logits(streamed), logits(modegpt.compress(opened, TOKENS, SETTINGS)))
    streamed.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert torch.equal(logits(again), logits(streamed))


@pytest.mark.parametrize("outer", [False, True])
def test_a_head_of_its_own_is_kept_whatever_the_config_says(outer: bool, tmp_path: Path):
    """Mistral Small's files hold a head, and the config of its outer model ties it to the embeddings by default."""
    if outer:
        whole = multimodal(*CASES[1], tie_word_embeddings=False)
    else:
        torch.manual_seed(0)
        llama: Any = transformers.LlamaForCausalLM
        whole = llama(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()
    whole.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": True}))
    nothing = modegpt.CompressionConfig(sparsity=0.0, samples=8, seq_len=32)
    dense = open_model(str(tmp_path))
    for model in (str(tmp_path), dense):
        result = modegpt.compress(model, TOKENS, nothing)
        assert not result.config.tie_word_embeddings
        assert torch.equal(logits(result), logits(whole))
    dense.config.tie_word_embeddings = True
    assert torch.equal(logits(modegpt.compress(dense, TOKENS, nothing)), logits(whole))
    assert dense.config.tie_word_embeddings  # the model that was given is as it was


def test_a_saved_language_model_opens_again(tmp_path: Path):
    whole = multimodal(*CASES[0])
    whole.save_pretrained(tmp_path / "whole")
    open_model(str(tmp_path / "whole")).save_pretrained(tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert torch.equal(logits(again), logits(whole))


def test_what_the_outer_config_settles_holds(tmp_path: Path):
    multimodal(*CASES[2]).to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "dtype" not in config["text_config"]
    assert open_config(str(tmp_path)).dtype == torch.bfloat16
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"quantized \(fp8\)"):
        modegpt.compress(str(tmp_path), TOKENS, SETTINGS)


def test_as_an_object_it_is_refused_with_the_way_out():
    with pytest.raises(InputError, match="give its folder or hub name"):
        modegpt.compress(multimodal(*CASES[0]), TOKENS, SETTINGS)


def test_another_language_model_in_a_known_family_is_refused_by_its_name(tmp_path: Path):
    text = transformers.BloomConfig(vocab_size=384, hidden_size=32, n_layer=1, n_head=4)
    config: PretrainedConfig = transformers.LlavaConfig(text_config=text, vision_config=VISION)
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="model type 'bloom' is not supported"):
        modegpt.compress(str(tmp_path), TOKENS, SETTINGS)


def test_check_says_what_is_taken(tmp_path: Path):
    multimodal(*CASES[0]).config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["check", str(tmp_path), "--config-only"])
    assert result.exit_code == 0, result.output
    assert "the language model of the gemma3" in " ".join(result.output.split())
