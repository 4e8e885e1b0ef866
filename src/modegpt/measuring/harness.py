"""Where lm-eval is met: local files as its tasks, a model in memory as its model. Import it only with the extra."""

import copy
import difflib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import datasets
import lm_eval.api.task
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ..errors import InputError, NumericalError
from ..evaluate import LOGIT_BYTES
from ..loading.models import beyond_vocabulary
from .local_tasks import LocalTask
from .shared_context import questions, score_answers, takes_part, turning_point

ACCURACIES = ("acc", "acc_norm")
MAX_BATCH = 64
"""More requests at once gain nothing, and a bar that moves has to hear of a batch now and then."""

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation: both as text, then the tokens of each."""


SCORER: Any = HFLM
"""As Any: lm-eval's registering decorator hides the class's type."""


class Harness(SCORER):
    """lm-eval's own scoring of a model in memory, with a progress bar of ours and a batch that fits."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int | None) -> None:
        """Wrap a model; lm-eval may give the tokenizer a padding token, so it gets a copy."""
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has neither a first nor a last token, and tasks need one before their text")
        super().__init__(pretrained=model, tokenizer=copy.deepcopy(tokenizer), backend="causal", batch_size=1)
        # In 16 bits it would round what an answer has to a quarter of a nat, and ties would decide.
        self.softmax_dtype = torch.float32
        self.wanted_batch = batch_size
        self.report: Callable[[int, int], None] = lambda done, total: None
        self.truncated = 0
        self._done = self._total = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Score requests without lm-eval's bars."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        lengths = [len(context) + len(answer) for _, context, answer in requests]
        longest = min(max(lengths), self.max_length)
        fits = LOGIT_BYTES // (longest * self.model.config.get_text_config().vocab_size * 4)
        self.batch_size_per_gpu = self.wanted_batch or max(1, min(MAX_BATCH, fits))
        for (_, text), _, answer in requests:
            if not 0 < len(answer) <= self.max_length:
                raise InputError(
                    f"the answer '{text[:80]}' is {len(answer)} tokens, which the model's {self.max_length} positions "
                    "cannot score"
                )
        ids = [token for _, context, answer in requests for token in (*context, *answer)]
        if (bounds := beyond_vocabulary(torch.tensor([min(ids), max(ids)]), self.model)) is not None:
            raise InputError(
                f"the tasks have tokens up to {bounds[1]}, and the model has {bounds[2]} of them; give the tokenizer "
                "that belongs to the model"
            )
        self.truncated = sum(length > self.max_length + 1 for length in lengths)
        tokens = [request[1:] for request in requests]
        shared = questions(tokens, self.max_length, turning_point(self.model.config)) if takes_part(self.model) else []
        known = {place for question in shared for place in question.places}
        alone = [place for place in range(len(requests)) if place not in known]
        # Where they are cut, answers of one token after the same context are read off one row of logits.
        rows = {(*context, *answer[:-1]) for _, context, answer in (requests[place] for place in alone)}
        self._done, self._total = 0, len(known) + len(rows)
        found = score_answers(self.model, shared, self.batch_size_per_gpu, self.softmax_dtype, self._advance)
        rest = super()._loglikelihood_tokens(
            [requests[place] for place in alone], disable_tqdm=True, override_bs=override_bs
        )
        found |= dict(zip(alone, rest, strict=True))
        scores = [found[place] for place in range(len(requests))]
        for (score, _), ((_, text), _, _) in zip(scores, requests, strict=True):
            if math.isnan(score):
                raise NumericalError(
                    f"the log-likelihood of '{text[:80]}' is NaN: the model's weights or activations hold NaN or "
                    "infinity"
                )
        return scores

    def _model_call(self, inps: Any, *args: Any, **kwargs: Any) -> Any:
        logits = super()._model_call(inps, *args, **kwargs)
        self._advance(len(inps))
        return logits

    def _advance(self, count: int) -> None:
        self._done += count
        self.report(self._done, self._total)


def local(task: LocalTask) -> ConfigurableTask:
    """Make a file that was read a task of lm-eval's, with nothing written to disk."""
    records = datasets.Dataset.from_list(task.records)
    return ConfigurableTask(
        config={
            "task": task.name,
            "custom_dataset": lambda **_: {"test": records},
            "test_split": "test",
            "metadata": {"version": 1.0},
            **task.shape.scoring,
        }
    )


def registered(names: Sequence[str]) -> dict[str, list[Any]]:
    """Open tasks by lm-eval's names, or by its groups and tags, and fetch their data.

    Raises:
        InputError: a name is unknown, its data cannot be fetched, or it is not scored by an accuracy.
    """
    if not names:
        return {}
    manager = _manager()
    for name in names:
        if name not in manager.task_index:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(close)}? Otherwise " if close else ""
            raise InputError(f"task '{name}' is unknown; {hint}give a name that lm-eval lists, or a .jsonl file")
    return {name: _fetched(manager, name) for name in names}


@cache
def _manager() -> TaskManager:
    """Return lm-eval's list of its thousands of definitions, which takes seconds to read."""
    return TaskManager()


def _fetched(manager: TaskManager, name: str) -> list[Any]:
    try:
        found = list(manager.load([name])["tasks"].values())
    except Exception as problem:  # whatever the task's own loading code and the hub's client raise
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise InputError(
            f"task '{name}' cannot be fetched: {reason}; without a network, give a .jsonl file"
        ) from problem
    for task in found:
        metrics = task.aggregation() or {}
        if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood") or "acc" not in metrics:
            raise InputError(
                f"task '{task.task_name}' is scored by {', '.join(metrics)} on {task.OUTPUT_TYPE}; "
                "give tasks that score given answers by acc"
            )
        _keep_accuracies(task)
    return found


def run_task(harness: Harness, task: Any, limit: int | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Let lm-eval build, run and score the requests of one task.

    Returns:
        Its metrics and sample count, and its own record of each sample, in the task's order.
    """
    task.set_config(key="num_fewshot", value=0)
    # Any positive number: lm-eval bootstraps no standard error of a mean, it has a formula.
    outcome: Any = evaluate(
        harness, {"tasks": {task.task_name: task}}, limit=limit, bootstrap_iters=1, log_samples=True
    )
    metrics = {name.removesuffix(",none"): value for name, value in outcome["results"][task.task_name].items()}
    return metrics, sorted(outcome["samples"][task.task_name], key=lambda sample: sample["doc_id"])


def score(harness: Harness, task: Any, limit: int | None) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return a task's metrics and sample count, and the accuracies of each sample, in the task's order."""
    metrics, samples = run_task(harness, task, limit)
    return metrics, {name: [float(sample[name]) for sample in samples] for name in ACCURACIES if name in metrics}


@contextmanager
def hushed() -> Iterator[None]:
    """Keep the logs and bars of lm-eval and of the libraries that fetch its data off standard error."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels, bar, bars = [log.level for log in loggers], lm_eval.api.task.tqdm, not datasets.are_progress_bars_disabled()
    for log in loggers:
        log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # The bar of building requests has no switch.
    lm_eval.api.task.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bar
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


def _keep_accuracies(task: Any) -> None:
    """Drop other metrics of a task: lambada's perplexity would be bootstrapped, on all cores and with prints."""
    original = task.process_results

    def accuracies(doc: Any, results: Any) -> dict[str, Any]:
        return {name: value for name, value in original(doc, results).items() if name in ACCURACIES}

    task.process_results = accuracies
