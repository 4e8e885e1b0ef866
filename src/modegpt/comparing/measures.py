"""What a sweep measures of every point: perplexity on texts, accuracy on tasks; opened once, alike for all."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..calibration import check_source
from ..errors import InputError
from ..measuring.local_tasks import is_local
from ..measuring.zero_shot import evaluate_tasks, harness_version, open_tasks
from ..progress import Progress
from .in_turn import common_window, measure_texts, open_texts

WINDOW = "--eval-seq-len"
"""The option of a text's window: `--seq-len` is that of the calibration text."""


@dataclass(frozen=True)
class Measures:
    """What is measured of every point."""

    data: tuple[str, ...] = ("wikitext2",)
    """Texts for perplexity, as for `modegpt eval`."""
    tasks: tuple[str, ...] = ()
    """Tasks for zero-shot accuracy, as for `modegpt eval`."""
    seq_len: int | None = None
    """Tokens of a text's window; 2048, or the model's positions."""
    max_windows: int | None = None
    """Only the first windows of each text."""
    limit: int | None = None
    """Only the first samples of each task."""
    rounds: int = 3
    """Timed rounds against the dense model; 0 for none."""

    def __post_init__(self) -> None:
        """Check what can be checked alone."""
        if not self.data and not self.tasks:
            raise InputError("there is nothing to measure: name data for perplexity, or tasks")
        for name in ("seq_len", "max_windows", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value} is not a positive whole number")
        if self.rounds < 0:
            raise InputError(f"rounds {self.rounds} is negative; give 0 for no timing")
        for source in self.data:
            check_source(source)


class Quality:
    """Texts and tasks, opened for models of one config and one tokenizer."""

    def __init__(self, measures: Measures, config: Any, tokenizer: Any) -> None:
        """Open them; `InputError` for what is unusable."""
        self.measures, self.tokenizer = measures, tokenizer
        self.window = common_window([config], measures.seq_len, WINDOW)
        self.tasks = open_tasks(measures.tasks) if measures.tasks else []
        self.texts = open_texts(measures.data, config, tokenizer, self.window, WINDOW)

    def measure(self, model: PreTrainedModel, progress: Progress | None) -> dict[str, Any]:
        """Return `perplexity`, `tasks` and `mean`, with the entries of `eval --json`; `mean` is None without tasks."""
        found = measure_texts(model, self.texts, self.window, self.measures.max_windows, progress=progress)
        tasks, mean = [], None
        if self.tasks:
            outcome = evaluate_tasks(model, self.tokenizer, self.tasks, self.measures.limit, progress=progress)
            tasks, mean = outcome.rows(), outcome.mean._asdict()
        return {"perplexity": found, "tasks": tasks, "mean": mean}

    def identity(self) -> dict[str, Any]:
        """Return, by field, all that decides what `measure` gives for a model."""
        limit = self.measures.max_windows
        length = None if limit is None else limit * self.window
        found: dict[str, Any] = {WINDOW: self.window} if self.texts else {}
        if self.texts and limit is not None:
            found["--max-windows"] = limit  # told before the texts, of which it takes the first windows
        # By their places: that is how a table finds the figures of one, whatever it is called in a call.
        for number, tokens in enumerate(self.texts.values(), start=1):
            found[f"evaluation text {number}"] = _digest(tokens[:length].contiguous().numpy().tobytes())
        if self.tasks:
            found["--tasks"] = [task.name for task in self.tasks]  # told before what they hold
        for task in self.tasks:
            content = _digest(Path(task.source).read_bytes()) if is_local(task.source) else task.version
            found[f"task {task.name}"] = content
        if self.tasks:
            found |= {"task limit": self.measures.limit, "lm-eval": harness_version()}
        return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
