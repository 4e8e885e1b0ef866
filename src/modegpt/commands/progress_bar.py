"""Progress with an ETA on standard error, shown only when the work takes more than a few seconds."""

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE = 3.0
"""Seconds of work before anything is shown."""
LINE_EVERY = 10.0
"""Seconds between lines where standard error is a file or a pipe, in which a moving bar would be rubbish."""


class ProgressBar:
    """Shows `(stage, done, total)` calls: a moving bar on a terminal, a line now and then elsewhere.

    Use it as a context manager and give it as the `progress` of `compress` or `perplexity`.
    """

    def __init__(self, label: str = "starting") -> None:
        """Prepare a bar; `label` stands there until the first stage reports."""
        self._console = Console(file=sys.stderr)
        columns = (
            TextColumn("{task.description}", markup=False),  # it holds names of models
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task(label, total=None)
        self._stage: str | None = None
        self._now = self._stage_start = self._last_line = time.monotonic()
        # A stage reports after its first step, which may be minutes away: a timer, not a call, brings up the bar.
        self._timer = threading.Timer(PATIENCE, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> "ProgressBar":
        """Arm the timer that brings up the bar."""
        if self._console.is_terminal:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the bar from the terminal."""
        self._timer.cancel()
        if self._console.is_terminal:  # elsewhere, stopping prints an empty line
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Note that `done` of `total` steps of `stage` are finished; 0 says that it begins now.

        A stage that does not say so began where the one before it ended.
        """
        previous, self._now = self._now, time.monotonic()
        if stage != self._stage:
            self._stage, self._stage_start = stage, self._now if done == 0 else previous
            self._bar.reset(self._task, description=stage, total=total)
        self._bar.update(self._task, completed=done, total=total)
        if not self._console.is_terminal and 0 < done < total and self._now - self._last_line >= LINE_EVERY:
            self._last_line = self._now
            left = (self._now - self._stage_start) / done * (total - done)
            print(f"{stage}: {done} of {total}, about {left:.0f} s left", file=sys.stderr, flush=True)
