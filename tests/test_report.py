"""What stands beside every figure."""

import shlex
import sys

import pytest
import torch

from modegpt import report
from modegpt.report import Stopwatch, protocol


def test_the_command_can_be_pasted(monkeypatch: pytest.MonkeyPatch):
    argv = ["modegpt", "compress", "my model", "--out", "it's", "--plan", '{"a": 1}']
    monkeypatch.setattr(sys, "argv", argv)
    assert shlex.split(protocol()["command"]) == argv


def test_the_time_of_a_stage_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch):
    ticks = iter([0.0, 1.0, 2.0, 4.0, 5.0, 8.0, 16.0, 32.0, 64.0])
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch(torch.device("cpu"))
    with watch.stage("coverage"):  # from 1 to 16
        with watch.stage("embed"):  # from 2 to 4
            pass
        with watch.stage("embed"):  # from 5 to 8
            pass
    with watch.stage("coverage"):  # from 32 to 64
        pass
    monkeypatch.setattr(report.time, "perf_counter", lambda: 100.0)
    assert watch.seconds() == {"total": 100.0, "embed": 2.0 + 3.0, "coverage": 15.0 - 5.0 + 32.0}
