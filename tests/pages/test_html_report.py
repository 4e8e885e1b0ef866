"""The HTML page: it stands alone, it is well-formed, and it says what the JSON files say."""

import json
import math
import re
import resource
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from command_line import assert_refused
from modegpt import InputError
from modegpt.cli import app
from modegpt.pages import plots
from modegpt.pages.html_report import Names, accuracies, write_report
from modegpt.pages.quality import _speed_table
from modegpt.pages.sections import change

SMALL = ["--samples", "8", "--seq-len", "64"]
VOID = {"meta", "link", "br", "img", "hr", "input"}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_FIGURES = {"quality", "samples"}
"""Sections that a run alone has nothing for."""


def modegpt(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed in order, and everything it would load is noted."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = re.findall(r"url\(([^)]*)\)", text) + re.findall(r"@import\s*(\S+)", text)
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: list[str] = []
        self.text = ""
        self.labels: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if own.get("id"):
            self.ids.append(str(own["id"]))
        if own.get("role") == "img":
            self.labels.append(str(own.get("aria-label")))
        self.references += [
            str(value)
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster") and value is not None
        ]
        assert tag not in ("script", "iframe", "object", "embed")
        if tag == "h3":
            self._title = ""
        if tag == "table":
            self.tables[self._title] = []
        if tag == "tr":
            self.tables[self._title].append([])
        if tag in ("th", "td"):
            self.tables[self._title][-1].append("")
        if tag == "h2":
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        inside = self.open[-1] if self.open else ""
        if inside == "h3":
            self._title += data
        elif inside in ("th", "td"):
            self.tables[self._title][-1][-1] += data
        elif inside == "h2":
            self.headings[-1] += data


