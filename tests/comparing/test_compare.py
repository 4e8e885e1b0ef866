"""The comparison: every method on the same text, rows that are kept, and calls that are refused before the work."""

import inspect
import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PhiConfig

from command_line import cells, modegpt
from modegpt import CompressionConfig, InputError, compress, perplexity
from modegpt.baselines import BASELINES
from modegpt.baselines.walk import layer_parameters
from modegpt.calibration import load_text, tokenize
from modegpt.checks.tiny import random_model
from modegpt.commands.compare import _table
from modegpt.commands.compare import compare as command
from modegpt.comparing.compare import METHODS, compare
from modegpt.comparing.measures import Measures
from modegpt.pages import compare_plot, plots

SMALL = ["--samples", "8", "--seq-len", "64"]
CONFIG = CompressionConfig(samples=8, seq_len=64)


def measures(text: Path) -> Measures:
    return Measures(data=(str(text),), seq_len=64, max_windows=4, rounds=0)


@pytest.fixture(scope="module")
def compared(tiny_llama_dir: Path, small_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """All methods at two sparsities, by the command."""
    out = tmp_path_factory.mktemp("compared") / "rows of all"
    call = ("--sparsity", "0.5,0.25", "--methods", ",".join((*METHODS, "best:influence")), *SMALL)
    own = ("--data", small_text_file, "--eval-seq-len", 64, "--max-windows", 4, "--plot", out.parent / "plot.svg")
    result = modegpt("compare", tiny_llama_dir, "--out", out, "--calibration", small_text_file, *call, *own)
    assert result.exit_code == 0, result.output
    return result, out


def test_every_method_has_a_row_at_every_sparsity(compared: tuple[Any, Path]):
    table = json.loads((compared[1] / "compare.json").read_text())
    found = [(row["method"], row["sparsity"]["requested"]) for row in table["rows"]]
    methods = [*METHODS, "best:influence"]
    assert found == [("dense", 0.0), *((method, share) for share in (0.25, 0.5) for method in methods)]
    total = {round(row["removed"] / row["sparsity"]["blocks"]) for row in table["rows"][1:]}
    assert len(total) == 1  # all count the parameters of the same blocks
    for row in table["rows"][1:]:
        (entry,) = row["perplexity"]
        assert entry["perplexity"] != table["rows"][0]["perplexity"][0]["perplexity"]
        assert entry["tokens"] == 4 * 63
    assert {"command", "versions", "machine"} <= table.keys()
    of_text, *apart = table["warnings"]
    assert of_text == (
        f"'{table['measures']['data'][0]}' is the text that the model is calibrated on: its perplexity there says "
        "little of other text"
    )
    # Two layers, of which ShortGPT and SLEB leave out one for a fourth and for half of them.
    assert len(apart) == 2
    for share, warning in zip((0.25, 0.5), apart, strict=True):
        found = [row["sparsity"]["blocks"] for row in table["rows"] if row["sparsity"]["requested"] == share]
        assert warning.startswith(f"at {share} the methods removed between {min(found):.1%} and {max(found):.1%}")
    for name in methods:
        assert compared[0].stdout.count(f"│ {name} ") == 2


def test_the_command_compares_all_methods_by_default():
    assert inspect.signature(command).parameters["methods"].default.default == ",".join(METHODS)


def test_the_plot_has_a_line_for_each_method(compared: tuple[Any, Path]):
    root = ET.fromstring((compared[1].parent / "plot.svg").read_bytes())
    written = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [name for name in written if name in (*METHODS, "best:influence")] == [*METHODS, "best:influence"]
    assert "% of the decoder blocks' parameters removed" in written


def three_rows() -> dict[str, Any]:
    """A result of which all figures differ."""

    def row(method: str, asked: float, removed: float, perplexity: float, accuracy: float) -> dict[str, Any]:
        return {
            "method": method,
            "sparsity": {"requested": asked, "blocks": removed, "total": removed / 2},
            "perplexity": [{"data": "text.txt", "perplexity": perplexity}],
            "mean": {"acc": accuracy},
        }

    cut = [row("flap", 0.25, 0.25390625, 9.0, 0.625), row("paper", 0.25, 0.28125, 8.0, 0.5)]
    return {"model": "model", "rows": [row("dense", 0.0, 0.0, 5.0, 0.75), *cut]}


def test_the_best_of_a_sparsity_is_marked():
    table = _table(three_rows())
    headings = ["asked for", "method", "of the blocks", "perplexity, text.txt", "mean accuracy"]
    assert [column.header for column in table.columns] == headings
    assert cells(table) == [
        ("", "dense", "0.00%", "5.00", "75.00%"),
        ("25%", "flap", "25.39%", "9.00", "[bold]62.50% *[/bold]"),
        ("25%", "paper", "28.12%", "[bold]8.00 *[/bold]", "50.00%"),
    ]


def test_a_line_goes_from_the_dense_model_to_what_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(plots, "lines", lambda series, *_labels, **_look: drawn.update(series) or "<svg></svg>")
    compare_plot.draw(three_rows(), tmp_path / "plot.svg")
    assert drawn == {"flap": ([0.0, 25.390625], [5.0, 9.0]), "paper": ([0.0, 28.125], [5.0, 8.0])}


def test_our_row_is_what_compress_gives(
    compared: tuple[Any, Path], tiny_llama_dir: Path, small_text_file: Path, tiny_tokenizer: Any
):
    table = json.loads((compared[1] / "compare.json").read_text())
    for solver, rule in (("best", "uniform"), ("paper", "uniform"), ("best", "influence")):
        config = CompressionConfig(samples=8, seq_len=64, sparsity=0.25, solver=solver, allocation=rule)
        model: Any = compress(str(tiny_llama_dir), str(small_text_file), config)
        tokens = tokenize(load_text(str(small_text_file), "evaluation"), tiny_tokenizer)
        method = solver if rule == "uniform" else f"{solver}:{rule}"
        row = next(r for r in table["rows"] if r["method"] == method and r["sparsity"]["requested"] == 0.25)
        assert row["sparsity"]["blocks"] == model.modegpt_report["sparsity"]["blocks"]
        # Both in float32; the row's model was made of the dense model in memory.
        assert row["perplexity"][0]["perplexity"] == pytest.approx(
            perplexity(model, tokens, 64, 4).perplexity, rel=1e-5
        )


def test_what_is_asked_of_best_is_not_asked_of_paper(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    call = ["compare", tiny_llama_dir, "--sparsity", 0.25, "--methods", "paper,best", "--calibration", small_text_file]
    call += ["--samples", 4, "--seq-len", 32, "--data", small_text_file, "--eval-seq-len", 64, "--max-windows", 2]
    found = {}
    for name, settings in (("plain", []), ("asked", ["--feedback", "--coverage", 0.5, "--rarity", 0.5])):
        result = modegpt(*call, *settings, "--out", tmp_path / name, "--json", "-")
        assert result.exit_code == 0, result.output
        for row in json.loads(result.stdout)["rows"]:
            found[name, row["method"]] = row["perplexity"][0]["perplexity"]
    assert found["plain", "paper"] == found["asked", "paper"]
    assert found["plain", "best"] != found["asked", "best"]


def test_rows_that_are_done_are_kept(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    told: list[str] = []
    call = (tiny_llama_dir, small_text_file, tmp_path / "out")
    first = compare(*call, ["flap", "paper"], [0.3], CONFIG, measures(small_text_file))
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "rows").iterdir()}
    both = ["flap", "paper", "wanda-sp"]
    again = compare(
        *call, both, [0.3], CONFIG, measures(small_text_file), progress=lambda stage, _done, _all: told.append(stage)
    )
    assert again["rows"][:3] == first["rows"]
    assert {stage.split()[0] for stage in told} == {"wanda-sp", "wanda-sp-0.3"}
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in stamps.items())
    other = CompressionConfig(samples=8, seq_len=64, seed=1)
    with pytest.raises(InputError, match="calibration tokens"):
        compare(*call, both, [0.3], other, measures(small_text_file))
    anew = compare(*call, ["flap"], [0.3], other, measures(small_text_file), overwrite=True)
    assert {file.name for file in (tmp_path / "out" / "rows").iterdir()} == {"dense.json", "flap-0.3.json"}
    assert anew["rows"][1]["perplexity"][0]["perplexity"] != first["rows"][1]["perplexity"][0]["perplexity"]


