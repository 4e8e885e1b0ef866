"""Zero-shot accuracy by sparsity: the five tasks of the paper's main table, dense and with either set of solvers.

With `--names` other tasks, the rest of those that the paper measures, say, into a file of their own.

Protocol: float32, calibrated on the first 32 windows of 512 tokens of WikiText-2's validation text; the first samples
of each task, by default as many as ARC-challenge has, from local files of the shapes in docs/zero-shot.md, scored by
lm-eval. Blocks are scored once for all sparsities. Every row is written when it is done; the same command goes on where
it was stopped. A row takes about 20 minutes on one core. `--jobs` shares the rows out to processes, on one GPU too.

    python benchmarks/zero_shot.py --data FOLDER --tasks FOLDER
    python benchmarks/zero_shot.py --data FOLDER --tasks FOLDER --allocation error --json FILE
    python benchmarks/zero_shot.py --data FOLDER --tasks FOLDER --device cuda --batch-size 192 --jobs 4 --seed 0 1 2
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import modegpt
from common import CALIBRATION, Opened, add_grid, compressed, draws, model_name, opened, parser, run
from modegpt.commands.progress_bar import ProgressBar
from modegpt.comparing.scored import Scored
from modegpt.config import ALLOCATIONS
from modegpt.measuring.zero_shot import PRESETS, TaskResult, open_tasks
from result_file import Results

DEFAULTS = modegpt.CompressionConfig()


def options() -> argparse.Namespace:
    arguments = parser(__doc__, "zero_shot.json")
    arguments.add_argument("--tasks", type=Path, default=Path("data"), help="folder with arc_easy.jsonl and the others")
    arguments.add_argument("--names", nargs="*", default=list(PRESETS["paper5"]), help="tasks: names of files there")
    add_grid(arguments)
    arguments.add_argument("--limit", type=int, default=1172, help="samples of each task")
    arguments.add_argument("--allocation", default=DEFAULTS.allocation, choices=ALLOCATIONS)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--batch-size", type=int, help="requests at once (default: as `eval` chooses it)")
    arguments.add_argument("--jobs", type=int, default=1, help="processes that share the rows")
    arguments.add_argument("--part", type=int, nargs=2, metavar=("K", "N"), help=argparse.SUPPRESS)
    return arguments.parse_args()


def wanted(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each row compares."""
    yield {"solver": "dense", "sparsity": 0.0, "seed": 0}
    for solver in asked.solver:
        for seed in asked.seed if draws(solver, asked.allocation) else [0]:
            for sparsity in asked.sparsity:
                yield {"solver": solver, "sparsity": sparsity, "seed": seed}


def models(
    asked: argparse.Namespace, start: Opened, todo: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], PreTrainedModel]]:
    """Yield the start of a row and its model."""
    scored = Scored(start.dense, start.windows)
    for row in todo:
        if row["solver"] == "dense":
            yield row, start.dense
        else:
            config = modegpt.CompressionConfig(
                sparsity=row["sparsity"],
                solver=row["solver"],
                seed=row["seed"],
                allocation=asked.allocation,
                device=asked.device,
            )
            model = compressed(asked, start.dense, start.windows, scored.plan(config).config)
            report = model.modegpt_report
            yield {**row, "achieved": report["sparsity"], "parameters": report["parameters"]}, model


def figures(task: TaskResult) -> dict[str, Any]:
    """Return what is kept of a task: `right` has a digit for each sample in order, 1 where the model is right."""
    kept = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "samples")
    right = {name: "".join(f"{value:.0f}" for value in values) for name, values in task.by_sample.items()}
    return {**{key: getattr(task, key) for key in kept}, "right": right}


def measure(asked: argparse.Namespace, todo: list[dict[str, Any]], results: Results) -> None:
    """Measure what is to be done, and write each row as it is done."""
    if not todo:
        return
    tasks = open_tasks([str(asked.tasks / f"{task}.jsonl") for task in asked.names])
    base = opened(asked)
    base.dense.to(asked.device)
    name = "cpu" if asked.device == "cpu" else torch.cuda.get_device_name(asked.device)
    where = f"{name}, PyTorch {torch.__version__}"
    for row, model in models(asked, base, todo):
        start = time.perf_counter()
        model.to(asked.device)
        with ProgressBar() as progress:
            result = modegpt.evaluate_tasks(
                model, base.tokenizer, tasks, asked.limit, asked.batch_size, progress=progress
            )
        row["tasks"] = {task.task: figures(task) for task in result.tasks}
        row |= {"mean": result.mean._asdict(), "seconds": round(time.perf_counter() - start, 1), "device": where}
        told = ("solver", "sparsity", "seed", "mean", "seconds")
        print({key: row[key] for key in told}, flush=True)
        results.rows.append(row)
        keep(results)


def keep(results: Results) -> None:
    results.rows.sort(key=itemgetter("sparsity", "solver", "seed"))
    results.write()


def share_out(asked: argparse.Namespace) -> bool:
    """Let processes measure the rows, each some that follow on each other; tell whether all were measured."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    running = []
    try:
        for part in range(asked.jobs):
            running.append(subprocess.Popen([sys.executable, *sys.argv, "--part", str(part), str(asked.jobs)]))
        codes = [process.wait() for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return not any(codes)


def part_file(asked: argparse.Namespace, part: int | str) -> Path:
    """Return where a process leaves its rows: beside the result, so that they are found if all were killed."""
    return asked.json.with_suffix(f".part{part}.json")


def gather(asked: argparse.Namespace, about: dict[str, Any], results: Results) -> None:
    """Add to the rows, and to their file, what processes left beside it."""
    files = sorted(asked.json.parent.glob(part_file(asked, "*").name))
    for file in files:
        results.rows += Results(file, about).rows
    if files:
        keep(results)
    for file in files:
        file.unlink()


def main() -> None:
    """Measure every row that is not in the result file yet."""
    asked = options()
    protocol = {
        "tasks": asked.names,
        "limit": asked.limit,
        "num_fewshot": 0,
        "allocation": asked.allocation,
        "dtype": "float32",
        "calibration": CALIBRATION,
    }
    about = {"model": model_name(asked), "protocol": protocol}
    results = Results(asked.json, about)
    if not asked.part:
        gather(asked, about, results)
    todo = [row for row in wanted(asked) if not results.has(row)]
    if asked.part:
        part, parts = asked.part
        own = todo[len(todo) * part // parts : len(todo) * (part + 1) // parts]
        measure(asked, own, Results(part_file(asked, part), about))
    elif asked.jobs > 1 and todo:
        try:
            done = share_out(asked)
        finally:
            gather(asked, about, results)
        if not done:
            raise SystemExit("some rows were not measured; the same command goes on with them")
    else:
        measure(asked, todo, results)


if __name__ == "__main__":
    run(main)
