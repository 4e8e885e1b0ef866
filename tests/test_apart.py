"""Nothing in a run mixes tensors of two devices: shown on every machine, by a device that refuses it as a GPU would."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration


def test_runs_evaluations_and_rival_methods_keep_to_their_device():
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch makes no device from Python")
    # In a process of its own: the device would stay for the tests after it.
    script = Path(__file__).with_name("apart_run.py")
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=500)
    assert told.stdout == "done\n", told.stdout + told.stderr[-2000:]
