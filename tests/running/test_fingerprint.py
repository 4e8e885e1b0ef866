"""What tells an unfinished run from another one: all that decides its bytes, and nothing else."""

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modegpt import CompressionConfig
from modegpt.running import fingerprint
from modegpt.running.fingerprint import run_fingerprint
from modegpt.running.source import Source, open_source
from modegpt.running.text import Text

CPU = torch.device("cpu")
OTHERS: dict[str, Any] = {
    "sparsity": 0.5,
    "samples": 7,
    "seq_len": 31,
    "sampling": "sequential",
    "seed": 1,
    "allocation": "owl",
    "temperature": 0.5,
    "max_sparsity": 0.9,
    "round_to": 2,
    "owl_threshold": 4.0,
    "owl_lambda": 0.1,
    "modules": ("mlp",),
    "solver": "paper",
    "mlp_solver": "energy",
    "qk_solver": "cr",
    "vo_solver": "svd",
    "coverage": 0.5,
    "feedback": False,
    "rarity": 0.5,
    "ridge": 2.0,
    "batch_size": 3,
}
"""Of each setting that decides bytes, another value than the default."""
ELSEWHERE: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_host_memory": 5}
"""Where and how a run works. The dtype that it writes and the kind of device are told by themselves."""


@pytest.fixture(scope="module")
def source(tiny_llama_dir: Path) -> Source:
    return open_source(str(tiny_llama_dir), CPU)


def told(source: Source, config: CompressionConfig | None = None, **changes: Any) -> dict[str, Any]:
    given = {"windows": torch.arange(12).view(3, 4), "out_dtype": torch.float32, "device": CPU, **changes}
    text = Text(given["windows"], None, None, {})
    return run_fingerprint(source, text, config or CompressionConfig(), given["out_dtype"], given["device"])


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {field for field in one.keys() | other.keys() if one.get(field) != other.get(field)}


def test_every_setting_that_decides_bytes_makes_another_run(source: Source):
    assert {field.name for field in fields(CompressionConfig)} == {*OTHERS, *ELSEWHERE, "plan"}
    first = told(source)
    for name, value in OTHERS.items():
        assert f"setting {name}" in differing(first, told(source, CompressionConfig(**{name: value}))), name
    plans = [CompressionConfig(allocation="plan", plan=({"mlp": rank},)) for rank in (8, 9)]
    assert differing(*(told(source, plan) for plan in plans)) == {"setting plan"}


def test_where_a_run_works_makes_no_other_one(source: Source):
    for name, value in ELSEWHERE.items():
        assert not differing(told(source), told(source, CompressionConfig(**{name: value}))), name


def test_the_model_the_text_and_what_computes_make_another_run(source: Source, monkeypatch: pytest.MonkeyPatch):
    first = told(source)
    config = copy.deepcopy(source.config)
    config.rms_norm_eps *= 2  # of the same weights
    assert differing(first, told(replace(source, config=config))) == {"model config"}
    assert differing(first, told(replace(source, identity="others"))) == {"model"}
    assert differing(first, told(source, windows=torch.arange(12).view(4, 3))) == {"calibration tokens"}
    assert differing(first, told(source, windows=torch.arange(1, 13).view(3, 4))) == {"calibration tokens"}
    assert differing(first, told(source, out_dtype=torch.bfloat16)) == {"output dtype"}
    assert differing(first, told(source, device=torch.device("cuda"))) == {"device type"}
    monkeypatch.setattr(fingerprint, "versions", lambda: {"torch": "0.1"})
    assert differing(first, told(source)) == {"versions"}
