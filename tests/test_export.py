"""`modegpt export`: what it writes, and that nothing is lost or half-written when it cannot."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

import modegpt
from conformance.helpers import run_python
from modegpt import CompressionConfig, InputError
from modegpt.architectures.spec import Architecture
from modegpt.errors import NumericalError, WriteError
from modegpt.export.appearing import appearing
from modegpt.export.stock import export_stock
from modegpt.modeling_modegpt import compressed_class
from test_cli import assert_refused
from test_cli import modegpt as command

SMALL = {"samples": 8, "seq_len": 64}


@pytest.fixture(scope="module")
def compressed(tiny_llama_dir: Path, small_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with everything cut."""
    out = tmp_path_factory.mktemp("compressed") / "all"
    modegpt.compress(str(tiny_llama_dir), small_text_file, CompressionConfig(sparsity=0.3, **SMALL), out=out)
    return out


@pytest.fixture(scope="module")
def narrow(tiny_llama_dir: Path, small_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with one MLP width."""
    out = tmp_path_factory.mktemp("compressed") / "narrow"
    config = CompressionConfig(sparsity=0.2, allocation="width", round_to=8, **SMALL)
    modegpt.compress(str(tiny_llama_dir), small_text_file, config, out=out)
    return out


def parameters(folder: Path) -> int:
    return AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def test_an_exported_model_needs_nothing_of_this_package(narrow: Path, tmp_path: Path):
    out = tmp_path / "stock"
    result = command("export", narrow, "--out", out)
    assert result.exit_code == 0, result.output
    assert "are zeros" not in result.output
    tokenizer = AutoTokenizer.from_pretrained(narrow)
    ids = tokenizer("the class statement", return_tensors="pt").input_ids
    ours = AutoModelForCausalLM.from_pretrained(narrow).generate(ids, max_new_tokens=8, do_sample=False)
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = AutoTokenizer.from_pretrained(sys.argv[1])('the class statement', return_tensors='pt').input_ids\n"
        "made = model.generate(ids, max_new_tokens=8, do_sample=False)\n"
        "assert 'modegpt' not in sys.modules\n"
        "print('got', type(model).__name__, made[0].tolist())"
    )
    said = run_python("-c", code, out, cache=tmp_path)
    assert f"got LlamaForCausalLM {ours[0].tolist()}" in said
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not {"modegpt", "auto_map"} & config.keys()
    assert not (out / "modeling_modegpt.py").exists()


def test_the_figures_are_those_of_the_models(compressed: Path, tiny_llama_dir: Path, tmp_path: Path):
    file = tmp_path / "result.json"
    result = command("export", compressed, "--out", tmp_path / "stock", "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    before, after = parameters(compressed), parameters(tmp_path / "stock")
    assert found["parameters"] == {"compressed": before, "exported": after}
    assert sum(found["zeros"].values()) == after - before
    # The widths of the layers are one under `uniform`, so all that is padded is attention: rows and columns of zeros.
    assert found["zeros"]["mlp"] == 0
    stock, dense = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "stock", tiny_llama_dir))
    assert found["mlp_width"] == stock.config.intermediate_size < dense.config.intermediate_size
    attention = [stock.get_parameter(name) for name, _ in stock.named_parameters() if "self_attn" in name]
    assert sum((weight == 0).sum().item() for weight in attention) == found["zeros"]["attention"] > 0
    assert "zeros" in result.output
    assert "--allocation width" in result.output


def test_weights_are_written_in_the_dtype_of_the_checkpoint_or_another(narrow: Path, tmp_path: Path):
    half = tmp_path / "half"
    model = AutoModelForCausalLM.from_pretrained(narrow, dtype=torch.bfloat16)
    model.save_pretrained(half)
    for source, asked, expected in (
        (half, "auto", torch.bfloat16),
        (narrow, "auto", torch.float32),
        (narrow, "float16", torch.float16),
    ):
        out = tmp_path / f"{source.name}-{asked}"
        assert export_stock(str(source), out, dtype=asked)["dtype"] == str(expected).removeprefix("torch.")
        # What is in the file: a model opened with "auto" would have what its config says.
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {expected}
        assert json.loads((out / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


def test_an_exported_model_can_be_compressed_again(narrow: Path, small_text_file: Path, tmp_path: Path):
    export_stock(str(narrow), tmp_path / "stock")
    config = CompressionConfig(sparsity=0.2, **SMALL)
    modegpt.compress(str(tmp_path / "stock"), small_text_file, config, out=tmp_path / "again")
    assert parameters(tmp_path / "again") < parameters(narrow)


def test_a_model_without_a_tokenizer_is_exported_without_and_with_its_generation_settings(narrow: Path, tmp_path: Path):
    bare, model = tmp_path / "bare", AutoModelForCausalLM.from_pretrained(narrow)
    model.generation_config.eos_token_id = [5, 7]
    model.save_pretrained(bare)
    export_stock(str(bare), tmp_path / "stock")
    assert sorted(file.name for file in (tmp_path / "stock").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "stock" / "generation_config.json").read_text())["eos_token_id"] == [5, 7]


def test_a_model_whose_code_came_with_it_becomes_stock_too(narrow: Path, tmp_path: Path):
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "import modegpt\n"
        "assert not type(model).__module__.startswith('modegpt.'), type(model).__module__\n"
        "print('got', type(modegpt.stock_model(model)).__name__)"
    )
    assert "got LlamaForCausalLM" in run_python("-c", code, narrow, cache=tmp_path)


def test_wrong_calls(narrow: Path, tiny_llama_dir: Path, tmp_path: Path):
    assert_refused(command("export", tiny_llama_dir, "--out", tmp_path / "x"), "is not compressed", str(tiny_llama_dir))
    assert_refused(command("export", tmp_path / "none", "--out", tmp_path / "x"), "does not exist")
    assert_refused(command("export", narrow, "--out", tmp_path), "exists; choose another, or add --overwrite")
    assert_refused(command("export", narrow, "--out", narrow, "--overwrite"), "holds the model")
    assert_refused(command("export", narrow, "--out", tmp_path / "x", "--dtype", "int4"), "dtype 'int4' is unknown")
    assert_refused(command("export", narrow), "--out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_whole(narrow: Path, compressed: Path, tmp_path: Path):
    out = tmp_path / "stock"
    export_stock(str(compressed), out)
    (out / "own.txt").write_text("of an earlier export")
    export_stock(str(narrow), out, overwrite=True)
    assert not (out / "own.txt").exists()
    assert parameters(out) == parameters(narrow)
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space")])
def test_a_disk_that_refuses_leaves_what_was_there(
    narrow: Path, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
):
    out = tmp_path / "stock"
    export_stock(str(compressed), out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def refuse(self: PreTrainedModel, folder: Path) -> None:
        (Path(folder) / "config.json").write_text("{")
        raise problem

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", refuse)
    with pytest.raises(WriteError, match=f"'{out}' could not be written: .*space"):
        export_stock(str(narrow), out, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("exporting", "is of another call, or of one that was killed: wait for it, or remove it"),
        ("replaced", "is what 'stock' was before a call that was interrupted; rename or remove it"),
    ],
)
def test_what_a_killed_export_left_is_named_and_kept(narrow: Path, tmp_path: Path, end: str, said: str):
    left = tmp_path / f"stock.{end}"
    left.mkdir()
    (left / "own.txt").write_text("kept")
    with pytest.raises(InputError, match=f"'{left}' {said}"):
        export_stock(str(narrow), tmp_path / "stock")
    assert [path.name for path in tmp_path.iterdir()] == [left.name]
    assert (left / "own.txt").read_text() == "kept"
    shutil.rmtree(left)
    export_stock(str(narrow), tmp_path / "stock")


@pytest.mark.parametrize("problem", [OSError(13, "Permission denied"), KeyboardInterrupt()])
def test_a_last_step_that_fails_gives_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
):
    out, rename = tmp_path / "stock", Path.rename
    out.mkdir()
    (out / "own.txt").write_text("kept")
    (out / "config.json").touch()

    def fail(self: Path, target: Path) -> Path:
        if self.name == "stock.exporting":
            raise problem
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises((WriteError, KeyboardInterrupt)), appearing(out, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]
    assert (out / "own.txt").read_text() == "kept"


def test_a_folder_that_appears_in_the_meantime_is_not_replaced(tmp_path: Path):
    out = tmp_path / "stock"

    def run() -> None:
        with appearing(out, overwrite=False):
            out.mkdir()
            (out / "own.txt").write_text("kept")

    with pytest.raises(InputError, match="exists; choose another"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]
    assert (out / "own.txt").read_text() == "kept"


def test_what_fails_leaves_no_folder_behind_and_keeps_its_own_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError), appearing(tmp_path / "a" / "b" / "stock", overwrite=False):
        (tmp_path / "none").read_text()
    assert list(tmp_path.iterdir()) == []


def test_another_head_is_refused_and_told_what_to_do(narrow: Path, tmp_path: Path):
    model = compressed_class("LlamaForSequenceClassification").from_pretrained(narrow)  # pyright: ignore
    model.save_pretrained(tmp_path / "head")
    said = "was saved as a ModegptLlamaForSequenceClassification, and export reads a ModegptLlamaForCausalLM"
    with pytest.raises(InputError, match=f"{said}: use modegpt.stock_model"):
        export_stock(str(tmp_path / "head"), tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_a_weight_too_large_for_the_dtype_is_refused(narrow: Path, tmp_path: Path):
    large = tmp_path / "large"
    model = AutoModelForCausalLM.from_pretrained(narrow)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e5
    model.save_pretrained(large)
    with pytest.raises(NumericalError, match=r"'model.layers.1.mlp.down_proj.weight' holds NaN or infinity in float16"):
        export_stock(str(large), tmp_path / "stock", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_the_sentencepiece_model_goes_along(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    """transformers saves a `tokenizer.json` in its place, and llama.cpp's converter asks some families for it."""
    dense = shutil.copytree(tiny_llama_dir, tmp_path / "dense")
    (dense / "tokenizer.model").write_bytes(b"the pieces")
    config = CompressionConfig(sparsity=0.2, **SMALL)
    modegpt.compress(str(dense), small_text_file, config, out=tmp_path / "compressed")
    export_stock(str(tmp_path / "compressed"), tmp_path / "stock")
    for folder in ("compressed", "stock"):
        assert (tmp_path / folder / "tokenizer.model").read_bytes() == b"the pieces"


def test_a_stock_class_whose_other_weights_follow_the_width_is_refused(
    narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A family's file may not say yet what else a width decides: nothing wrong is written then."""
    set_width = Architecture.set_mlp_width

    def narrower_everywhere(self: Architecture, config: object, width: int) -> None:
        set_width(self, config, width)
        config.hidden_size //= 2  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(Architecture, "set_mlp_width", narrower_everywhere)
    with pytest.raises(
        InputError, match=r"LlamaForCausalLM cannot have intermediate_size .*layernorm\.weight' of layer 0"
    ):
        export_stock(str(narrow), tmp_path / "stock")
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_opened_by_its_names_alone(narrow: Path, tmp_path: Path):
    """Moved, and opened in another process by a relative path."""
    export_stock(str(narrow), tmp_path / "here" / "stock")
    shutil.move(tmp_path / "here" / "stock", tmp_path / "there")
    code = "import sys; from transformers import pipeline; print(pipeline('text-generation', sys.argv[1])('the')[0])"
    assert "generated_text" in run_python("-c", code, "there", cache=tmp_path)


def test_a_disk_that_is_full_while_the_tokenizer_is_written_is_one_line(narrow: Path, tmp_path: Path):
    model = shutil.copytree(narrow, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"token {number} {'x' * 100}" for number in range(4000)])
    tokenizer.save_pretrained(model)
    size = (model / "tokenizer.json").stat().st_size
    assert size > 2 * (model / "model.safetensors").stat().st_size
    code = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, -1))\n"
        "sys.argv = ['modegpt', 'export', sys.argv[1], '--out', sys.argv[2]]\n"
        "import runpy; runpy.run_module('modegpt', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code, model, tmp_path / "out"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "File too large; make room, and try again" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_config_that_transformers_does_not_save_is_one_line(narrow: Path, tmp_path: Path):
    model = shutil.copytree(narrow, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "output_attentions": True}))
    assert_refused(command("export", model, "--out", tmp_path / "out"), "transformers does not save", "attentions")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", ["info", "export"])
def test_a_description_that_is_cut_or_newer_is_refused(narrow: Path, tmp_path: Path, call: str):
    model = shutil.copytree(narrow, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    options = ["--out", tmp_path / "out"] if call == "export" else []
    own, layers = config["modegpt"], config["modegpt"]["layers"]
    narrower = [{key: size for key, size in layer.items() if key != "mlp_width"} for layer in layers]
    for changed, said in (
        ({**own, "version": 99}, "format version 99"),
        ({key: value for key, value in own.items() if key != "architecture"}, "is broken: copy the checkpoint again"),
        ({**own, "layers": layers[:-1]}, "is broken"),
        ({**own, "layers": narrower}, "is broken"),
    ):
        (model / "config.json").write_text(json.dumps({**config, "modegpt": changed}))
        assert_refused(command(call, model, *options), said)
