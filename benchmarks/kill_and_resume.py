"""Kills a run with SIGKILL at random moments, resumes it, and compares the files with those of an undisturbed run.

A Llama of 24 layers with random weights, on the command line as a user would run it. The moments of every other trial
are uniform over the undisturbed run's life, from its start to the last rename, and those of the rest over the part of
it in which finished blocks are on disk.

    python benchmarks/kill_and_resume.py --trials 10
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from common import run
from compress_speed import write_random_checkpoint
from result_file import RESULTS, save


def make_model(folder: Path) -> None:
    """Write random weights and a byte tokenizer."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=300,
        max_position_embeddings=512,
    )
    write_random_checkpoint(folder, config, torch.float32)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def on_disk(out: Path) -> int:
    """Return how many finished blocks an unfinished run has on disk."""
    return len(list((out.with_name(out.name + ".partial") / "layers").glob("*.safetensors")))


def lived(command: list[str], out: Path) -> tuple[float, float]:
    """Run undisturbed; return the seconds until the first finished block was on disk, and in all."""
    start, begun = time.perf_counter(), None
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if begun is None and on_disk(out):
            begun = time.perf_counter() - start
        time.sleep(0.01)
    if process.returncode or begun is None:
        raise SystemExit(f"the undisturbed run ended with {process.returncode}: {' '.join(command)}")
    return begun, time.perf_counter() - start


def files(folder: Path) -> dict[str, bytes]:
    """Return every file that must not depend on how the run went: all but the report, which holds times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "report.json"}


def main() -> None:
    """Run the trials and write what each one saw."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--trials", type=int, default=10)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path, default=RESULTS / "kill_and_resume.json")
    options = arguments.parse_args()
    rng, rows = random.Random(options.seed), []
    scratch = Path(tempfile.mkdtemp(prefix="modegpt-kill-"))
    (scratch / "dense").mkdir()
    make_model(scratch / "dense")
    command = [sys.executable, "-m", "modegpt", "compress", str(scratch / "dense"), "--sparsity", "0.3", "--resume"]
    command += ["--calibration", "python-docs", "--samples", "16", "--seq-len", "256", "--allocation", "influence"]
    begun, life = lived(command, scratch / "whole")
    expected = files(scratch / "whole")
    for trial in range(options.trials):
        out, moment = scratch / "out", rng.uniform(begun if trial % 2 else 0, life)
        process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished = on_disk(out)
        whole_at_kill = out.exists()
        subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
        row = {"killed_after_share": moment / life, "layers_on_disk": finished, "output_complete": whole_at_kill}
        row["equal"] = files(out) == expected and not (scratch / "out.partial").exists()
        rows.append(row)
        print(json.dumps(row), flush=True)
        shutil.rmtree(out)
        equal = sum(row["equal"] for row in rows)
        save(options.json, {"protocol": {"layers": 24, "trials": len(rows)}, "equal": equal, "rows": rows})
    shutil.rmtree(scratch)
    print(f"{equal} of {options.trials} bit-equal")


if __name__ == "__main__":
    run(main)
