"""Multimodal checkpoints: their language model is opened alone, and gives the logits that the whole model gives."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

import modegpt
from command_line import modegpt as run_command
from modegpt.architectures import ARCHITECTURES, architecture_of
from modegpt.errors import InputError
from modegpt.formats.text_part import KNOWN_AS, LANGUAGE_MODELS, MULTIMODAL
from modegpt.loading.models import open_config, open_model
from modegpt.measuring.costs import file_bytes
from multimodal import CASES, MORE, SIZES, TOKENS, VISION, logits, multimodal

SETTINGS = modegpt.CompressionConfig(sparsity=0.3, samples=8, seq_len=32)


def test_every_family_is_tried():
    outer, text, _vision = zip(*CASES, strict=True)
    assert {getattr(transformers, name + "Config").model_type for name in outer} == set(MULTIMODAL)
    assert {getattr(transformers, name).model_type for name in text} == set(LANGUAGE_MODELS)


@pytest.mark.parametrize(("outer", "text", "vision"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_the_language_model_gives_the_same_logits_and_is_compressed(
    outer: str, text: str, vision: str | None, tmp_path: Path
):
    whole = multimodal(outer, text, vision)
    whole.save_pretrained(tmp_path / "whole")
    opened = open_model(str(tmp_path / "whole"))
    kind = getattr(transformers, text).model_type
    assert type(opened).__name__ == ARCHITECTURES[KNOWN_AS.get(kind, kind)].causal_class
    assert torch.equal(logits(opened), logits(whole))
    if kind in KNOWN_AS:
        turned = {"partial_rotary_factor": 1.0 if outer == "Glm4v" else 0.5} if outer.startswith("Glm") else {}
        assert opened.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4, **turned}

    streamed: Any = modegpt.compress(str(tmp_path / "whole"), TOKENS, SETTINGS)
    told = [line for line in streamed.modegpt_report["warnings"] if "only the language model is taken" in line]
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


LAYOUTS = {
    "as transformers 5 calls the modules": (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_", "lm_"),
    ),
    "of the base model": (("language_model.model.", "language_model."), ("language_model.lm_", "lm_")),
    "one prefix more": (("language_model.model.", "model.language_model.model."),),
    "text_model": (("language_model.model.", "text_model."), ("language_model.lm_", "lm_")),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sharded", [False, True])
def test_files_that_name_the_weights_otherwise_give_the_same(
    layout: tuple[tuple[str, str], ...], sharded: bool, tmp_path: Path
):
    whole = multimodal(*CASES[3])
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in layout:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    (tmp_path / "model.safetensors").unlink()
    files = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])] if sharded else [tensors]
    names = [f"model-{i}.safetensors" for i in range(len(files))] if sharded else ["model.safetensors"]
    for name, part in zip(names, files, strict=True):
        save_file(part, tmp_path / name, metadata={"format": "pt"})
    if sharded:
        where = {key: name for name, part in zip(names, files, strict=True) for key in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert torch.equal(logits(open_model(str(tmp_path))), logits(whole))
    nothing = modegpt.CompressionConfig(sparsity=0.0, samples=8, seq_len=32)
    result: Any = modegpt.compress(str(tmp_path), TOKENS, nothing)
    assert torch.equal(logits(result), logits(whole))
    assert not [line for line in result.modegpt_report["warnings"] if "loaded whole" in line]
    text = sum(weight.numel() * 4 for weight in open_model(str(tmp_path)).parameters())
    assert file_bytes(str(tmp_path)) == text  # neither the tower nor headers


@pytest.mark.parametrize("width", [24, 16, 32])  # of 16 and 32 one of the weights is square
def test_experts_that_files_hold_swapped_are_the_same(width: int, tmp_path: Path):
    """As those of Qwen 3 VL on the hub do; transformers 5 writes them as the modules hold them."""
    sizes = {"moe_intermediate_size": width}
    multimodal("Qwen3VLMoe", "Qwen3VLMoeTextConfig", None, sizes=sizes).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "swapped")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    swapped = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    assert sum(".experts." in name for name in tensors) == 4
    save_file(swapped, tmp_path / "swapped" / "model.safetensors", {"format": "pt"})
    plain, other = (str(tmp_path / name) for name in ("plain", "swapped"))
    assert torch.equal(logits(open_model(plain)), logits(open_model(other)))
    results = [modegpt.compress(name, TOKENS, SETTINGS) for name in (plain, other)]
    assert torch.equal(*map(logits, results))
    assert "loaded whole" not in str([result.modegpt_report for result in results])


def test_what_predicts_later_tokens_is_left_out(tmp_path: Path):
    """Qwen 3.5's files hold a block more, for guessing ahead, which transformers does not load either."""
    whole = multimodal(*CASES[-1])
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {"mtp.layers.0.mlp.gate_proj.weight": torch.ones(64, 32), "mtp.norm.weight": torch.ones(32)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    opened = open_model(str(tmp_path))
    assert torch.equal(logits(opened), logits(whole))
    streamed: Any = modegpt.compress(str(tmp_path), TOKENS, SETTINGS)
    assert torch.equal(logits(streamed), logits(modegpt.compress(opened, TOKENS, SETTINGS)))
    assert file_bytes(str(tmp_path)) == sum(weight.numel() * 4 for weight in opened.parameters())


def test_weights_that_no_layer_reads_are_left_out_in_silence(tmp_path: Path):
    """Gemma 4's files hold keys and values for layers that read those of earlier ones; transformers passes them by."""
    text: Any = transformers.Gemma4ForCausalLM
    torch.manual_seed(0)
    dense = text(transformers.Gemma4TextConfig(**SIZES, **MORE["Gemma4"])).eval()
    dense.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unread = {f"model.layers.1.self_attn.{name}_proj.weight": torch.ones(16, 32) for name in "kv"}
    assert not unread.keys() & tensors.keys()
    save_file({**tensors, **unread}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    streamed: Any = modegpt.compress(str(tmp_path), TOKENS, SETTINGS)
    assert not [line for line in streamed.modegpt_report["warnings"] if "the files hold" in line]
    assert torch.equal(logits(streamed), logits(modegpt.compress(dense, TOKENS, SETTINGS)))


def test_loading_prints_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    multimodal(*CASES[0]).save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    try:
        with caplog.at_level(logging.WARNING):
            open_model(str(tmp_path))
        assert not caplog.messages
        assert transformers.logging.get_verbosity() == logging.WARNING
        with caplog.at_level(logging.WARNING):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=open_config(str(tmp_path)))
        assert caplog.messages  # it would be seen
    finally:
        transformers.logging.set_verbosity(verbosity)


def test_what_the_outer_config_says_holds(tmp_path: Path):
    whole = multimodal(*CASES[1], eos_token_id=[7, 9]).to(torch.float16)
    whole.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"dtype": "bfloat16", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_config(str(tmp_path)).dtype == torch.float16
    result = modegpt.compress(str(tmp_path), TOKENS, SETTINGS)
    assert result.dtype == torch.float16
    assert result.generation_config is not None
    for settings in (result.config, result.generation_config, open_model(str(tmp_path)).generation_config):
        assert settings.eos_token_id == [7, 9]
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"quantized \(gptq\)"):
        modegpt.compress(str(tmp_path), TOKENS, SETTINGS)


