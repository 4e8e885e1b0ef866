"""What benchmarks share: rows are never lost, nor told to be of a call that did not measure them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ABOUT = {"model": "tiny", "protocol": {"windows": 3}}


@pytest.fixture
def result_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import result_file  # pyright: ignore[reportMissingImports]

    return result_file


def measure(result_file: Any, path: Path, row: dict[str, int], monkeypatch: pytest.MonkeyPatch, *call: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *call])
    results = result_file.Results(path, ABOUT)
    assert not results.has(row)
    results.add(row)
    assert results.has(row)


def test_each_call_is_told_beside_what_earlier_ones_measured(
    result_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "results" / "found.json"
    measure(result_file, path, {"sparsity": 1}, monkeypatch, "--cache", "/mine", "--sparsity", "1")
    first = json.loads(path.read_text())
    assert first["command"] == "python benchmark.py --cache CACHE --sparsity 1"
    path.write_text(json.dumps({**first, "note": "by hand"}))
    measure(result_file, path, {"sparsity": 2}, monkeypatch, "--sparsity", "2")
    second = json.loads(path.read_text())
    assert second["rows"] == [{"sparsity": 1}, {"sparsity": 2}]
    assert second["command"] == "python benchmark.py --sparsity 2"
    assert second["earlier"] == [{key: first[key] for key in ("command", "versions", "machine")}]
    assert second["note"] == "by hand"
    assert ABOUT.items() <= second.items()


@pytest.mark.parametrize("found", [{**ABOUT, "model": "other", "rows": []}, {"rows": []}, ABOUT])
def test_rows_of_another_protocol_are_left_alone(result_file: Any, tmp_path: Path, found: dict[str, Any]):
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="another protocol"):
        result_file.Results(path, ABOUT)
    assert json.loads(path.read_text()) == found