@pytest.fixture(scope="module")
def run(tiny_llama_dir: Path, small_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its page, both written by `compress --report`."""
    out = tmp_path_factory.mktemp("reported") / "small"
    options = ("--sparsity", 0.3, "--allocation", "influence-blocks", "--calibration", small_text_file, *SMALL)
    result = modegpt("compress", tiny_llama_dir, "--out", out, *options, "--report")
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report.html").read_text(encoding="utf-8"))


def test_the_page_loads_nothing(page: Page):
    outside = [reference for reference in page.references if not reference.startswith("#") and reference != "data:,"]
    assert outside == []
    assert len(page.references) > 10  # the plots' own clip paths and markers: the list is not empty for want of looking
    assert len(page.ids) == len(set(page.ids))
    assert {reference[1:] for reference in page.references if reference.startswith("#")} <= set(page.ids)


def test_the_page_tells_every_layer_as_the_report_does(run: Path, page: Page):
    report = json.loads((run / "report.json").read_text())
    info = json.loads(modegpt("info", run, "--json", "-").stdout)
    head, *rows = page.tables["Every layer"]
    assert head[2:5] == ["MLP", "query-key", "value-output"]
    assert len(rows) == len(report["layers"]) == 2
    for index, (row, layer, own) in enumerate(zip(rows, report["layers"], info["layers"], strict=True)):
        ranks, errors = layer["ranks"], layer["error"]
        assert row == [
            str(index),
            f"{own['sparsity']:.2%}",
            f"{ranks['mlp']} of 96",
            f"{ranks['qk']} of 16",
            f"{ranks['vo']} of 16",
            *(f"{errors[module]:.4f}" for module in ("mlp", "qk", "vo")),
            f"{own['parameters']:,}",
        ]
    settings = dict(row for row in page.tables["Settings of the run"][1:])
    assert settings["samples"] == "8"
    assert settings["allocation"] == "influence-blocks"
    assert settings["modules"] == "mlp, qk, vo"
    memory = {row[0]: row[1:] for row in page.tables["Memory"][1:]}
    assert memory["parameters"][:2] == [f"{report['parameters'][name]:,}" for name in ("dense", "compressed")]
    for stage in ("decomposing", "importance scores", "writing coverage windows"):
        assert stage in page.text
    assert f"{report['sparsity']['total']:.2%} of all parameters" in page.text
    assert report["command"] in page.text
    assert dict(page.tables["Versions"][1:])["torch"] == report["versions"]["torch"]


def test_a_section_is_there_only_with_its_figures(run: Path, page: Page):
    assert "What was done" in page.headings
    assert not {"Perplexity and accuracy", "What the models write"} & set(page.headings)
    sections = write_report(run, run.parent / "again.html")["sections"]
    assert not NO_FIGURES & set(sections)
    assert (run.parent / "again.html").read_bytes() == (run / "report.html").read_bytes()
    # The plots of removed shares, of ranks, of scores, of errors and of seconds each say what they show.
    assert len(page.labels) == 5
    assert all(len(label) > 40 for label in page.labels)


def test_the_command_measures_both_models(run: Path, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    out = tmp_path / "page.html"
    prompt = "if a <b> & c: </article><script>"
    measured = ("--data", small_text_file, "--seq-len", 64, "--max-windows", 5, "--prompt", prompt)
    result = modegpt("report", run, "--out", out, *measured, "--max-new-tokens", 6, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert Path(found["file"]) == out
    assert set(found["sections"]) >= NO_FIGURES
    page = Page(out.read_text(encoding="utf-8"))
    (entry,) = found["perplexity"]
    for name, model in (("dense", tiny_llama_dir), ("compressed", run)):
        call = ("--data", small_text_file, "--seq-len", 64, "--max-windows", 5, "--json", "-")
        expected = json.loads(modegpt("eval", model, *call).stdout)["results"][0]
        # The same tokens through the same code.
        assert entry["models"][name] == pytest.approx(expected["perplexity"], rel=1e-6)
        assert entry["tokens"] == expected["tokens"] == 5 * 63
    shown = page.tables["Perplexity"]
    assert shown[0][-2:] == ["dense", "compressed"]
    assert shown[1][-2:] == [f"{entry['models'][name]:.4f}" for name in ("dense", "compressed")]
    assert prompt in page.text
    for sample in found["samples"]:
        call = ("generate", tiny_llama_dir if sample["model"] == "dense" else run, "--prompt", prompt)
        expected = json.loads(modegpt(*call, "--max-new-tokens", 6, "--json", "-").stdout)["results"][0]
        assert sample["text"] == expected["text"]
    assert [sample["model"] for sample in found["samples"]] == ["dense", "compressed"]
    warning = f"'{small_text_file}' is the text that the model is calibrated on"
    assert warning in result.stderr
    assert page.text.count(warning) == 1


def test_the_page_takes_what_eval_and_bench_wrote(
    run: Path, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    pytest.importorskip("lm_eval")
    lines = [{"query": f"The value of {n} is", "choices": ["a list", "None"], "gold": n % 2} for n in range(7)]
    (tmp_path / "values.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluated, timed = tmp_path / "eval.json", tmp_path / "bench.json"
    wanted = ("--data", small_text_file, "--seq-len", 64, "--tasks", tmp_path / "values.jsonl", "--json", evaluated)
    assert modegpt("eval", run, tiny_llama_dir, *wanted).exit_code == 0
    grid = ("--batch-sizes", "1,2", "--lengths", 8, "--new-tokens", 2, "--repeats", 2, "--json", timed)
    assert modegpt("bench", run, "--against", tiny_llama_dir, *grid).exit_code == 0
    out = tmp_path / "page.html"
    result = modegpt("report", run, "--out", out, "--eval", evaluated, "--bench", timed)
    assert result.exit_code == 0, result.output
    page = Page(out.read_text(encoding="utf-8"))
    warnings = json.loads(evaluated.read_text())["warnings"]
    assert len(warnings) == 1
    assert warnings[0] in page.text
    compressed, dense = json.loads(evaluated.read_text())["models"]
    expected = [own["results"][0]["perplexity"] for own in (dense, compressed)]
    assert page.tables["Perplexity"][0][-2:] == ["dense", "compressed"]
    assert page.tables["Perplexity"][1][-2:] == [f"{value:.4f}" for value in expected]
    accuracy = [own["tasks"][0] for own in (dense, compressed)]
    shown = {tuple(row[:2]): row[2:] for row in page.tables["Accuracy, %"]}
    assert shown["task", "metric"] == ["samples", "dense", "compressed"]
    for metric in ("acc", "acc_norm"):
        told = [f"{100 * own[metric]:.2f} ± {100 * own[f'{metric}_stderr']:.2f}" for own in accuracy]
        assert shown["values", metric] == ["7", *told]
    assert shown["mean", "acc"][1:] == [f"{100 * o['acc']:.2f} ± {100 * o['acc_stderr']:.2f}" for o in accuracy]
    first, second = json.loads(timed.read_text())["results"]
    rows = page.tables["Speed"][1:]
    assert [row[:2] for row in rows] == [[f"{n} x 8", name] for n in (1, 2) for name in ("compressed", "dense")]
    assert rows[3][3] == f"{second['models']['against']['decode_tokens_per_second']:,.1f}"
    ratio = first["speedups"]["against"]["decode"]["median"]
    assert f"1 x 8: prefill {first['speedups']['against']['prefill']['median']:.2f}, decode {ratio:.2f}" in str(
        page.labels
    )
    assert f"{ratio:.2f} x" in page.text


def test_the_table_of_speeds_has_each_figure_in_its_column():
    speeds = {"prefill_tokens_per_second": 2001.0, "decode_tokens_per_second": 30.25}
    figures = {**speeds, "first_token_seconds": 0.0125, "token_seconds": 0.0075, "peak_memory_bytes": 64e6}
    table = _speed_table({"points": [{"batch_size": 2, "prompt_tokens": 8, "models": {"dense": figures}}]})
    assert table.head[2:] == [
        "prefill, tokens/s", "decode, tokens/s", "first token, ms", "a token, ms", "peak memory, MB"
    ]  # fmt: skip
    assert table.rows == [["2 x 8", "dense", "2,001.0", "30.2", "12.5", "7.5", "64"]]


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line


def test_a_full_disk_leaves_the_page_that_was_there(run: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("before")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        result = modegpt("report", run, "--out", page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert_refused(result, str(page), code=1)
    assert page.read_text() == "before"


def test_wrong_calls_are_refused(run: Path, tiny_llama_dir: Path, tmp_path: Path):
    refused(modegpt("report", tiny_llama_dir), "not a compressed checkpoint")
    refused(
        modegpt("report", run, "--against", tiny_llama_dir, "--dtype", "float32"), "--against and --dtype", "--data"
    )
    refused(modegpt("report", run, "--max-new-tokens", 3), "--max-new-tokens is for --prompt")
    page = tmp_path / "page.html"
    refused(modegpt("report", run, "--out", page, "--json", page), "would replace what is written")
    refused(modegpt("report", run, "--out", tmp_path), "is a folder")
    refused(modegpt("report", run, "--out", run / "config.json"), "config.json", "ends in .html")
    refused(modegpt("report", run, "--json", run / "report.json"), "would replace what is read")
    refused(modegpt("report", run, "--out", tmp_path / "no" / "page.html"), "does not exist")
    refused(modegpt("report", run, "--eval", tmp_path / "no.json"), "no.json")
    refused(modegpt("report", run, "--bench", run / "report.json"), "report.json", "modegpt bench --json")
    refused(modegpt("report", run, "--eval", run / "report.json"), "report.json", "modegpt eval --json")
    refused(modegpt("report", run, "--prompt", ""), "empty")
    refused(modegpt("report", run, "--prompt", "a", "--max-new-tokens", 512), "512 positions")
    refused(modegpt("report", run, "--seq-len", 64), "--seq-len and --max-windows are for --data")
    refused(modegpt("report", run, "--data", "python-docs", "--seq-len", 513), "513", "512")
    folder = tmp_path / "bare"
    shutil.copytree(run, folder)
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(report | {"model": str(tmp_path / "gone")}))
    refused(modegpt("report", folder, "--prompt", "a"), "gone", "--against")
    (folder / "report.json").unlink()
    refused(modegpt("report", folder), "report.json", "modegpt compress")
    (folder / "report.json").write_text("{}")
    refused(modegpt("report", folder), "not the report of this checkpoint")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_told_before_the_work(
    package: str, tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, package, None)
    call = ("compress", tiny_llama_dir, "--out", tmp_path / "out", "--calibration", "python-docs", *SMALL)
    refused(modegpt(*call, "--report"), package, "modegpt[report]")
    assert list(tmp_path.iterdir()) == []


def test_lines_differ_without_their_colour():
    svg = plots.lines({"a": ([0, 1], [1.0, 2.0]), "b": ([0, 1], [2.0, None])}, "x", "y")
    root = ET.fromstring(svg)
    dashed = [node.get("style", "") for node in root.iter("{http://www.w3.org/2000/svg}path")]
    assert any("stroke-dasharray" in style for style in dashed if plots.COLOURS[1].lower() in style.lower())
    assert not any("stroke-dasharray" in style for style in dashed if plots.COLOURS[0].lower() in style.lower())
    hatched = plots.bars(["one"], {"a": [1.0], "b": [2.0]}, "x")
    assert "pattern" in hatched
    assert "<pattern" not in plots.bars(["one"], {"a": [1.0]}, "x")


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_opens_the_page_without_a_complaint(run: Path, tmp_path: Path):
    def complaints(file: Path) -> list[str]:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        call = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}", file.as_uri()]
        done = subprocess.run(call, capture_output=True, text=True, timeout=120)
        assert "<h1>" in done.stdout, done.stderr
        return [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    broken = tmp_path / "broken.html"
    broken.write_text("<h1>broken</h1><script>missing()</script>")
    assert complaints(broken)  # so a complaint would be seen
    assert complaints(run / "report.html") == []


def test_of_nothing_there_is_no_change():
    """A hybrid model without attention layers has no key-value cache."""
    assert (change(0, 0), change(8, 6)) == ("", "-25.0 %")


def test_models_of_one_name_are_told_apart():
    names = Names({"dense": "dense"})
    assert [names(model) for model in ("dense", "a/30", "b/30", "a/30")] == ["dense", "30", "b/30", "30"]


def test_more_series_than_looks_begin_anew():
    series = {str(number): ([0, 1], [number, number]) for number in range(9)}
    assert plots.lines(series, "x", "y").count("<svg") == 1


def test_the_mean_is_of_all_tasks_of_all_files(run: Path):
    def evaluated(task: str, acc: float, stderr: float | None) -> dict[str, Any]:
        tasks = [{"task": task, "samples": 9, "acc": acc, "acc_stderr": stderr, "acc_norm": None}]
        return {"model": str(run), "results": [], "tasks": tasks, "mean": {"acc": acc, "acc_stderr": stderr}}

    names = Names({str(run): "compressed"})
    *_, mean = accuracies([evaluated("a", 0.5, 0.03), evaluated("b", 1.0, 0.04)], names)
    assert (mean["task"], mean["models"]) == ("mean", {"compressed": {"value": 0.75, "stderr": 0.025}})
    *_, mean = accuracies([evaluated("a", 0.5, 0.03), evaluated("b", 1.0, None)], names)
    assert mean["models"]["compressed"] == {"value": 0.75, "stderr": None}


def test_an_infinite_perplexity_is_shown(run: Path, tiny_llama_dir: Path, tmp_path: Path):
    entry = {"data": "text", "seq_len": 64, "tokens": 63, "nll": 1.0, "perplexity": 5.0}
    evals = [
        {"model": str(tiny_llama_dir), "results": [entry], "protocol": {}},
        {"model": str(run), "results": [{**entry, "nll": None, "perplexity": None}], "protocol": {}},
    ]
    result = write_report(run, tmp_path / "page.html", evals=evals, dense=str(tiny_llama_dir))
    assert result["perplexity"][0]["models"] == {"dense": 5.0, "compressed": math.inf}
    assert Page((tmp_path / "page.html").read_text()).tables["Perplexity"][1][-2:] == ["5.0000", "inf"]
    assert change(5.0, math.inf) == change(math.inf, 5.0) == ""


@pytest.mark.parametrize("name", ["dense", "compressed"])
def test_figures_of_a_model_that_was_there_before_are_refused(
    name: str, run: Path, tiny_llama_dir: Path, tmp_path: Path
):
    entry = {"data": "text", "seq_len": 64, "tokens": 63, "nll": 1.0, "perplexity": 5.0}
    counts = json.loads((run / "report.json").read_text())["parameters"]
    model = {"dense": tiny_llama_dir, "compressed": run}[name]
    result = {"model": str(model), "results": [entry], "protocol": {}, "parameters": counts[name]}
    write_report(run, tmp_path / "page.html", evals=[result])
    with pytest.raises(InputError, match=f"figures of the {name} model are of one with 1,234 parameters.*again"):
        write_report(run, tmp_path / "no.html", evals=[result | {"parameters": 1234}])
    assert not (tmp_path / "no.html").exists()


def test_a_model_that_is_timed_against_itself(run: Path, tiny_llama_dir: Path, tmp_path: Path):
    timed = tmp_path / "bench.json"
    grid = ("--batch-sizes", 1, "--lengths", 8, "--new-tokens", 2, "--repeats", 1, "--json", timed)
    assert modegpt("bench", tiny_llama_dir, "--against", tiny_llama_dir, *grid).exit_code == 0
    result = modegpt("report", run, "--out", tmp_path / "page.html", "--bench", timed)
    assert result.exit_code == 0, result.output
    assert "dense, against" in (tmp_path / "page.html").read_text()


def test_names_are_drawn_as_they_are():
    """matplotlib takes dollars for formulas, and leaves out of a legend what begins with `_`."""
    series = {"_a": ([0, 1], [1.0, 2.0]), "q_$5_and_$6": ([0, 1], [2.0, math.inf]), "nothing": ([0], [None])}
    svg = plots.lines(series, "x", "costs $a_ and $b", log=True)
    drawn = plots.bars(["$x_ and $"], {"_a": [1.0], "b": [None]}, "y")
    for text in ("_a", "q_$5_and_$6", "costs $a_ and $b"):
        assert text in svg
    assert "_a" in drawn
    assert "<title>back\\model \\1</title>" in plots.standalone(svg, "back\\model \\1")


def test_a_task_with_two_numbers_of_samples_has_no_mean_and_dtypes_that_differ_are_told(run: Path, tmp_path: Path):
    """Each figure may come of a call of its own, which knows nothing of the others."""
    model = json.loads((run / "report.json").read_text())["model"]

    def measured(name: str, dtype: str, samples: int) -> dict[str, Any]:
        task = {"task": "values", "samples": samples, "acc": 0.5, "acc_stderr": 0.1}
        return {"models": [{"model": name, "dtype": dtype, "results": [], "tasks": [task]}], "protocol": {}}

    evals = [measured(name, "float32", 3) for name in (model, str(run))]
    found = write_report(run, tmp_path / "one.html", evals=evals)
    assert [entry["task"] for entry in found["accuracy"]] == ["values", "mean"]
    assert "different dtypes" not in (tmp_path / "one.html").read_text()
    evals += [measured(str(run), "bfloat16", 2), measured(model, "float32", 2)]
    found = write_report(run, tmp_path / "two.html", evals=evals)
    assert [(entry["task"], entry["samples"]) for entry in found["accuracy"]] == [("values", 3), ("values", 2)]
    warning = "computed in different dtypes, which differ by themselves: dense in float32, compressed in bfloat16"
    assert warning in Page((tmp_path / "two.html").read_text(encoding="utf-8")).text