def test_as_an_object_it_is_refused_with_the_way_out():
    with pytest.raises(InputError, match="give its folder or hub name"):
        modegpt.compress(multimodal(*CASES[0]), TOKENS, SETTINGS)


def test_another_language_model_in_a_known_family_is_refused_by_its_name(tmp_path: Path):
    """Granite's divides its logits by 8, and the multimodal model that holds it does not."""
    text = transformers.GraniteConfig(**SIZES, logits_scaling=8.0)
    config: PretrainedConfig = transformers.LlavaNextConfig(text_config=text, vision_config=VISION)
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="llava_next model holds a language model of type 'granite'"):
        modegpt.compress(str(tmp_path), TOKENS, SETTINGS)


def test_queries_that_grow_need_their_numbers(tmp_path: Path):
    config = transformers.Ministral3Config(**SIZES)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(InputError, match="lack 'llama_4_scaling_beta'"):
        architecture_of(config)


def test_check_says_what_is_taken(tmp_path: Path):
    # No head of their own, says a Gemma 3 that leaves it open; its language model's config must say it.
    multimodal(*CASES[0], tie_word_embeddings=None).config.save_pretrained(tmp_path)
    result = run_command("check", tmp_path, "--config-only", "--json", tmp_path / "said.json")
    assert result.exit_code == 0, result.output
    first = json.loads((tmp_path / "said.json").read_text())["checks"][0]
    assert "of the gemma3 model only the language model is taken" in first["meaning"]
