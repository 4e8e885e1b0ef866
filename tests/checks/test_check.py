"""`modegpt check`: what it says of a model's config, and that its checks can fail."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    MambaConfig,
    MinistralConfig,
    NemotronConfig,
    OlmoConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)
from typer.testing import Result

from command_line import modegpt
from conformance.families import FAMILIES, SIZES, Family, tokens
from modegpt import CompressionConfig, compress
from modegpt.architectures import ARCHITECTURES, architecture_of
from modegpt.architectures.gemma import Gemma4Architecture
from modegpt.architectures.nemotron import NemotronHArchitecture
from modegpt.checks.checking import CHECKS, run_checks
from modegpt.checks.tiny import BY_LAYER, random_model, tiny_config

DOCUMENT = (Path(__file__).parents[2] / "docs" / "json-output.md").read_text(encoding="utf-8")


def check(*args: object) -> Result:
    return modegpt("check", *args)


def folder_of(config: PreTrainedConfig, folder: Path) -> Path:
    """A model folder that holds nothing but a config: no weights are needed."""
    config.save_pretrained(folder)
    return folder


def told(result: Result) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(result.stdout)["checks"]}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The check of Llama 3's shape, whose weights would fill 16 GB."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    return check(folder_of(config, tmp_path_factory.mktemp("large")), "--sparsity", 0.25, "--json", "-")


def test_a_supported_model_passes_every_check(large: Result):
    assert large.exit_code == 0, large.output
    data, lines = json.loads(large.stdout), told(large)
    assert data["failed"] == []
    assert [name for name in lines if lines[name]["result"] == "passed"] == list(CHECKS)
    assert "all passed" in large.stderr


def test_the_config_is_told_in_plain_words(large: Result):
    meanings = {name: line["meaning"] for name, line in told(large).items() if line["result"] == "told"}
    assert "LlamaForCausalLM" in meanings["family"]
    assert "32 query heads of 128 coordinates in 8 groups" in meanings["heads"]
    assert "llama3" in meanings["positions"]
    assert meanings["MLP ranks"] == "1 to 14,336 neurons; 10,752 at sparsity 0.25"
    assert meanings["query-key ranks"] == "2 to 128 coordinates a head, in pairs; 96 at sparsity 0.25"
    # 32 layers x 8 heads x (128 + 128) coordinates x 2 bytes, and three quarters of it.
    assert meanings["KV cache"] == "131,072 bytes a token in 16 bits, 98,304 at sparsity 0.25"


def test_the_keys_are_documented(large: Result):
    section = DOCUMENT.split("## `check`")[1].split("\n## ")[0]
    data = json.loads(large.stdout)
    names = {
        name for cell in re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE) for name in re.findall(r"`(.*?)`", cell)
    }
    prefixed = {name if not name.startswith(".") else f"checks[i]{name}" for name in names}
    assert prefixed == (data.keys() - {"checks"}) | {f"checks[i].{key}" for key in data["checks"][0]}


def test_normalised_queries_and_keys_stay_whole_and_it_says_why(tmp_path: Path):
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    result = check(folder_of(config, tmp_path), "--config-only", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ran_on"] is None
    lines = told(result)
    assert not CHECKS.keys() & lines.keys()
    assert "stays whole: its queries and keys are normalised" in lines["query-key ranks"]["meaning"]
    assert "1 to 16 coordinates" in lines["value-output ranks"]["meaning"]


def test_a_sparsity_at_which_nothing_goes_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(CHECKS, "fresh process")
    result = check(folder_of(LlamaConfig(**SIZES), tmp_path), "--sparsity", 0, "--json", "-")
    assert result.exit_code == 0, result.output
    assert told(result)["zeroed coordinates"]["result"] == "skipped"


def test_an_attention_of_another_kind_stays_whole_and_it_says_which(tmp_path: Path):
    """Of Qwen 3.5 the MLPs alone are cut, and the cache is that of its layers with attention."""
    config = Qwen3_5TextConfig(num_hidden_layers=8, num_key_value_heads=4, head_dim=256)
    result = check(folder_of(config, tmp_path), "--json", "-")
    assert result.exit_code == 0, result.output
    lines = told(result)
    assert (
        "linear_attn (Qwen3_5GatedDeltaNet) in 6 layers, self_attn (Qwen3_5Attention) in 2 layers"
        in lines["what mixes tokens"]["meaning"]
    )
    assert "heads" not in lines
    for topic in ("query-key ranks", "value-output ranks"):
        assert lines[topic]["meaning"] == "stays whole: this family's attention is left as it is"
    cached = 2 * 2 * 4 * 256 * 2  # keys and values of two layers, four heads of 256, two bytes each
    assert lines["KV cache"]["meaning"].startswith(f"{cached:,} bytes a token in 16 bits, {cached:,} at sparsity")
    assert {lines[name]["result"] for name in CHECKS} == {"passed"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MambaConfig(), ["'mamba' is not supported", "llama", "docs/adding-an-architecture.md"]),
        (OlmoConfig(clip_qkv=8.0), ["clips its queries, keys and values at 8.0"]),
    ],
)
def test_what_is_not_supported_is_refused_with_the_reason(config: PreTrainedConfig, words: list[str], tmp_path: Path):
    result = check(folder_of(config, tmp_path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_a_wrong_description_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Llama's rotary pairs are half a head apart, and its first norm stands before the attention."""
    wrong = replace(ARCHITECTURES["llama"], interleaved=True, middle="input_layernorm")
    monkeypatch.setitem(ARCHITECTURES, "llama", wrong)
    monkeypatch.delitem(CHECKS, "fresh process")  # a process takes longer than all others together
    result = check(folder_of(LlamaConfig(**SIZES), tmp_path), "--json", "-")
    assert result.exit_code == 1, result.output
    assert {"sparsity 0", "order in a block"} <= set(json.loads(result.stdout)["failed"])
    assert told(result)["parameter count"]["result"] == "passed"


