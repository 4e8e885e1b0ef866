"""What is saved opens anywhere: in a fresh process, with and without modegpt, moved, sharded, in another dtype."""

import copy
import functools
import gc
import json
import re
import runpy
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from modegpt import modeling_modegpt, stock_model
from modegpt.inspection import describe

from .conftest import Pair
from .families import FAMILIES, one_of_each_attention, tokens
from .helpers import densify, run_python

SHIPPED = "modeling_modegpt.py"


# With modegpt installed, all other tests open them as well, in this process.
OPENED = {"shipped": [family.name for family in FAMILIES], "installed": one_of_each_attention()}
each_opened = pytest.mark.parametrize(("way", "name"), [(way, name) for way in OPENED for name in OPENED[way]])


@pytest.fixture(scope="module")
def reopened(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """Return what moves saved folders and opens them in a fresh process: where they were, what it wrote and printed."""

    @functools.cache
    def opened(way: str) -> tuple[Path, Path, str]:
        root = tmp_path_factory.mktemp(way)
        moved, out = root / "moved 0.25", root / "out"
        out.mkdir()
        for name in OPENED[way]:
            # A dot and a blank in the path: the shipped code becomes a Python package named after its folder.
            shutil.copytree(folders[name], moved / name)
        return moved, out, run_python(Path(__file__).with_name("fresh_process.py"), way, moved, out, cache=root)

    return opened


@each_opened
def test_a_fresh_process_computes_the_same_bits(reopened, way: str, name: str, pairs: dict[str, Pair]):
    _, out, _ = reopened(way)
    result = torch.load(out / f"{name}.pt")
    with torch.no_grad():
        assert torch.equal(pairs[name].compressed(result["ids"]).logits, result["logits"])


@pytest.mark.parametrize("way", OPENED)
def test_loading_prints_nothing(reopened, way: str):
    *_, printed = reopened(way)
    # As transformers says of any model with such layers.
    slow = r"\[transformers\] `\w+` is falling back to its reference PyTorch implementation .*\n"
    printed = re.sub(slow, "", printed)
    # The stock activation of Apertus says so of any of its models, dense ones too.
    stock = (
        "[transformers] CUDA-fused xIELU not available (No module named 'xielu') \N{EN DASH} falling back to a Python "
        "version.\nFor CUDA xIELU (experimental), `pip install git+https://github.com/nickjbrowning/XIELU`\n"
    )
    assert printed.replace(stock, "", 1) == ""


@each_opened
def test_saving_again_gives_the_same_bytes(reopened, way: str, name: str):
    moved, out, _ = reopened(way)
    first, second = (
        {path.name: path.read_bytes() for path in (root / name).iterdir() if path.is_file()} for root in (moved, out)
    )
    assert first.keys() == second.keys() >= {SHIPPED, "config.json", "generation_config.json", "model.safetensors"}
    # The tokenizer's own file says how it was loaded; that is transformers' doing, and no part of the model.
    assert [name for name in first if first[name] != second[name] and name != "tokenizer_config.json"] == []


def test_the_config_keeps_the_dense_fields_and_describes_the_layers(pair: Pair, folders: dict[str, Path]):
    saved = json.loads((folders[pair.family.name] / "config.json").read_text())
    stock, causal = pair.family.architecture.name, pair.family.architecture.causal_class
    # Some families are a config alone, and run with the classes of another.
    assert saved["model_type"] == f"modegpt_{type(pair.dense).config_class.model_type}"
    assert saved["architectures"] == [f"Modegpt{causal}"]
    assert saved["auto_map"] == {
        "AutoConfig": f"modeling_modegpt.Modegpt{stock}Config",
        "AutoModel": f"modeling_modegpt.Modegpt{stock}Model",
        "AutoModelForCausalLM": f"modeling_modegpt.Modegpt{causal}",
    }
    own = {"model_type", "architectures", "auto_map", "modegpt", "dtype"}
    dense = json.loads(pair.dense.config.to_json_string(use_diff=False))
    compressed = json.loads(pair.compressed.config.to_json_string(use_diff=False))
    # A family that runs with another's classes need not know all fields of those.
    more = set() if type(pair.dense.config) is type(pair.dense).config_class else {"pretraining_tp"}
    assert {name: value for name, value in compressed.items() if name not in own | more} == {
        name: value for name, value in dense.items() if name not in own | more
    }
    ranks = [
        {"mlp": layer["mlp_width"], "qk": 2 * layer["rope_pairs"] + layer["qk_plain"], "vo": layer["value_dim"]}
        for layer in saved["modegpt"]["layers"]
    ]
    assert ranks == pair.family.ranks()


def test_the_file_holds_only_what_is_left_and_ties_stay_tied(pair: Pair, folders: dict[str, Path]):
    tensors = load_file(folders[pair.family.name] / "model.safetensors")
    buffers = {name for name, _buffer in pair.compressed.named_buffers()}  # the rope indices, and xIELU's numbers
    assert buffers - {name for name, _buffer in pair.dense.named_buffers()} == {
        name for name in buffers if name.endswith("rope_index")
    }
    assert sum(tensor.numel() for name, tensor in tensors.items() if name not in buffers) == sum(
        parameter.numel() for parameter in pair.compressed.parameters()
    )
    loaded = AutoModelForCausalLM.from_pretrained(folders[pair.family.name])
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == pair.dense.config.tie_word_embeddings == ("lm_head.weight" not in tensors)


def test_a_tied_weight_may_be_stored_under_its_other_name(
    pairs: dict[str, Pair], folders: dict[str, Path], tmp_path: Path
):
    name = next(name for name, pair in pairs.items() if pair.dense.config.tie_word_embeddings)
    shutil.copytree(folders[name], tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored.pop(pairs[name].dense.all_tied_weights_keys["lm_head.weight"])
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    expected = pairs[name].compressed
    assert describe(tmp_path)["parameters"]["compressed"] == expected.num_parameters()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, expected(tokens()).logits)


def test_bfloat16_keeps_the_rotary_numbers_whole(pair: Pair, folders: dict[str, Path]):
    loaded = AutoModelForCausalLM.from_pretrained(folders[pair.family.name], dtype=torch.bfloat16)
    # As the stock class says; older ones of some families keep fewer tensors so.
    strict = type(pair.dense)._keep_in_fp32_modules_strict or ()
    made = AutoModelForCausalLM.from_config(pair.family.config(), dtype=torch.bfloat16)  # or makes so
    for name, parameter in loaded.named_parameters():
        kept = any(part in name for part in strict) or made.get_parameter(name).dtype == torch.float32
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16)
        assert not kept or name.endswith(pair.family.architecture.float32)
    expected = {name: buffer for name, buffer in pair.compressed.named_buffers() if name.endswith("rope_index")}
    found = {name: buffer for name, buffer in loaded.named_buffers() if name.endswith("rope_index")}
    assert found.keys() == expected.keys()
    assert bool(expected) == (pair.family.architecture.rotary and not pair.family.architecture.whole_attention)
    for name, buffer in found.items():
        assert buffer.dtype == torch.int64
        assert torch.equal(buffer, expected[name])
    reference = pair.compressed(tokens()).logits
    # Rounding to bfloat16 is relative 2^-9; over three layers it stays within a few per cent of the logits. A token
    # that two experts are equally fit for can go to the other one.
    allowed = 0.2 if pair.family.architecture.experts else 0.05
    assert (loaded(tokens()).logits - reference).norm() < allowed * reference.norm()


