"""Models whose files are not what they seem: each is refused by name, and none is compressed into something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from command_line import assert_refused, modegpt
from modegpt import CompressionConfig, InputError, compress
from modegpt.compress import compress_to_folder
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer
from modegpt.running.source import open_source

CONFIG = CompressionConfig(sparsity=0.25, samples=4, seq_len=32, solver="paper")
WINDOWS = torch.arange(128).view(4, 32)


@pytest.fixture
def model(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(tiny_llama_dir, tmp_path / "model")


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refused(model: Path, match: str) -> None:
    with pytest.raises(InputError, match=match):
        compress_to_folder(model, WINDOWS, model.parent / "out", CONFIG)
    assert sorted(path.name for path in model.parent.iterdir()) == ["model"]


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "gptq"])
def test_quantized_weights_are_refused_by_name(model: Path, method: str):
    edit_config(model, quantization_config={"quant_method": method})
    refused(model, f"quantized \\({method}\\).*16 or 32 bits")


def test_a_quantized_model_in_memory_is_refused():
    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=128))
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(InputError, match="quantized"):
        compress(model, WINDOWS, CONFIG)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_a_weight_that_no_file_holds_is_not_made_up(model: Path, name: str):
    edit_weights(model, lambda tensors: tensors.pop(name))
    refused(model, f"lack the weight '{name}'.*fetch it again")
    with pytest.raises(InputError, match=f"lack the weight '{name}'"):
        open_model(str(model))


def test_layers_that_no_file_holds_are_not_made_up(model: Path):
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    edit_config(model, num_hidden_layers=layers + 1)
    refused(model, f"lack the weight 'model.layers.{layers}.*and 8 more")


def test_a_single_file_goes_before_an_index_that_is_left_over(model: Path, tmp_path: Path):
    fresh = AutoModelForCausalLM.from_pretrained(model)
    shards = tmp_path / "shards"
    with torch.no_grad():
        fresh.model.layers[0].mlp.up_proj.weight.mul_(2)
    fresh.save_pretrained(shards, max_shard_size="50kB")
    expected = compress(str(model), WINDOWS, CONFIG).state_dict()
    index = "model.safetensors.index.json"
    shutil.copy(shards / index, model / index)  # as save_pretrained over a folder of shards leaves it
    for name, tensor in compress(str(model), WINDOWS, CONFIG).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    for shard in shards.glob("model-*.safetensors"):
        shutil.copy(shard, model)
    for name, tensor in compress(str(model), WINDOWS, CONFIG).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_shape_that_contradicts_the_config_is_one_line(model: Path):
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name][::2].contiguous()

    edit_weights(model, halve)
    refused(model, r"layers\.0\.mlp\.up_proj\.weight' in shape \(48, 64\), and its config asks for \(96, 64\)")


def test_a_config_that_contradicts_itself_is_one_line(model: Path):
    edit_config(model, hidden_size="64")
    refused(model, "cannot be opened: .*hidden_size")
    edit_config(model, hidden_size=66)  # of four heads; transformers says why in a second line
    refused(model, r"validate_architecture.*hidden size \(66\)")


@pytest.mark.parametrize(
    "content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}{}{}{}", b"\x02\x00\x00\x00\x00\x00\x00\x00[]"]
)
def test_a_file_that_is_no_safetensors_file_is_named(model: Path, content: bytes):
    (model / "model.safetensors").write_bytes(content)
    refused(model, r"model\.safetensors.*fetch it again")
    with pytest.raises(InputError, match="fetch it again"):
        open_model(str(model))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": null}}'])
def test_a_broken_index_is_named(model: Path, content: str):
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(content)
    refused(model, r"index\.json' is no index.*fetch it again")


def test_a_broken_tokenizer_is_one_line(model: Path):
    (model / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(InputError, match=r"the tokenizer of .* cannot be opened"):
        open_tokenizer(str(model))


@pytest.mark.parametrize("command", ["eval", "info", "plan", "report"])
def test_a_config_that_is_cut_off_is_named_by_each_command(model: Path, command: str):
    """`eval` laid it at the tokenizer's door, `info` and `report` took it for that of a dense model."""
    config = model / "config.json"
    config.write_text(config.read_text()[:40])
    answer = modegpt(command, model)
    assert_refused(answer, "config.json", "valid JSON")
    assert "tokenizer" not in answer.stderr


def test_an_adapter_beside_a_model_is_not_taken_for_the_model_nor_left_out(model: Path):
    """transformers would load it into the model, where a run that reads the files knows nothing of it."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings).save_pretrained(model)
    refused(model, "has an adapter beside its weights.*merge_and_unload")
    checked = modegpt("check", model, "--config-only")
    assert_refused(checked, "has an adapter beside its weights")
    (model / "config.json").unlink()
    refused(model, "holds an adapter, and no model")


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(model: Path, capfd: pytest.CaptureFixture):
    (model / "own.py").write_text("raise SystemExit('run')")
    edit_config(model, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    refused(model, "needs code that comes with it, which is not run")
    assert not capfd.readouterr().out


@pytest.mark.parametrize("whole", [False, True])
def test_tensors_that_have_no_place_in_the_model_are_told(model: Path, whole: bool):
    edit_weights(model, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 64)}))
    edit_weights(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    if whole:
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
    notes = open_source(str(model), torch.device("cpu")).notes
    assert notes[-1].startswith("the files hold the tensor 'score.weight' for which")
    assert len(notes) == 1 + whole


def test_a_folder_may_be_called_as_a_file_is(model: Path):
    folder = model.rename(model.with_name("model.gguf"))
    assert open_model(str(folder)).config.model_type == "llama"
    with pytest.raises(InputError, match=r"model file .* does not exist"):
        open_model(str(model.with_name("MODEL.GGUF")))
