"""What stands beside every figure."""

import shlex
import sys

import pytest

from modegpt.report import protocol


def test_the_command_can_be_pasted(monkeypatch: pytest.MonkeyPatch):
    argv = ["modegpt", "compress", "my model", "--out", "it's", "--plan", '{"a": 1}']
    monkeypatch.setattr(sys, "argv", argv)
    assert shlex.split(protocol()["command"]) == argv