@pytest.mark.parametrize("placement", ["auto", {"": "cpu"}])
def test_device_map(covered: Pair, folders: dict[str, Path], placement):
    loaded = AutoModelForCausalLM.from_pretrained(folders[covered.family.name], device_map=placement)
    device = next(loaded.parameters()).device
    with torch.no_grad():
        result = loaded(tokens().to(device)).logits.cpu()
        # The same operations on the CPU; another device sums in another order, at float32's 1e-7 of logits near 100.
        torch.testing.assert_close(
            result, covered.compressed(tokens()).logits, rtol=0, atol=0 if device.type == "cpu" else 1e-3
        )


def test_sharded_files(covered: Pair, tmp_path: Path):
    covered.compressed.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    describe(tmp_path)  # finds every weight, whatever a family's files call it
    with torch.no_grad():
        expected = covered.compressed(tokens()).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, expected)


def test_the_base_model_saves_and_loads_alone(covered: Pair, folders: dict[str, Path], tmp_path: Path):
    base = AutoModel.from_pretrained(folders[covered.family.name])
    base.save_pretrained(tmp_path)
    describe(tmp_path)  # whose names have no prefix
    with torch.no_grad():
        expected = base(tokens()).last_hidden_state
        assert torch.equal(AutoModel.from_pretrained(tmp_path)(tokens()).last_hidden_state, expected)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(base).__name__]


