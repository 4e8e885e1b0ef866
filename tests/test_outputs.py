"""Where results go: files are whole or not there, pipes and links stay what they are, and a target is checked first."""

import io
import json
import os
import re
import resource
import shutil
import threading
from pathlib import Path

import pytest
from rich.table import Table

from command_line import assert_refused, modegpt
from modegpt.checkpoint import write_json
from modegpt.commands.shared import check_json, console


@pytest.fixture
def plan(tiny_llama_dir: Path) -> tuple[object, ...]:
    return "plan", tiny_llama_dir, "--sparsity", 0.25, "--samples", 8, "--seq-len", 64


def test_json_goes_into_a_pipe(plan: tuple[object, ...], tmp_path: Path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert modegpt(*plan, "--json", pipe).exit_code == 0
    reader.join(timeout=10)
    assert json.loads(read[0])["layers"]
    assert pipe.is_fifo()


def test_json_goes_where_a_link_points_to(plan: tuple[object, ...], tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for _ in range(2):
        assert modegpt(*plan, "--json", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text())["layers"]


def test_a_killed_write_leaves_the_json_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, file = Path.write_bytes, tmp_path / "report.json"
    write_json({"run": 1}, file)

    def killed(self: Path, data: bytes) -> int:
        write(self, data[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json({"run": 2}, file)
    assert json.loads(file.read_text()) == {"run": 1}


def test_a_full_disk_leaves_the_file_that_was_there(plan: tuple[object, ...], tmp_path: Path):
    (tmp_path / "plan.png").write_text("before")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        result = modegpt(*plan, "--plot", tmp_path / "plan.png")
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "new.json"))):
            write_json({"run": "-" * 2000}, tmp_path / "new.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert_refused(result, str(tmp_path / "plan.png"), code=1)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.png"]
    assert (tmp_path / "plan.png").read_text() == "before"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--json", "/proc/plan.json"], "nothing can be written to '/proc'"),
        (["--json", "{tmp}/none/plan.json"], "none' does not exist"),
        (["--json", "{tmp}/dangling"], "none' does not exist"),
        (["--plot", "{tmp}/none/plan.png"], "none' does not exist"),
        (["--plot", "{tmp}/plan.xyz"], ".png, .svg, .pdf"),
        (["--plot", "{tmp}"], "is a folder"),
    ],
)
def test_a_target_is_checked_before_the_work(options: list[str], word: str, tmp_path: Path):
    """There is no such model, which would be told first if it were opened first."""
    (tmp_path / "dangling").symlink_to(tmp_path / "none" / "plan.json")
    result = modegpt("plan", tmp_path / "no model", *(option.format(tmp=tmp_path) for option in options))
    assert result.exit_code == 2
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_is_no_terminal_cuts_no_figure_short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    made = console(None)
    made.file = io.StringIO()
    made.print(Table("wide" * 30, "figure"))
    assert "wide" * 30 in made.file.getvalue()


def test_a_plan_and_a_share_contradict_each_other(plan: tuple[object, ...], tiny_llama_dir: Path, tmp_path: Path):
    file = tmp_path / "plan.json"
    assert modegpt(*plan, "--json", file).exit_code == 0
    call = ("compress", tiny_llama_dir, "--out", tmp_path / "out", "--plan", file)
    for option, value in (("--sparsity", 0.5), ("--allocation", "influence")):
        result = modegpt(*call, option, value)
        assert result.exit_code == 2
        assert f"leave out {option}" in result.stderr


def test_json_replaces_nothing_that_is_read(tiny_llama_dir: Path, tmp_path: Path):
    text, model = tmp_path / "text.json", shutil.copytree(tiny_llama_dir, tmp_path / "model")
    text.write_text("[]")
    before = (model / "config.json").read_bytes()
    for file in (text, model / "config.json", model / "model.safetensors", model / "tokenizer_config.json"):
        result = modegpt("plan", model, "--calibration", text, "--json", file)
        assert result.exit_code == 2
        assert "would replace what is read" in result.output
    assert (text.read_text(), (model / "config.json").read_bytes()) == ("[]", before)
    check_json(str(model / "eval.json"), model)
    (model / "eval.json").write_text("{}")
    check_json(str(model / "eval.json"), model)  # a result of before
