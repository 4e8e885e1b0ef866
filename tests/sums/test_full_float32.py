"""A process that allows float32 products in fewer bits: a run does not take them, and leaves the setting as it was."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import modegpt
from conformance.families import FAMILIES, tokens
from modegpt.sums.full_float32 import full_float32


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def precisions() -> list[str]:
    return [backend.fp32_precision for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]


by_backend = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="before PyTorch 2.9 there is one setting for all"
)


def test_a_run_leaves_autocast_for_the_time():
    dense, config = FAMILIES[0].dense(), modegpt.CompressionConfig(allocation="influence")
    expected = modegpt.compress(dense, tokens(), config).state_dict()
    with torch.autocast("cpu", torch.bfloat16):
        found = modegpt.compress(dense, tokens(), config).state_dict()
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@by_backend
@pytest.mark.parametrize("allowed", ["medium", "high"])
def test_a_run_takes_whole_products_and_puts_the_setting_back(allowed: str):
    torch.set_float32_matmul_precision(allowed)
    before, seen = precisions(), []
    assert before[0] == "tf32"
    config = modegpt.CompressionConfig(allocation="influence")
    modegpt.compress(FAMILIES[0].dense(), tokens(), config, progress=lambda *_: seen.append(precisions()))
    assert all(found == ["ieee", "ieee"] for found in seen)
    assert len(seen) > 3  # scores, coverage and blocks
    assert precisions() == before


@by_backend
def test_a_setting_of_one_backend_is_put_back_when_something_fails():
    torch.backends.cuda.matmul.fp32_precision = "tf32"

    @full_float32()
    def fail() -> None:
        raise ArithmeticError(*precisions())

    with pytest.raises(ArithmeticError) as told:
        fail()
    assert told.value.args == ("ieee", "ieee")
    assert precisions()[0] == "tf32"


@by_backend
def test_of_two_threads_the_last_one_puts_the_setting_back():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    first_in, second_in, first_out, seen = *(threading.Event() for _ in range(3)), []

    @full_float32()
    def first() -> None:
        first_in.set()
        assert second_in.wait(60)

    @full_float32()
    def second() -> None:
        second_in.set()
        assert first_out.wait(60)
        seen.extend(precisions())

    threads = [threading.Thread(target=each) for each in (first, second)]
    threads[0].start()
    assert first_in.wait(60)
    threads[1].start()
    threads[0].join()
    first_out.set()
    threads[1].join()
    assert seen == ["ieee", "ieee"]
    assert precisions()[0] == "tf32"


def test_before_the_setting_of_each_backend_there_was_one_for_all(monkeypatch: pytest.MonkeyPatch):
    torch.set_float32_matmul_precision("medium")
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cuda, "matmul", SimpleNamespace())
        with full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