def test_a_second_comparison_in_the_same_folder_is_refused(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    refused: list[str] = []

    def call(**options: Any) -> None:
        own = measures(small_text_file)
        compare(tiny_llama_dir, small_text_file, tmp_path / "c", ["flap"], [0.5], CONFIG, own, **options)

    def meanwhile(_stage: str, _done: int, _total: int) -> None:
        with pytest.raises(InputError) as raised:
            call(overwrite=True)
        refused.append(str(raised.value))

    call(progress=meanwhile)
    assert refused
    assert all(f"another run is writing to '{tmp_path / 'c' / 'rows'}'" in message for message in refused)
    call()  # the first one has let go of it


def test_a_setting_of_our_solvers_keeps_the_rows_of_others(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    call = (tiny_llama_dir, small_text_file, tmp_path / "out", ["flap", "paper"], [0.3])
    table = compare(*call, CONFIG, measures(small_text_file))
    assert not any("the methods removed" in warning for warning in table["warnings"])  # both 30 %, but for a unit
    with pytest.raises(InputError, match=r"paper-0\.3\.json.*setting ridge"):
        compare(*call, CompressionConfig(samples=8, seq_len=64, ridge=2.0), measures(small_text_file))


def test_what_other_methods_do_not_heed_is_told(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    call = ("--calibration", small_text_file, "--data", small_text_file, "--samples", 4, "--seq-len", 64)
    call = (*call, "--eval-seq-len", 64, "--max-windows", 2, "--sparsity", 0.1, "--methods", "flap,paper")
    call = (*call, "--modules", "mlp", "--round-to", 4, "--ridge", 2, "--rarity", 0)
    done = modegpt("compare", tiny_llama_dir, "--out", tmp_path / "out", *call)
    assert done.exit_code == 0, done.output
    assert "warning: round_to, modules: heeded by best and paper, not by flap\n" in done.stdout
    assert "warning: ridge: heeded by paper, not by flap\n" in done.stdout
    assert "warning: rarity: heeded by best, not by flap, paper\n" in done.stdout
    assert "warning: paper: qk stays whole, as it is not among the modules to compress" in done.stdout


def test_what_cannot_be_is_told_before_a_row_is_made(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    """A row of another call, and a sparsity that our settings cannot reach, though other rows would come first."""
    call = (tiny_llama_dir, small_text_file, tmp_path / "out")
    compare(*call, ["paper"], [0.3], CONFIG, measures(small_text_file))
    other = CompressionConfig(samples=8, seq_len=64, ridge=2.0)
    with pytest.raises(InputError, match="setting ridge"):
        compare(*call, ["flap", "paper"], [0.3], other, measures(small_text_file))
    limited = CompressionConfig(samples=8, seq_len=64, max_sparsity=0.5)
    with pytest.raises(InputError, match=r"0\.9 cannot be reached"):
        compare(*call, ["flap", "best:influence"], [0.3, 0.9], limited, measures(small_text_file))
    assert {file.name for file in (tmp_path / "out" / "rows").iterdir()} == {"dense.json", "paper-0.3.json"}


@pytest.mark.parametrize("method", ["flap", "wanda-sp", "svd-llm", "slicegpt"])
def test_a_method_says_how_much_it_can_remove(method: str, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    call = (tiny_llama_dir, small_text_file, tmp_path / "out", [method])
    with pytest.raises(InputError, match=r"% was asked for; give a smaller --sparsity") as raised:
        compare(*call, [0.999], CONFIG, measures(small_text_file))
    told = re.match(rf"{method} can remove (\d+\.\d)% of the blocks of this model, and 99\.9% was", str(raised.value))
    assert told is not None
    most = float(told[1]) / 100
    (row,) = compare(*call, [most - 0.005], CONFIG, measures(small_text_file))["rows"][1:]
    assert most - 0.005 <= row["sparsity"]["blocks"] <= most + 0.0005


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--methods", "gptq"], "method 'gptq' is not known; give some of best, paper, shortgpt"),
        (["--methods", "flap:error"], "flap has no other rule for ranks"),
        (["--methods", "best:plan"], "the rule 'plan' is none of uniform"),
        (["--methods", "best:"], "the rule '' is none of"),
        (["--methods", ","], "methods is empty"),
        (["--methods", "flap,flap"], "method flap is there twice"),
        (["--sparsity", "0.2,0.20"], "sparsity 0.2 is there twice"),
        (["--sparsity", "0"], "give shares above 0 and below 1"),
        (["--sparsity", "half"], "no list of numbers"),
        (["--plot", "plot.png"], "give a file name that ends in .svg"),
        (["--plot", "{folder}"], "is a folder"),
        (["--plot", "plot.svg", "--tasks", "arc_easy"], "add --data"),
        (["--limit", "3"], "--limit is for the samples of --tasks"),
        (["--tasks", "arc_easy", "--eval-seq-len", "64"], "--eval-seq-len and --max-windows are for --data"),
        (["--out", "{file}"], "is a file; give a folder name"),
        (["--out", "{folder}"], "holds something that is no comparison"),
    ],
)
def test_a_wrong_call_is_told_before_the_model_is_opened(options: list[str], word: str, tmp_path: Path):
    (tmp_path / "file").touch()
    own = [option.format(file=tmp_path / "file", folder=tmp_path) for option in options]
    where = [] if "--out" in own else ["--out", tmp_path / "out"]
    result = modegpt("compare", tmp_path / "no model", "--calibration", "python-docs", *where, *own)
    assert result.exit_code == 2
    assert word in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_calibration_text_beyond_the_vocabulary_is_refused(
    tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    """Of another tokenizer, in a word that the text to measure on does not hold."""
    model, text, out = shutil.copytree(tiny_llama_dir, tmp_path / "model"), tmp_path / "text.txt", tmp_path / "c"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(model)
    text.write_text("zebra" * 8 * 64)
    with pytest.raises(InputError, match="calibration text has tokens from 384 to 384, and the model has 384 of them"):
        compare(model, text, out, ["flap"], [0.3], CONFIG, measures(small_text_file))
    assert not out.exists()


def test_a_method_that_does_not_know_the_family_is_told_first(
    tiny_tokenizer: Any, small_text_file: Path, tmp_path: Path
):
    """The blocks of Phi add attention and MLP at once."""
    config = PhiConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=0,
    )
    random_model(config).save_pretrained(tmp_path / "phi")
    tiny_tokenizer.save_pretrained(tmp_path / "phi")
    call = ("compare", tmp_path / "phi", "--out", tmp_path / "out", "--calibration", small_text_file, *SMALL)
    own = ("--data", small_text_file, "--eval-seq-len", 64, "--max-windows", 2)
    result = modegpt(*call, "--methods", "best,slicegpt", *own)
    assert result.exit_code == 2
    assert "slicegpt cannot be compared on 'phi': its blocks do not add attention and then MLP" in result.stderr
    assert "give --methods best\n" in result.stderr
    assert not (tmp_path / "out").exists()
    assert modegpt(*call, "--methods", "shortgpt,sleb,flap,wanda-sp,svd-llm", *own).exit_code == 0


def test_the_dense_model_on_disk_is_not_touched(compared: tuple[Any, Path], tiny_llama_dir: Path):
    assert {file.name for file in compared[1].iterdir()} == {"compare.json", "rows"}
    assert AutoModelForCausalLM.from_pretrained(tiny_llama_dir).config.model_type == "llama"


def test_other_files_in_its_folders_outlive_an_overwrite(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    call = (tiny_llama_dir, small_text_file, tmp_path, ["shortgpt"])
    (tmp_path / "rows").mkdir()
    for name, text in (("thesis.csv", "years"), ("notes.json", '{"mine": 1}')):
        (tmp_path / "rows" / name).write_text(text)
    compare(*call, [0.5], CONFIG, measures(small_text_file))
    compare(*call, [0.25], CONFIG, measures(small_text_file), overwrite=True)
    own = {"dense.json", "shortgpt-0.25.json"}
    assert {file.name for file in (tmp_path / "rows").iterdir()} == {"thesis.csv", "notes.json", *own}


def test_what_is_read_is_not_in_what_is_written(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    inside = tmp_path / "rows" / "text.txt"
    inside.parent.mkdir()
    inside.write_bytes(small_text_file.read_bytes())
    for calibration, data in ((inside, small_text_file), (small_text_file, inside)):
        with pytest.raises(InputError, match=r"rows' holds '.*text\.txt', which is read"):
            compare(tiny_llama_dir, calibration, tmp_path, ["paper"], [0.5], CONFIG, measures(data), overwrite=True)
    assert inside.is_file()


def test_texts_in_another_order_are_another_comparison(
    tiny_llama_dir: Path, small_text_file: Path, small_text: str, tmp_path: Path
):
    other, again = tmp_path / "other.txt", tmp_path / "again.txt"
    other.write_text(small_text[20_000:], encoding="utf-8")
    again.write_text(small_text[20_000:], encoding="utf-8")
    call = (tiny_llama_dir, small_text_file, tmp_path / "c", ["shortgpt"], [0.5], CONFIG)

    def on(*texts: Path) -> Measures:
        return Measures(data=tuple(map(str, texts)), seq_len=64, max_windows=4, rounds=0)

    first = compare(*call, on(small_text_file, other))
    with pytest.raises(InputError, match="its evaluation text 1 is"):
        compare(*call, on(other, small_text_file))
    # The same text by another name is the same.
    assert compare(*call, on(small_text_file, again))["rows"] == first["rows"]


@pytest.mark.parametrize("text", ["{}", '{"fingerprint": 3}', "[]"])
def test_a_row_that_is_something_else_is_told(text: str, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "dense.json").write_text(text)
    with pytest.raises(InputError, match=r"dense\.json' is something else than this program wrote"):
        compare(tiny_llama_dir, small_text_file, tmp_path, ["shortgpt"], [0.5], CONFIG, measures(small_text_file))


@pytest.mark.parametrize("method", ["flap", "wanda-sp", "svd-llm", "slicegpt"])
def test_the_most_that_a_method_can_remove_is_known_before(method: str, tiny_llama_dir: Path, small_text_file: Path):
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    windows, total = torch.arange(64).view(2, 32), sum(layer_parameters(dense))
    baseline = BASELINES[method]
    at, most = baseline.start(dense, windows, lambda *_stage: None), baseline.most(dense)
    assert 0 < most <= total
    # To the parameter for those that cut all at once; wanda-sp rounds its units up in every block.
    assert at(most / total).removed == pytest.approx(most, abs=1 if method != "wanda-sp" else total / 50)
    with pytest.raises(InputError, match=f"{method} can remove"):
        at(most / total + 0.01)


def test_free_widths_are_told_where_compress_would_align_them(
    tmp_path: Path, tiny_tokenizer: Any, small_text_file: Path
):
    """On a CPU a model in 16 bits is compared in float32, where no width suits a GPU's kernels better."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=2, vocab_size=384
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    where = str(tmp_path / "model"), small_text_file
    for round_to, told in ((None, 1), (1, 0)):
        settings = CompressionConfig(samples=4, seq_len=32, round_to=round_to, solver="paper")
        table = compare(*where, tmp_path / f"out {told}", ["paper"], [0.3], settings, measures(small_text_file))
        found = [warning for warning in table["warnings"] if "in multiples of 8 where it writes bfloat16" in warning]
        assert len(found) == told