def test_saving_into_the_folder_it_came_from(covered: Pair, folders: dict[str, Path], tmp_path: Path):
    shutil.copytree(folders[covered.family.name], tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_a_later_format_version_is_refused(folders: dict[str, Path], tmp_path: Path):
    shutil.copytree(folders["llama-grouped"], tmp_path / "later")
    path = tmp_path / "later" / "config.json"
    data = json.loads(path.read_text())
    data["modegpt"]["version"] += 1
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"modegpt format version 2, and this code reads up to 1.*trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "later")


def test_an_older_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers, "__version__", "5.15.1")
    with pytest.raises(ImportError, match=r"needs transformers 5\.16 or newer, and this is 5\.15\.1: pip install"):
        runpy.run_path(modeling_modegpt.__file__)


def test_an_edited_config_of_other_shapes_is_refused(folders: dict[str, Path], tmp_path: Path):
    """A rank in `config.json` that is not that of the weights must not load as freshly initialised weights."""
    shutil.copytree(folders["llama-grouped"], tmp_path / "edited")
    path = tmp_path / "edited" / "config.json"
    data = json.loads(path.read_text())
    data["modegpt"]["layers"][1]["mlp_width"] += 1
    path.write_text(json.dumps(data))
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "edited")


def test_the_last_layers_can_be_left_out(pairs: dict[str, Pair], folders: dict[str, Path], tmp_path: Path):
    """As of a stock model: by a config that has fewer, and by dropping them, which frees them."""
    family, dense, compressed = pairs["llama-grouped"]
    expected, dropped = densify(family, compressed, dense).float(), copy.deepcopy(compressed)
    gone = weakref.ref(dropped.model.layers[2].self_attn)
    for model in (expected, dropped):
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
    gc.collect()
    assert gone() is None
    dropped.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    few = AutoModelForCausalLM.from_pretrained(folders["llama-grouped"], num_hidden_layers=2)
    written = {"max_new_tokens": 4, "do_sample": False}
    for model in (dropped, again, few, stock_model(again)):
        with torch.no_grad():
            # The same sums in another order: float32 rounding of logits of size 100.
            torch.testing.assert_close(model(tokens()).logits, expected(tokens()).logits, rtol=1e-4, atol=1e-3)
        assert torch.equal(model.generate(tokens(), **written), expected.generate(tokens(), **written))
    assert describe(tmp_path)["parameters"] == {
        "dense": expected.num_parameters(),
        "compressed": again.num_parameters(),
    }
    with pytest.raises(ValueError, match="the config asks for 4 layers, and the checkpoint has 3"):
        AutoModelForCausalLM.from_pretrained(folders["llama-grouped"], num_hidden_layers=4)


def test_the_config_goes_through_a_file(pair: Pair, tmp_path: Path):
    config = pair.compressed.config
    config.to_json_file(tmp_path / "config.json")
    again = type(config).from_json_file(tmp_path / "config.json")
    assert again.to_dict() == config.to_dict()
    assert AutoConfig.for_model(config.model_type).__class__ is type(config)
