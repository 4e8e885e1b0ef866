"""The lines with the time left, where standard error is no terminal."""

import itertools

import pytest

from modegpt.commands import progress_bar
from modegpt.commands.progress_bar import ProgressBar


def test_the_time_left_counts_a_stage_from_where_it_said_that_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ticks = itertools.count(0, 20)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: float(next(ticks)))
    with ProgressBar() as bar:  # at 0 s
        bar("coverage", 0, 4)  # 20 s: what came before was reading
        bar("coverage", 1, 4)  # 40 s: one in 20 s, three are left
        bar("coverage", 4, 4)  # 60 s
        bar("evaluate", 1, 3)  # 80 s: said no beginning, so it began at 60 s
    assert capsys.readouterr().err.splitlines() == [
        "coverage: 1 of 4, about 60 s left",
        "evaluate: 1 of 3, about 40 s left",
    ]
