"""The sweep: each point is what compress and eval give, scores are computed once, nothing finished is done again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from command_line import cells, modegpt
from modegpt import CompressionConfig, InputError
from modegpt.commands.sweep import _table
from modegpt.comparing.sweep import Measures, sweep
from modegpt.pages import plots, sweep_plots

RULE = "influence"
SMALL = ["--samples", "8", "--seq-len", "64", "--allocation", RULE]
CONFIG = CompressionConfig(samples=8, seq_len=64, allocation=RULE)
UNIFORM = CompressionConfig(samples=8, seq_len=64)
WINDOWS = ["--seq-len", "64", "--max-windows", "6"]


def measures(text: Path, rounds: int = 0) -> Measures:
    return Measures(data=(str(text),), seq_len=64, max_windows=6, rounds=rounds)


def timed(model: Path, text: Path, out: Path) -> Result:
    """Sweep two points with timing and kept models."""
    own = ["--data", text, "--eval-seq-len", 64, "--max-windows", 6, "--rounds", 2, "--keep-models"]
    call = ["--sparsity", "0.5,0.25", "--calibration", text, *SMALL, *own, "--json", out.parent / "copy.json"]
    return modegpt("sweep", model, "--out", out, *call)


@pytest.fixture(scope="module")
def swept(tiny_llama_dir: Path, small_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A sweep of two points with timing and kept models, by the command."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    result = timed(tiny_llama_dir, small_text_file, out)
    assert result.exit_code == 0, result.output
    return out, result


def test_a_point_is_what_compress_and_eval_give(
    swept: tuple[Path, Result], tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    table = json.loads((swept[0] / "sweep.json").read_text())
    assert [point["name"] for point in table["points"]] == ["dense", "0.25", "0.5"]
    for point in table["points"]:
        folder = tiny_llama_dir
        if point["name"] != "dense":
            folder = tmp_path / point["name"]
            call = ("--sparsity", point["name"], "--calibration", small_text_file, *SMALL)
            assert modegpt("compress", tiny_llama_dir, "--out", folder, *call).exit_code == 0
            report = json.loads((folder / "report.json").read_text())
            assert point["sparsity"] == report["sparsity"]
            assert point["parameters"] == report["parameters"]["compressed"]
            assert point["layers"] == [layer["ranks"] for layer in report["layers"]]
            info = json.loads(modegpt("info", folder, "--json", "-").stdout)
            assert point["kv_bytes_per_token"] == info["kv_bytes_per_token"]
            kept = swept[0] / "models" / point["name"] / "model.safetensors"
            assert kept.read_bytes() == (folder / "model.safetensors").read_bytes()
        found = json.loads(modegpt("eval", folder, "--data", small_text_file, *WINDOWS, "--json", "-").stdout)
        (entry,), expected = point["perplexity"], found["results"][0]
        # The same weights on the same tokens, through the same code.
        assert entry["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
        assert (entry["tokens"], entry["seq_len"]) == (expected["tokens"], 64)


def test_times_of_another_machine_are_not_mixed_in(
    swept: tuple[Path, Result], tiny_llama_dir: Path, small_text_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("modegpt.comparing.sweep.machine", lambda: {"processor": "another"})
    result = timed(tiny_llama_dir, small_text_file, swept[0])
    assert result.exit_code == 2
    assert "its machine is" in result.stderr


def test_the_command_shows_and_writes_the_table(swept: tuple[Path, Result]):
    out, result = swept
    table = json.loads((out / "sweep.json").read_text())
    assert json.loads((out.parent / "copy.json").read_text()) == table
    dense, *points = table["points"]
    assert dense["speed"] is None
    for point in points:
        for task in ("prefill", "decode"):
            ratio = point["speed"]["speedup"][task]
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
        assert f"{point['parameters']:,}" in result.stdout
    assert "sparsity" not in table["config"]
    assert {"command", "versions", "machine"} <= table.keys()


def test_what_the_models_warn_of_is_shown(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    own = ["--data", small_text_file, "--eval-seq-len", 64, "--max-windows", 2, "--rounds", 0, "--modules", "mlp"]
    call = ("--sparsity", "0.1,0.2", "--calibration", small_text_file, *SMALL, *own)
    result = modegpt("sweep", tiny_llama_dir, "--out", tmp_path / "s", *call)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("warning: 0.1, 0.2: qk stays whole, as it is not among the modules to compress") == 1


def test_the_plots_are_files_of_their_own(swept: tuple[Path, Result]):
    for name in ("perplexity.svg", "throughput.svg"):
        text = (swept[0] / name).read_text(encoding="utf-8")
        root = ET.fromstring(text.encode())
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None
        assert "Perplexity" in str(title.text)
        assert all(name in str(title.text) for name in ("dense", "0.25", "0.5"))
    assert all(f">{name}<" in text for name in ("dense", "0.25", "0.5"))  # the points of the second are named


def two_points() -> dict[str, Any]:
    """A result of which all figures differ."""

    def point(name: str, removed: float, perplexity: float, accuracy: float) -> dict[str, Any]:
        return {
            "name": name,
            "sparsity": {"requested": removed + 0.01, "blocks": removed, "total": removed / 2},
            "parameters": round(4000 * (1 - removed / 2)),
            "perplexity": [{"data": "text.txt", "perplexity": perplexity}],
            "tasks": [{"task": "values", "acc": accuracy}],
            "mean": {"acc": accuracy},
            "speed": None,
        }

    dense, half = point("dense", 0.0, 5.0, 0.75), point("0.5", 0.5, 8.0, 0.625)
    half["speed"] = {
        "speedup": {
            "prefill": {"median": 1.5, "min": 1.25, "max": 1.75},
            "decode": {"median": 3.0, "min": 2.5, "max": 3.5},
        }
    }
    return {"model": "model", "points": [dense, half]}


def test_the_table_has_each_figure_in_its_column():
    table = _table(two_points())
    headings = ["sparsity", "of the blocks", "parameters", "perplexity, text.txt", "mean accuracy"]
    assert [column.header for column in table.columns] == [*headings, "prefill, x dense", "decode, x dense"]
    assert cells(table) == [
        ("dense", "0.00%", "4,000", "5.0000", "75.00%", "", ""),
        ("0.5", "50.00%", "3,000", "8.0000", "62.50%", "1.50 (1.25 to 1.75)", "3.00 (2.50 to 3.50)"),
    ]


def test_the_curves_are_of_what_their_axes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: dict[str, Any] = {}

    def spy(series: Any, xlabel: str, ylabel: str, **_look: Any) -> str:
        drawn[xlabel, ylabel] = series
        return "<svg></svg>"

    monkeypatch.setattr(plots, "lines", spy)
    sweep_plots.draw(two_points(), tmp_path)
    of_blocks = "% of the decoder blocks' parameters removed"
    assert drawn == {
        (of_blocks, "perplexity"): {"text.txt": ([0.0, 50.0], [5.0, 8.0])},
        (of_blocks, "zero-shot accuracy, %"): {"mean": ([0.0, 50.0], [75.0, 62.5])},
        ("speed / speed of the dense model", "perplexity, text.txt"): {
            "decode": ([1.0, 3.0], [5.0, 8.0]),
            "prefill": ([1.0, 1.5], [5.0, 8.0]),
        },
    }


def test_scores_are_computed_once_and_models_go(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    told: list[str] = []

    def note(stage: str, done: int, total: int) -> None:
        if done:  # 0 says that a stage begins
            told.append(stage)

    call = (tiny_llama_dir, small_text_file, tmp_path / "s")
    first = sweep(*call, [0.3, 0.4], CONFIG, measures(small_text_file), progress=note)
    assert told.count("scores") == 2  # one for each of the two blocks, for both points together
    assert told.count("0.3 compress") == told.count("0.4 compress") == 2
    assert not (tmp_path / "s" / "models").exists()
    assert not (tmp_path / "s" / "throughput.svg").exists()
    stamps = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "s" / "points").iterdir()}
    told.clear()
    second = sweep(*call, [0.3, 0.4, 0.5], CONFIG, measures(small_text_file), progress=note)
    assert {stage.split()[0] for stage in told} == {"0.5"}
    assert {name: (tmp_path / "s" / "points" / name).stat().st_mtime_ns for name in stamps} == stamps
    assert second["points"][:3] == first["points"]
    third = sweep(*call, [0.3], CONFIG, measures(small_text_file), keep_models=True)
    assert third["points"][1]["perplexity"][0]["nll"] == first["points"][1]["perplexity"][0]["nll"]
    assert [folder.name for folder in (tmp_path / "s" / "models").iterdir()] == ["0.3"]


def test_other_settings_are_refused_until_overwritten(
    tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    call = (tiny_llama_dir, small_text_file, tmp_path / "s", [0.3])
    first = sweep(*call, CONFIG, measures(small_text_file))
    other = CompressionConfig(samples=8, seq_len=64, allocation=RULE, temperature=0.5)
    with pytest.raises(InputError, match=r"setting temperature.*--overwrite"):
        sweep(*call, other, measures(small_text_file))
    with pytest.raises(InputError, match="--eval-seq-len is 64, and 32"):
        sweep(*call, CONFIG, Measures(data=(str(small_text_file),), seq_len=32, max_windows=6, rounds=0))
    with pytest.raises(InputError, match="--max-windows is 6, and 7"):
        sweep(*call, CONFIG, Measures(data=(str(small_text_file),), seq_len=64, max_windows=7, rounds=0))
    elsewhere = {"processor": "another"}
    monkeypatch.setattr("modegpt.comparing.sweep.machine", lambda: elsewhere)
    assert sweep(*call, CONFIG, measures(small_text_file))["points"] == first["points"]  # nothing was timed
    second = sweep(*call, other, measures(small_text_file), overwrite=True)
    assert second["points"][1]["layers"] != first["points"][1]["layers"]
    assert second["points"][0]["perplexity"][0]["nll"] == first["points"][0]["perplexity"][0]["nll"]


def test_a_killed_sweep_goes_on(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    out = tmp_path / "killed"
    own = ["--data", small_text_file, "--eval-seq-len", 64, "--max-windows", 6, "--rounds", 0]
    options = ["--sparsity", "0.2,0.3,0.4", "--calibration", small_text_file, *SMALL, *own]
    command = [sys.executable, "-m", "modegpt", "sweep", tiny_llama_dir, "--out", out, *options]
    running = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first, deadline = out / "points" / "0.2.json", time.monotonic() + 120
    while not first.is_file() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert first.is_file()
    assert not (out / "sweep.json").exists()  # it was killed on the way, or this test shows nothing
    stamp = first.stat().st_mtime_ns
    result = modegpt("sweep", tiny_llama_dir, "--out", out, *options)
    assert result.exit_code == 0, result.output
    assert first.stat().st_mtime_ns == stamp
    assert not (out / "models").exists()
    whole = sweep(
        tiny_llama_dir, small_text_file, tmp_path / "whole", [0.2, 0.3, 0.4], CONFIG, measures(small_text_file)
    )
    resumed = json.loads((out / "sweep.json").read_text())
    for one, other in zip(resumed["points"], whole["points"], strict=True):
        assert one["perplexity"][0]["nll"] == other["perplexity"][0]["nll"]
        assert one.get("layers") == other.get("layers")


def test_a_second_sweep_to_the_same_folder_is_refused(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    """It would remove checkpoints that the first one measures."""
    refused: list[str] = []

    def call(overwrite: bool, **options: Any) -> None:
        own = measures(small_text_file)
        sweep(tiny_llama_dir, small_text_file, tmp_path / "s", [0.5], UNIFORM, own, overwrite=overwrite, **options)

    def meanwhile(_stage: str, _done: int, _total: int) -> None:
        for overwrite in (False, True):
            with pytest.raises(InputError) as raised:
                call(overwrite)
            refused.append(str(raised.value))

    call(False, progress=meanwhile)
    assert refused
    assert all(f"another run is writing to '{tmp_path / 's' / 'points'}'" in message for message in refused)
    call(False)  # the first one has let go of it


def test_tasks_are_measured_as_eval_does(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    pytest.importorskip("lm_eval")
    lines = [{"query": f"The value of {n} is", "choices": ["a list", "None"], "gold": n % 2} for n in range(9)]
    task = tmp_path / "values.jsonl"
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    call = ("--sparsity", 0.3, "--calibration", small_text_file, *SMALL, "--rounds", 0, "--keep-models")
    result = modegpt("sweep", tiny_llama_dir, "--out", tmp_path / "s", *call, "--tasks", task, "--limit", 8)
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "s" / "sweep.json").read_text())["points"]
    for point, model in zip(points, (tiny_llama_dir, tmp_path / "s" / "models" / "0.3"), strict=True):
        assert point["perplexity"] == []
        found = json.loads(modegpt("eval", model, "--tasks", task, "--limit", 8, "--json", "-").stdout)
        for key in ("task", "acc", "acc_norm", "acc_stderr", "samples"):
            assert point["tasks"][0][key] == found["tasks"][0][key]
        assert point["mean"] == found["mean"]
        assert f"{point['mean']['acc']:.2%}" in result.stdout
    assert (tmp_path / "s" / "accuracy.svg").is_file()
    assert not (tmp_path / "s" / "perplexity.svg").exists()
    fewer = modegpt("sweep", tiny_llama_dir, "--out", tmp_path / "s", *call, "--tasks", task, "--limit", 7)
    assert fewer.exit_code == 2
    assert "task limit" in fewer.stderr
    more = shutil.copy(task, tmp_path / "more.jsonl")
    both = modegpt("sweep", tiny_llama_dir, "--out", tmp_path / "s", *call, "--tasks", f"{task},{more}", "--limit", 8)
    assert """its --tasks is ["values"], and ["values", "more"] was asked for""" in both.stderr
    task.write_text(task.read_text().replace("a list", "a tuple"))
    again = modegpt("sweep", tiny_llama_dir, "--out", tmp_path / "s", *call, "--tasks", task, "--limit", 8)
    assert again.exit_code == 2
    assert "task values" in again.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sparsity", "0.1,half"], ["half", "0.1,0.2"]),
        (["--sparsity", ""], ["sparsity is empty"]),
        (["--sparsity", "0,0.1"], ["sparsity 0", "dense"]),
        (["--sparsity", "0.1,1"], ["sparsity 1.0", "[0, 1)"]),
        (["--sparsity", "0.1,0.1"], ["twice"]),
        (["--allocation", "plan"], ["plan"]),
        (["--rounds", -1], ["rounds -1"]),
        (["--rounds", 1, "--max-windows", 0], ["max_windows 0"]),
        (["--eval-seq-len", 513], ["513", "--eval-seq-len 512"]),
        (["--sparsity", "0.123456781,0.123456781"], ["0.123456781, 0.123456781 names a point twice"]),
        (["--data", "no.txt"], ["no.txt"]),
        (["--calibration", "no.txt"], ["no.txt"]),
    ],
)
def test_wrong_calls_are_refused(
    options: list[object], words: list[str], tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    call = ("--calibration", small_text_file, "--data", small_text_file, *SMALL)
    result = modegpt("sweep", tiny_llama_dir, "--out", tmp_path / "s", *call, *options)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "s").exists()


def test_a_model_too_short_to_be_timed_is_told(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    call = ("--calibration", small_text_file, "--data", small_text_file, *SMALL)
    result = modegpt("sweep", model, "--out", tmp_path / "s", *call)
    assert result.exit_code == 2, result.output
    assert "128 positions; with --rounds 0 nothing is timed" in result.stderr


def test_a_folder_of_something_else_is_refused(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="no sweep"):
        sweep(tiny_llama_dir, small_text_file, tmp_path, [0.3], CONFIG, measures(small_text_file), overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_link_may_lead_to_a_folder_that_is_not_there_yet(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    sweep(tiny_llama_dir, small_text_file, tmp_path / "link", [0.5], UNIFORM, measures(small_text_file))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "sweep" / "sweep.json").is_file()


def test_kept_models_open(swept: tuple[Path, Result]):
    model = AutoModelForCausalLM.from_pretrained(swept[0] / "models" / "0.5")
    table = json.loads((swept[0] / "sweep.json").read_text())
    assert sum(parameter.numel() for parameter in model.parameters()) == table["points"][2]["parameters"]


def test_what_cannot_be_reached_is_told_before_anything_is_measured_or_removed(
    tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    call = (tiny_llama_dir, small_text_file, tmp_path / "s")
    config = CompressionConfig(samples=8, seq_len=64, allocation=RULE, modules=("qk",), solver="paper")
    told: list[str] = []
    with pytest.raises(InputError, match="cannot be reached"):
        sweep(*call, [0.01, 0.9], config, measures(small_text_file), progress=lambda stage, *_steps: told.append(stage))
    assert told == []  # the scores were not computed either
    assert not (tmp_path / "s").exists()
    sweep(*call, [0.3], CONFIG, measures(small_text_file), keep_models=True)
    before = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="cannot be reached"):
        sweep(*call, [0.01, 0.9], config, measures(small_text_file), overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file()} == before


def test_texts_of_one_name_are_two_curves(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    texts = [tmp_path / language / "text.txt" for language in ("en", "de")]
    for index, text in enumerate(texts):
        text.parent.mkdir()
        text.write_text(small_text_file.read_text()[1000 * index :])
    both = Measures(data=tuple(map(str, texts)), seq_len=64, max_windows=2, rounds=0)
    sweep(tiny_llama_dir, small_text_file, tmp_path / "s", [0.3], CONFIG, both)
    drawn = (tmp_path / "s" / "perplexity.svg").read_text()
    for text in texts:
        assert text.parent.name + "/text.txt" in drawn


def test_the_model_is_not_in_what_is_written(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    model = tmp_path / "models" / "llama"
    shutil.copytree(tiny_llama_dir, model)
    (tmp_path / "points").mkdir()
    with pytest.raises(InputError, match=r"models' holds '.*llama', which is read"):
        sweep(model, small_text_file, tmp_path, [0.3], CONFIG, measures(small_text_file), overwrite=True)
    sweep(tiny_llama_dir, small_text_file, tmp_path, [0.3], CONFIG, measures(small_text_file), overwrite=True)
    assert (model / "config.json").is_file()


def test_a_folder_that_cannot_be_made_is_told_before_the_work(small_text_file: Path, tmp_path: Path):
    """There is no such model, which would be told first if it were opened first."""
    for out in (small_text_file / "a" / "sweep", Path("/proc/sweep")):
        with pytest.raises(InputError, match="nothing can be written to"):
            sweep("no model", small_text_file, out, [0.3], CONFIG, measures(small_text_file))


def test_what_differs_is_told_as_the_option_that_it_comes_from(
    swept: tuple[Path, Result], tiny_llama_dir: Path, small_text_file: Path
):
    for rounds, windows, said in ((2, 5, "--max-windows is 6, and 5"), (1, 6, "--rounds is 2, and 1")):
        own = Measures(data=(str(small_text_file),), seq_len=64, max_windows=windows, rounds=rounds)
        with pytest.raises(InputError, match=said):
            sweep(tiny_llama_dir, small_text_file, swept[0], [0.25, 0.5], CONFIG, own)


def test_an_infinite_perplexity_is_kept_and_drawn(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.lm_head.weight.data *= 1e5
    model.save_pretrained(tmp_path / "hot")
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(tmp_path / "hot")
    call = ("sweep", tmp_path / "hot", "--out", tmp_path / "s", "--sparsity", "0.2", "--calibration", small_text_file)
    options = ("--data", small_text_file, "--eval-seq-len", 64, "--max-windows", 2, "--rounds", 0)
    told = [modegpt(*call, *SMALL[:4], *options) for _ in range(2)]
    assert [result.exit_code for result in told] == [0, 0], told[1].output
    assert "inf" in told[0].stdout
    assert told[0].stdout == told[1].stdout
    compared = ("compare", tmp_path / "hot", "--out", tmp_path / "c", "--methods", "paper", *call[4:])
    for _ in range(2):
        result = modegpt(*compared, *SMALL[:4], *options[:-2], "--plot", tmp_path / "plot.svg")
        assert result.exit_code == 0, result.output
        assert "inf" in result.stdout


def test_dtypes_that_differ_are_told(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path, monkeypatch):
    """A GPU computes in the stored dtype; here one is made believe."""
    for module in ("loading.models", "comparing.sweep", "running.source"):
        monkeypatch.setattr(f"modegpt.{module}.compute_dtype", lambda _device, own: own)
    config = replace(CONFIG, dtype="bfloat16", allocation="uniform", solver="paper")
    table = sweep(tiny_llama_dir, small_text_file, tmp_path / "s", [0.3], config, measures(small_text_file))
    assert any("dense in float32, points in bfloat16" in warning for warning in table["warnings"])
