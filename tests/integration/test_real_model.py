"""SmolLM2-135M, the real thing: exact at sparsity 0, exact against zeroed coordinates, the same bytes when resaved."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modegpt
from conformance.helpers import densify
from modegpt import CompressionConfig, MissingExtraError
from modegpt.architectures import architecture_of
from modegpt.calibration import draw_windows, load_text, tokenize
from modegpt.commands.demo import model_file
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def weights() -> str:
    try:
        return str(model_file())
    except MissingExtraError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def dense(weights: str) -> Any:
    return open_model(weights, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(small: Path) -> Any:
    """The one that was written, as the file's takes seconds to read."""
    return open_tokenizer(str(small))


@pytest.fixture(scope="module")
def tokens(tokenizer: Any) -> torch.Tensor:
    return tokenize(load_text("python-docs", "evaluation"), tokenizer)


@pytest.fixture(scope="module")
def small(weights: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("real")
    # As hub caches keep files: `model.gguf` is a link to a blob, and must be opened by its own name.
    (root / "blob").symlink_to(weights)
    (root / "model.gguf").symlink_to(root / "blob")
    # Fewer tokens than neurons would make the refit ill-conditioned, and its large weights would amplify rounding.
    config = CompressionConfig(sparsity=0.25, samples=8, seq_len=256)
    modegpt.compress(root / "model.gguf", "python-docs", config, out=root / "small")
    assert json.loads((root / "small" / "report.json").read_text())["model"] == str(root / "model.gguf")
    return root / "small"


def test_sparsity_zero_keeps_the_logits(dense: Any, tokens: torch.Tensor):
    ids = tokens[:64].view(1, 64)
    compressed = modegpt.compress(dense, ids, CompressionConfig(sparsity=0.0))
    with torch.no_grad():
        # The same operations in the same order: the bound is the issue's, the difference seen is 0.
        assert (compressed(ids).logits - dense(ids).logits).abs().max() <= 1e-5


def test_compressed_equals_dense_with_dropped_coordinates_zeroed(small: Path, dense: Any, tokens: torch.Tensor):
    compressed = AutoModelForCausalLM.from_pretrained(small)
    architecture = architecture_of(dense.config)
    family: Any = SimpleNamespace(architecture=architecture, dims=architecture.dimensions(dense.config))
    ids = tokens[:128].view(2, 64)
    with torch.no_grad():
        wide = densify(family, compressed, dense)(ids).logits
        # float32 sums of other lengths: some 1e-7 relative a layer over 30 layers, on logits near 30.
        assert (compressed(ids).logits - wide).abs().max() <= 1e-4


def test_saved_loaded_and_saved_again_is_the_same_bytes(small: Path, tmp_path: Path):
    AutoModelForCausalLM.from_pretrained(small).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(small).save_pretrained(tmp_path)
    again = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert again == {file.name: file.read_bytes() for file in small.iterdir() if file.name != "report.json"}


def test_quality_is_between_dense_and_guessing(small: Path, dense: Any, tokens: torch.Tensor):
    compressed = AutoModelForCausalLM.from_pretrained(small)
    before, after = (modegpt.perplexity(model, tokens, 256, 4).perplexity for model in (dense, compressed))
    assert before < after < math.sqrt(before * dense.config.vocab_size)


def test_windows_for_calibration_and_evaluation_share_no_text(tokenizer: Any, tokens: torch.Tensor):
    calibration = tokenize(load_text("python-docs", "calibration"), tokenizer)
    drawn = draw_windows(calibration, 8, 256, "random", 0, "python-docs")
    seen = {tuple(drawn[i, j : j + 16].tolist()) for i in range(8) for j in range(240)}
    assert not any(tuple(tokens[i : i + 16].tolist()) in seen for i in range(len(tokens) - 16))
