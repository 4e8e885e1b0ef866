"""What a run leaves, takes and removes in the file system: nothing but its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from modegpt import CompressionConfig, InputError, NumericalError
from modegpt.checkpoint import check_output
from modegpt.compress import compress, compress_to_folder
from modegpt.errors import WriteError
from modegpt.running import partial
from modegpt.running.partial import PartialCheckpoint
from modegpt.running.surgery import BlockOutcome

CONFIG = CompressionConfig(sparsity=0.25, samples=4, seq_len=32, solver="paper")
WINDOWS = torch.arange(128).view(4, 32)
RUN = {"setting": 1}


def unfinished(out: Path) -> Path:
    """Begin a run as a kill would leave it."""
    return PartialCheckpoint(out, RUN, False, False).folder


@pytest.mark.parametrize("suffix", ["partial", "previous"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_beside_the_output_are_left_alone(tiny_llama_dir: Path, tmp_path: Path, suffix: str, overwrite: bool):
    out, own = tmp_path / "out", tmp_path / f"out.{suffix}"
    if overwrite:
        out.mkdir()
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.txt").write_text("precious")
    if suffix == "partial":
        with pytest.raises(InputError, match=r"out\.partial'.*holds something else: move it away"):
            compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, overwrite=overwrite)
    else:
        compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, overwrite=overwrite)
        assert (out / "report.json").is_file()
    assert (own / "model" / "mine.txt").read_text() == "precious"


def test_a_file_put_into_a_partial_folder_outlives_it(tmp_path: Path):
    folder = unfinished(tmp_path / "out")
    (folder / "notes.txt").touch()
    PartialCheckpoint(tmp_path / "other", RUN, False, False).discard()
    assert not (tmp_path / "other.partial").exists()
    with pytest.raises(InputError, match="holds something else"):
        PartialCheckpoint(tmp_path / "out", RUN, False, True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("inside", ["", "deep/inside"])
def test_the_model_that_is_read_is_never_replaced(tiny_llama_dir: Path, tmp_path: Path, inside: str):
    out = tmp_path / "out"
    model = shutil.copytree(tiny_llama_dir, out / inside)
    (tmp_path / "link").symlink_to(out)
    for given in (out, tmp_path / "link"):
        for resume in (False, True):
            with pytest.raises(InputError, match="holds the model"):
                compress_to_folder(model, WINDOWS, given, CONFIG, overwrite=True, resume=resume)
    assert (model / "model.safetensors").is_file()


def test_of_a_link_the_target_is_replaced(tiny_llama_dir: Path, tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    for _ in range(2):
        compress_to_folder(tiny_llama_dir, WINDOWS, link, CONFIG, overwrite=True)
        assert link.is_symlink()
        assert (target / "report.json").is_file()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


@pytest.mark.parametrize("out", [".", ".."])
def test_the_folder_here_is_not_replaced(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="the folder that the call is made in"):
        compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, overwrite=True)
    assert (tmp_path / "here").is_dir()


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs a mount point")
def test_a_mount_point_is_not_replaced(tmp_path: Path):
    (tmp_path / "link").symlink_to("/proc")
    for out in ("/proc", tmp_path / "link"):
        with pytest.raises(InputError, match="is a mount point, which cannot be replaced: give a folder inside it"):
            check_output(out, overwrite=True)


@pytest.mark.parametrize("inside", ["", "deep/inside"])
def test_a_link_to_itself_is_named(tiny_llama_dir: Path, tmp_path: Path, inside: str):
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "link")
    with pytest.raises(InputError, match="leads through a link that points back to itself"):
        compress_to_folder(tiny_llama_dir, WINDOWS, tmp_path / "link" / inside, CONFIG, overwrite=True)


def test_killed_between_its_two_last_renames_it_loses_neither_folder(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    folder = unfinished(out)
    out.rename(folder / "previous")
    PartialCheckpoint(out, RUN, True, False)
    assert (out / "old").is_file()
    out.rename(folder / "previous")
    PartialCheckpoint(out, {"setting": 2}, False, True)
    assert (out / "old").is_file()


def test_overwrite_wins_over_resume_where_the_settings_differ(tmp_path: Path):
    folder = unfinished(tmp_path / "out")
    (folder / "layers" / "00000.safetensors").touch()
    with pytest.raises(InputError, match="its setting is 1, and 2 was asked for"):
        PartialCheckpoint(tmp_path / "out", {"setting": 2}, True, False)
    PartialCheckpoint(tmp_path / "out", RUN, True, True)
    assert any((folder / "layers").iterdir())
    PartialCheckpoint(tmp_path / "out", {"setting": 2}, True, True)
    assert not any((folder / "layers").iterdir())


@pytest.mark.parametrize("resume", [False, True])
def test_a_broken_fingerprint_is_named_and_can_be_discarded(tmp_path: Path, resume: bool):
    folder = unfinished(tmp_path / "out")
    (folder / "fingerprint.json").write_text('{"setting"')
    with pytest.raises(InputError, match=r"fingerprint\.json' is broken .*--overwrite"):
        PartialCheckpoint(tmp_path / "out", RUN, resume, False)
    PartialCheckpoint(tmp_path / "out", RUN, resume, True)
    assert json.loads((folder / "fingerprint.json").read_text()) == RUN


@pytest.mark.parametrize("left", [[], ["fingerprint.json.tmp"]])
def test_killed_as_it_begins_it_begins_again(tmp_path: Path, left: list[str]):
    folder = tmp_path / "out.partial"
    folder.mkdir()
    for name in left:
        (folder / name).touch()
    PartialCheckpoint(tmp_path / "out", RUN, True, False).discard()
    assert list(tmp_path.iterdir()) == []


def test_the_next_try_clears_hidden_states(tmp_path: Path):
    folder = unfinished(tmp_path / "out")
    (folder / "hidden").mkdir()
    (folder / "hidden" / "0").touch()
    PartialCheckpoint(tmp_path / "out", RUN, True, False)
    assert not (folder / "hidden").exists()


@pytest.mark.parametrize("kept", [torch.rand(5, 3, dtype=torch.float64), torch.arange(6).view(2, 3)])
def test_what_all_layers_depend_on_is_kept_to_the_last_bit(tmp_path: Path, kept: torch.Tensor):
    partial = PartialCheckpoint(tmp_path / "out", RUN, False, False)
    partial.write_tensor("scores", kept)
    found = partial.read_tensor("scores")
    assert found is not None
    assert found.dtype == kept.dtype
    assert torch.equal(found, kept)


def test_a_layer_has_no_name_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = PartialCheckpoint(tmp_path / "out", RUN, False, False)

    def killed(_tensors: object, file: Path, _metadata: object) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(partial, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_layer(0, {"weight": torch.zeros(2)}, BlockOutcome({}, {}))
    assert not list(checkpoint.folder.rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["scores", "coverage"])
def test_what_a_kill_has_cut_is_made_again(tmp_path: Path, name: str):
    partial = PartialCheckpoint(tmp_path / "out", RUN, False, False)
    partial.write_tensor(name, torch.arange(3))
    (partial.folder / f"{name}.json").write_text("")
    assert partial.read_tensor(name) is None


@pytest.mark.parametrize("rule", ["influence", "influence-blocks", "owl", "error"])
def test_a_wrong_call_does_nothing_and_leaves_nothing_behind(tiny_llama_dir: Path, tmp_path: Path, rule: str):
    impossible, told = CompressionConfig(sparsity=0.9, modules=("qk",), allocation=rule), []
    with pytest.raises(InputError, match="cannot be reached"):
        compress_to_folder(
            tiny_llama_dir, WINDOWS, tmp_path / "out", impossible, progress=lambda *stage: told.append(stage)
        )
    assert told == []  # no block was scored
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["lm_head", "model.embed_tokens"])
def test_what_float16_does_not_hold_outside_the_blocks_is_told_before_them(
    tiny_llama_dir: Path, tmp_path: Path, where: str
):
    dense, told = AutoModelForCausalLM.from_pretrained(tiny_llama_dir), []
    with torch.no_grad():
        dense.get_submodule(where).weight[0, 0] = 1e6
    dense.save_pretrained(tmp_path / "dense")
    config = CompressionConfig(sparsity=0.25, dtype="float16")
    for model, out in ((tmp_path / "dense", tmp_path / "out"), (dense, None)):
        with pytest.raises(NumericalError, match=f"'{where}.weight' is too large for float16: ask for bfloat16"):
            compress(model, WINDOWS, config, out=out, progress=lambda *stage: told.append(stage))
    assert told == []
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_broken_report_is_that_of_no_finished_run(tiny_llama_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG)
    whole = (out / "model.safetensors").read_bytes()
    for broken in ('{"model"', "[]"):
        (out / "report.json").write_text(broken)
        with pytest.raises(InputError, match="exists; choose another, or add --overwrite"):
            compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, resume=True)
        report = compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, resume=True, overwrite=True)
        assert json.loads((out / "report.json").read_text()) == report
        assert (out / "model.safetensors").read_bytes() == whole


def test_layers_that_cannot_be_linked_are_copied(tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a file system without hard links: the layers are on another one than the checkpoint."""
    memory, out = Path("/dev/shm"), tmp_path / "out"
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    monkeypatch.setattr("modegpt.checkpoint.MAX_FILE_BYTES", 0)
    compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG)
    linked = {file.name: file.read_bytes() for file in out.glob("*.safetensors*")}
    assert len(linked) > 2
    with tempfile.TemporaryDirectory(dir=memory) as layers:

        def elsewhere(stage: str, done: int, _total: int) -> None:
            if (stage, done) == ("compress", 0):
                (tmp_path / "out.partial" / "layers").rmdir()
                (tmp_path / "out.partial" / "layers").symlink_to(layers)

        compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, overwrite=True, progress=elsewhere)
    assert {file.name: file.read_bytes() for file in out.glob("*.safetensors*")} == linked


