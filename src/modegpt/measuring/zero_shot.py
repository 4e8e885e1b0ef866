"""Zero-shot accuracy through lm-eval, of tasks known to it by name and of local files."""

import importlib.util
import math
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from ..default_device import on_the_cpu
from ..errors import InputError, MissingExtraError
from ..evaluate import evaluating
from ..progress import Progress
from .local_tasks import LocalTask, is_local, read_task
from .paired import Comparison, compare

PRESETS = {
    "paper5": ("arc_easy", "arc_challenge", "piqa", "winogrande", "hellaswag"),
    "paper": (
        *("arc_easy", "arc_challenge", "piqa", "winogrande", "hellaswag"),
        *("boolq", "openbookqa", "copa", "mathqa", "mmlu_machine_learning", "lambada_openai"),
    ),
}
"""The five tasks of the MoDeGPT paper's main table, and all eleven that it measures, by lm-eval's names."""


class Task(NamedTuple):
    """A task that was checked and is ready to run."""

    name: str
    source: str
    """The local file, or `lm-eval`."""
    version: str | float | None
    """Of lm-eval's definition; None for a file."""
    definition: Any
    """lm-eval's own object."""


class TaskResult(NamedTuple):
    """What one task gave."""

    task: str
    source: str
    version: str | float | None
    acc: float
    acc_stderr: float | None
    """None for a single sample."""
    acc_norm: float | None
    """With each answer's log-likelihood divided by its characters; None where lm-eval defines none."""
    acc_norm_stderr: float | None
    samples: int
    truncated: int
    """Requests cut on the left to the model's positions."""
    seconds: float
    by_sample: dict[str, list[float]]
    """`acc`, and `acc_norm` where there is one, of each sample in the task's order: 1 where the model is right."""


class Mean(NamedTuple):
    """Unweighted means over tasks."""

    acc: float
    acc_stderr: float | None
    acc_norm: float
    """Of `acc_norm` where a task has it and of `acc` elsewhere, as the field averages."""


class ZeroShotResult(NamedTuple):
    """What `evaluate_tasks` measured."""

    tasks: list[TaskResult]
    mean: Mean

    def over(self, other: "ZeroShotResult") -> Comparison:
        """Return by how much these accuracies are above another model's, with the standard errors of paired samples.

        Raises:
            InputError: the two do not have the same tasks and samples.
        """
        own, others = ({task.task: task.by_sample for task in result.tasks} for result in (self, other))
        sizes, other_sizes = ([(task.task, task.samples) for task in result.tasks] for result in (self, other))
        if sizes != other_sizes:
            told = (", ".join(f"{task} ({samples})" for task, samples in found) for found in (sizes, other_sizes))
            raise InputError(f"only equal tasks and samples compare; these are {' and '.join(told)}")
        return compare(own, others)

    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks as JSON shows them: without the single samples."""
        return [{key: value for key, value in task._asdict().items() if key != "by_sample"} for task in self.tasks]


def harness_version() -> str:
    """Return the version of lm-eval, which decides what a task asks and how it is scored."""
    return version("lm_eval")


def open_tasks(names: Sequence[str]) -> list[Task]:
    """Check and open tasks, before any model is loaded.

    Args:
        names: names of lm-eval's tasks or groups, `.jsonl` files as docs/zero-shot.md describes, and presets:
            `paper5` and `paper`, the five and eleven tasks of the MoDeGPT paper.

    Raises:
        InputError: a name is unknown or there twice, its data cannot be fetched, or a file is malformed.
        MissingExtraError: lm-eval is absent.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtraError("evaluating tasks", "lm-eval", "eval")
    wanted = [name for entry in names for name in PRESETS.get(entry, (entry,))]
    if not wanted:
        raise InputError("no tasks were given; give names of lm-eval's tasks, .jsonl files, or paper")
    files = {name: read_task(name) for name in wanted if is_local(name)}
    titles = [files[name].name if name in files else name for name in wanted]
    _refuse_twice(titles)
    from .harness import hushed, local, registered

    opened: list[Task] = []
    with hushed():
        known = registered([name for name in wanted if name not in files])
        for name in wanted:
            if name in files:
                opened.append(_task(local(files[name]), files[name]))
            else:
                opened += [_task(definition) for definition in known[name]]
    _refuse_twice([task.name for task in opened])
    return opened


@on_the_cpu()
def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str | Task],
    limit: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> ZeroShotResult:
    """Measure zero-shot accuracy, with lm-eval's own requests and scoring.

    Args:
        model: a causal language model, dense or compressed; left in the mode (training or not) in which it came.
        tokenizer: the one that belongs to it.
        tasks: what `open_tasks` takes, or what it returned.
        limit: use no more than the first so many samples of each task.
        batch_size: requests run at once; by default as many as keep the float32 logits below 1 GiB, at most 64.
        progress: called after each batch with the task's name, the requests done and the requests in all.

    Raises:
        InputError: as `open_tasks`, or a count below 1.
        NumericalError: a log-likelihood is NaN.
    """
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
    opened = [task for part in tasks for task in (open_tasks([part]) if isinstance(part, str) else [part])]
    _refuse_twice([task.name for task in opened])
    if not opened:
        raise InputError("no tasks were given; give names of lm-eval's tasks, .jsonl files, or paper")
    from .harness import Harness, hushed

    with evaluating(model), hushed():
        harness = Harness(model, tokenizer, batch_size)
        results = [_run(harness, task, limit, progress) for task in opened]
    return ZeroShotResult(results, _mean(results))


def _run(harness: Any, task: Task, limit: int | None, progress: Progress | None) -> TaskResult:
    from .harness import score

    if progress is not None:
        harness.report = lambda done, total: progress(task.name, done, total)
    start = time.perf_counter()
    found, by_sample = score(harness, task.definition, limit)
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return TaskResult(
        *task[:3],
        numbers["acc"],
        numbers.get("acc_stderr"),
        numbers.get("acc_norm"),
        numbers.get("acc_norm_stderr"),
        found["sample_len"],
        harness.truncated,
        round(time.perf_counter() - start, 3),
        by_sample,
    )


def _mean(results: Sequence[TaskResult]) -> Mean:
    n = len(results)
    errors = [result.acc_stderr for result in results]
    known = [error for error in errors if error is not None]
    return Mean(
        sum(result.acc for result in results) / n,
        # Tasks are independent samples: their variances add.
        math.hypot(*known) / n if len(known) == n else None,
        sum(result.acc if result.acc_norm is None else result.acc_norm for result in results) / n,
    )


def _task(definition: Any, file: LocalTask | None = None) -> Task:
    if file is not None:
        return Task(file.name, str(file.path), None, definition)
    return Task(definition.task_name, "lm-eval", definition.VERSION, definition)


def _refuse_twice(names: Sequence[str]) -> None:
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise InputError(f"task '{twice}' is there twice; give each once, and files different names")