@pytest.mark.parametrize(
    ("name", "wrong", "failed"),
    [
        ("glm4", {"mlp_norm": ""}, "what the MLP adds"),
        ("granite", {"mlp_factor": 1.0}, "what the MLP adds"),
        ("gemma4_text", {"sum_factor": ""}, "what the MLP adds"),
        ("apertus", {"buffers": ()}, "fresh process"),
        ("qwen3_5_text", {"mixers": ()}, "order in a block"),
        ("cohere", {"whole_attention": True, "attention": "self_attn.q_proj"}, "order in a block"),
    ],
)
def test_one_wrong_field_fails_the_check_that_the_guide_names(
    name: str, wrong: dict[str, Any], failed: str, monkeypatch
):
    monkeypatch.setitem(ARCHITECTURES, name, replace(ARCHITECTURES[name], **wrong))
    if failed != "fresh process":
        monkeypatch.delitem(CHECKS, "fresh process")
    dense = next(family for family in FAMILIES if family.name == name).dense()
    assert [check.name for check in run_checks(dense, 0.3) if check.result == "failed"] == [failed]


def test_what_stands_behind_the_sum_is_part_of_what_the_mlp_adds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Gemma4Architecture, "behind_mlp", lambda _self, _block, total, _arguments: total)
    monkeypatch.delitem(CHECKS, "fresh process")
    dense = next(family for family in FAMILIES if family.name == "gemma4_text-small").dense()
    assert [check.name for check in run_checks(dense, 0.3) if check.result == "failed"] == ["what the MLP adds"]


def test_a_wrong_path_is_an_error_and_not_a_block_without_an_mlp(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ARCHITECTURES, "llama", replace(ARCHITECTURES["llama"], down="mlp.down"))
    dense = next(family for family in FAMILIES if family.name == "llama-tied").dense()
    with pytest.raises(AttributeError, match="no attribute `down`"):
        compress(dense, tokens(), CompressionConfig(sparsity=0.3))


@pytest.mark.parametrize("named", [True, False])
def test_where_an_mlp_stands_alone_what_mixes_tokens_must_be_named(named: bool, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in CHECKS if name != "order in a block"]:
        monkeypatch.delitem(CHECKS, name)
    if not named:
        monkeypatch.setattr(NemotronHArchitecture, "mixing", lambda _self, _block: [])
    dense = next(family for family in FAMILIES if family.name == "nemotron_h").dense()
    assert [check.result for check in run_checks(dense, 0.3)] == ["passed" if named else "failed"]


@pytest.mark.parametrize(
    ("config", "words"),
    [(MinistralConfig(), "no ministral model of this config"), (NemotronConfig(), "no nemotron model of this config")],
)
def test_a_config_of_which_no_model_can_be_made_is_refused(config: PreTrainedConfig, words: str, tmp_path: Path):
    """These two are transformers' own defaults: without a head dim, and without a number of key heads."""
    result = check(folder_of(config, tmp_path))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_layers_of_two_kinds_are_told_and_tried(tmp_path: Path):
    config = SmolLM3Config(**{**SIZES, "num_hidden_layers": 6}, no_rope_layers=[1, 1, 1, 0, 1, 1])
    assert set(tiny_config(config, architecture_of(config)).no_rope_layers) == {0, 1}
    lines = told(check(folder_of(config, tmp_path), "--config-only", "--json", "-"))
    assert "1 of 6 layers have none: there query and key may be cut" in lines["positions"]["meaning"]
    assert "2 to 8 coordinates a head, in pairs; 6 at sparsity 0.3" in lines["query-key ranks"]["meaning"]
    assert "in the other layers 1 to 8 coordinates a head" in lines["query-key ranks"]["meaning"]


def test_the_weights_themselves(tiny_llama_dir: Path):
    result = check(tiny_llama_dir, "--weights", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ran_on"] == "the model itself"
    # Its own: two tables of 384 x 64, two blocks of 30,848, the last norm.
    assert told(result)["parameter count"]["meaning"].startswith("110,912 parameters became")


def test_running_nothing_and_running_the_weights_exclude_each_other(tiny_llama_dir: Path):
    result = check(tiny_llama_dir, "--weights", "--config-only")
    assert result.exit_code == 2
    assert "give one of them" in result.stderr


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_tiny_model_keeps_every_switch(family: Family):
    config = family.config()
    tiny = tiny_config(config, family.architecture)
    assert type(tiny) is type(config)
    assert architecture_of(tiny).describe() == family.architecture.describe()
    before, after = family.dims, architecture_of(tiny).dimensions(tiny)
    assert (before.n_heads == before.n_kv_heads) == (after.n_heads == after.n_kv_heads)
    assert (before.n_kv_heads == 1) == (after.n_kv_heads == 1)
    assert (before.rotary_dim / before.d_head) == (after.rotary_dim / after.d_head)
    assert (before.d_head * before.n_heads == before.d_model) == (after.d_head * after.n_heads == after.d_model)
    sizes = {"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"}
    switches = {
        name for name, value in config.to_dict().items() if isinstance(value, bool | str | float) or value is None
    }
    changed = {name for name in switches - sizes if config.to_dict()[name] != tiny.to_dict().get(name)}
    assert changed <= {"dtype", "_name_or_path"}
    for name in BY_LAYER:
        assert set(getattr(config, name, None) or ()) == set(getattr(tiny, name, None) or ())
    assert random_model(tiny).num_parameters() < 250_000