def test_another_spelling_of_the_settings_resumes(tiny_llama_dir: Path, tmp_path: Path):
    """Modules in another order, and the dtype that `auto` means."""
    out = tmp_path / "out"

    def stop(stage: str, done: int, _total: int) -> None:
        if stage == "compress" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, progress=stop)
    assert not out.exists()
    again = replace(CONFIG, modules=("vo", "mlp", "qk"), dtype="float32")
    compress_to_folder(tiny_llama_dir, WINDOWS, out, again, resume=True)
    assert (out / "report.json").is_file()


def test_another_spelling_of_the_model_resumes(
    tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that spills its hidden states is killed as it does; the next goes on with it."""
    (tmp_path / "model").symlink_to(tiny_llama_dir)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "modegpt", "compress", "--calibration", str(small_text_file), "--samples", "64"]
    command += ["--seq-len", "256", "--max-host-memory", "1", "--out", "out"]
    process = subprocess.Popen([*command, "model"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    spilled = tmp_path / "out.partial" / "hidden"
    while not any(spilled.glob("*/*")) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert spilled.is_dir(), "it was killed too late"
    done = subprocess.run([*command, f"{tmp_path}/./model/", "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["model"] == str(tmp_path / "model")


def test_files_are_numbered_from_one(tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modegpt.checkpoint.MAX_FILE_BYTES", 0)
    compress_to_folder(tiny_llama_dir, WINDOWS, tmp_path / "out", CONFIG)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert (tmp_path / "out" / "generation_config.json").is_file()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_the_folder_that_is_replaced_stays_until_the_new_one_is_there(
    tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "old").touch()
    (out / "config.json").touch()

    def stop(self: Path, target: Path) -> Path:
        if self.name == "model":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, overwrite=True)
    assert (out / "old").exists() or (tmp_path / "out.partial" / "previous" / "old").exists()


def test_all_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    flushed: set[str] = set()
    replace, rename, flush, asked = Path.replace, Path.rename, partial._flush, []

    def note(path: Path) -> None:
        flush(path)
        flushed.add(path.name)

    def replaced(self: Path, target: Path) -> Path:
        if "layers" in self.parts:
            asked.append(self.name)
            assert self.name in flushed
        return replace(self, target)

    def renamed(self: Path, target: Path) -> Path:
        if self.name == "model":
            asked.append(self.name)
            assert {path.name for path in self.iterdir() if path.is_file()} <= flushed
        return rename(self, target)

    monkeypatch.setattr(partial, "_flush", note)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    compress_to_folder(tiny_llama_dir, WINDOWS, tmp_path / "out", CONFIG)
    assert len(asked) > 1
    assert asked[-1] == "model"


def test_two_runs_do_not_write_to_one_place(tmp_path: Path):
    first = PartialCheckpoint(tmp_path / "out", RUN, False, False)
    for resume, overwrite in ((False, False), (True, False), (False, True), (True, True)):
        with pytest.raises(InputError, match=r"another run is writing to '.*out\.partial'"):
            PartialCheckpoint(tmp_path / "out", RUN, resume, overwrite)
    first.release()
    second = PartialCheckpoint(tmp_path / "out", {"setting": 2}, False, True)
    with pytest.raises(InputError, match="another run"):
        PartialCheckpoint(tmp_path / "out", {"setting": 2}, True, False)
    second.discard()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_lock(tmp_path: Path):
    begin = "import sys, time; from pathlib import Path; from modegpt.running.partial import PartialCheckpoint\n"
    begin += "own = PartialCheckpoint(Path(sys.argv[1]), {'setting': 1}, False, False); print('begun', flush=True)\n"
    running = subprocess.Popen(
        [sys.executable, "-c", begin + "time.sleep(60)", str(tmp_path / "out")], stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline().strip() == b"begun"
    with pytest.raises(InputError, match="another run"):
        PartialCheckpoint(tmp_path / "out", RUN, True, False)
    running.kill()
    running.wait()
    PartialCheckpoint(tmp_path / "out", RUN, True, False)


def test_a_folder_that_appears_during_a_run_is_not_replaced(tiny_llama_dir: Path, tmp_path: Path):
    out = tmp_path / "out"

    def appear(_stage: str, _done: int, _total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine.txt").write_text("precious")

    with pytest.raises(WriteError, match="was not there when this run began"):
        compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, progress=appear)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    out.rename(tmp_path / "away")
    compress_to_folder(tiny_llama_dir, WINDOWS, out, CONFIG, resume=True)
    assert (out / "report.json").is_file()


@pytest.mark.parametrize("text", ["[1]", '{"other": 1}', '{"dtype": "float64", "values": [null]}'])
def test_kept_scores_that_are_something_else_are_made_again(tmp_path: Path, text: str):
    partial = PartialCheckpoint(tmp_path / "out", RUN, False, False)
    (partial.folder / "scores.json").write_text(text)
    assert partial.read_tensor("scores") is None


def test_what_cannot_be_removed_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    partial_run = PartialCheckpoint(tmp_path / "out", RUN, False, False)
    with monkeypatch.context() as patch:
        patch.setattr(partial.shutil, "rmtree", lambda *_args, **_options: None)  # as where a folder is read-only
        partial_run.discard()
    partial_run.release()
    PartialCheckpoint(tmp_path / "out", {"setting": 2}, False, True).discard()
    assert list(tmp_path.iterdir()) == []


def test_windows_of_another_shape_are_another_run(tiny_llama_dir: Path, tmp_path: Path):
    compress_to_folder(tiny_llama_dir, WINDOWS, tmp_path / "out", CONFIG)
    with pytest.raises(InputError, match="its calibration tokens is"):
        compress_to_folder(tiny_llama_dir, WINDOWS.view(8, 16), tmp_path / "out", CONFIG, resume=True)
