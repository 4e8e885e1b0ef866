"""Two processes: the single process's ranks exactly, its weights to rounding; a dead one ends the run on both."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, MixtralConfig

from command_line import modegpt
from modegpt.checks.tiny import random_model
from modegpt.moments import BlockMoments
from modegpt.running.distributed import STARTED, Team, join_team, started_together
from modegpt.running.partial import PartialCheckpoint

COMMAND = ["--calibration", "python-docs", "--sparsity", "0.3", "--samples", "7", "--seq-len", "64"]


def launcher(n: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]


def torchrun(n: int, *arguments: str) -> list[str]:
    return [*launcher(n), "-m", "modegpt", "compress", *arguments]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def mixture(tiny_llama_dir: Path, folder: Path) -> None:
    """Write a mixture of experts with the tokenizer of another model."""
    dense = json.loads((tiny_llama_dir / "config.json").read_text())
    sizes = {key: dense[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "pad_token_id": 0}
    model = random_model(MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama_dir).save_pretrained(folder)


SETTINGS = {
    "influence, best": ["--allocation", "influence", "--solver", "best"],
    "owl, paper": ["--allocation", "owl", "--owl-threshold", "2", "--solver", "paper"],
    "error, best": ["--allocation", "error", "--solver", "best"],
    "experts, best": ["--solver", "best"],
}


@pytest.fixture(scope="module")
def compressed(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return by settings what one process wrote, and two; the two are started once for all runs."""
    root = tmp_path_factory.mktemp("processes")
    mixture(tiny_llama_dir, root / "experts")
    folders, calls = {}, []
    for name, settings in SETTINGS.items():
        model = root / "experts" if name.startswith("experts") else tiny_llama_dir
        call = ["compress", str(model), *COMMAND, *settings, "--out"]
        one, two = (root / f"{name}, {count}" for count in ("one", "two"))
        single = modegpt(*call, one)
        assert single.exit_code == 0, single.output
        folders[name] = (one, two)
        calls.append([*call, str(two)])
    script = root / "calls.py"
    # They stay together from run to run: gloo does not always find itself again.
    script.write_text(
        "import json, sys; from modegpt.cli import app; from modegpt.running import distributed\n"
        "leave, distributed.leave_team = distributed.leave_team, lambda: None\n"
        "for call in json.loads(sys.argv[1]):\n"
        "    try: app(call)\n"
        "    except SystemExit as end: assert not end.code, call\n"
        "leave()\n"
    )
    subprocess.run([*launcher(2), str(script), json.dumps(calls)], check=True, env=ENVIRONMENT)
    return folders


@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_equal_one(name: str, compressed: dict[str, tuple[Path, Path]]):
    folders = compressed[name]
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert reports[1]["processes"] == 2
    assert [layer["ranks"] for layer in reports[0]["layers"]] == [layer["ranks"] for layer in reports[1]["layers"]]
    one, two = (torch.tensor(report["allocation"]["scores"] or []) for report in reports)
    # As the weights; and of OWL's outliers, of 30720 entries, rounding may put two or three on the other side.
    torch.testing.assert_close(two, one, rtol=5e-4, atol=1e-8)
    for left, right in zip(*(report["layers"] for report in reports), strict=True):
        assert left["error"] == pytest.approx(right["error"], rel=1e-4, abs=1e-6)  # as the weights, and then a root
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    for weight, left in one.items():
        # Moments differ by the order of float32 products alone, 2^-24 each; the bound is 1e-5 of the matrix.
        difference = torch.linalg.vector_norm((left - two[weight]).double())
        assert difference <= 1e-5 * torch.linalg.vector_norm(left.double()), weight


def test_a_dead_process_ends_the_run_and_one_process_resumes_it(tiny_llama_dir: Path, tmp_path: Path):
    arguments = [str(tiny_llama_dir), *COMMAND, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(torchrun(2, *arguments), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    victim, deadline = None, time.monotonic() + 120
    while victim is None and time.monotonic() < deadline:
        victim = _worker_of(process.pid, rank=1)
        time.sleep(0.05)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    _output, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "SIGKILL" in errors or "died" in errors
    assert not (tmp_path / "out").exists()
    again = modegpt("compress", *arguments, "--resume")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "out" / "model.safetensors").is_file()


def _worker_of(launcher: int, rank: int) -> int | None:
    """The process that torchrun started as a rank, once its environment says so."""
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    return None


@pytest.mark.parametrize(
    "said", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": ""}, {"RANK": "3"}, {"RANK": "1", "WORLD_SIZE": "4"}]
)
def test_a_part_of_what_torchrun_says_is_no_torchrun(said: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name in STARTED:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert not started_together()
    assert join_team(torch.device("cpu")) == Team()


class Doubled(Team):
    """Two processes that saw the same."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)


def test_moments_are_summed_with_the_tokens_that_they_are_of():
    moments = BlockMoments({"mlp": torch.eye(3, dtype=torch.float64)}, n_tokens=5)
    Doubled(rank=0, size=2).sum_moments(moments, layer=0)
    assert moments.n_tokens == 10
    assert torch.equal(moments["mlp"], 2 * torch.eye(3, dtype=torch.float64))


def test_processes_keep_hidden_states_beside_the_output(tiny_llama_dir: Path, tmp_path: Path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    seen = "import glob, sys, tempfile; from pathlib import Path; from modegpt.compress import compress_to_folder\n"
    seen += "import torch; from modegpt import CompressionConfig\n"
    seen += "out, places = Path(sys.argv[2]), []\n"
    seen += "note = lambda *_: places.append(len(glob.glob(f'{out}.partial/hidden/modegpt-hidden-*')))\n"
    seen += "config = CompressionConfig(sparsity=0.25, samples=4, seq_len=32, solver='paper', max_host_memory=1)\n"
    seen += "compress_to_folder(sys.argv[1], torch.arange(128).view(4, 32), out, config, progress=note)\n"
    # Of both processes, though the main one alone hears of steps.
    seen += "assert not places or max(places) >= 2, places\n"
    script = tmp_path / "seen.py"
    script.write_text(seen)
    command = [*launcher(2), str(script)]
    told = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([*command, str(tiny_llama_dir), str(tmp_path / "out")], env=told, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert (tmp_path / "out" / "report.json").is_file()


def test_a_call_that_the_main_process_refuses_ends_all_with_its_reason(tiny_llama_dir: Path, tmp_path: Path):
    PartialCheckpoint(tmp_path / "out", {"setting": 1}, False, False).release()
    command = torchrun(2, str(tiny_llama_dir), "--calibration", "python-docs", "--samples", "4")
    done = subprocess.run(
        [*command, "--seq-len", "32", "--out", str(tmp_path / "out"), "--sparsity", "0.25"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "holds an unfinished run: continue it with --resume" in done.stderr
    assert "has died" not in done.stderr
