"""Costs against an independent count, the measuring loop against what it says it does, and the command."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from command_line import modegpt
from conformance.families import FAMILIES
from modegpt.architectures import architecture_of
from modegpt.benchmark import BenchSettings, Runner, _next_token, _profiled_peak, benchmark, check_settings, spread
from modegpt.cache_name import CACHE
from modegpt.checkpoint import build, compressed_config
from modegpt.errors import InputError
from modegpt.measuring.costs import Attention, costs_of, file_bytes
from modegpt.modeling_modegpt import decoder_layers, shrink_block

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 64}
SHAPES = [
    {"rope_pairs": 3, "qk_plain": 0, "value_dim": 5, "mlp_width": 27},
    {"rope_pairs": 2, "qk_plain": 0, "value_dim": 6, "mlp_width": 31},
]
SMALL = BenchSettings(batch_sizes=(2,), lengths=(6,), new_tokens=3, repeats=3)


def dense_llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})).eval()


def compressed_llama():
    dense = dense_llama()
    architecture = architecture_of(dense.config)
    config = compressed_config(dense.config, architecture, SHAPES)
    for block, shape in zip(decoder_layers(dense, architecture.describe()), SHAPES, strict=True):
        shrink_block(block, architecture.describe(), shape, dense.config)
    return build(config, dense.state_dict())


def opt():
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=16, max_position_embeddings=64)).eval()


MODELS = {"dense": dense_llama, "compressed": compressed_llama, "opt": opt}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_macs_are_what_torch_counts(name: str):
    """Torch's counter sees every matrix product that runs; unfused attention is made of them, over all pairs."""
    model, n = MODELS[name](), 7
    costs = costs_of(model)
    model.set_attn_implementation("eager")
    ids = torch.ones(1, n, dtype=torch.long)
    with FlopCounterMode(display=False) as prefill:
        cache = model(ids, use_cache=True, logits_to_keep=1)[CACHE]
    with FlopCounterMode(display=False) as decode:
        model(ids[:, :1], **{CACHE: cache}, logits_to_keep=1)
    above_diagonal = n * (n - 1) // 2 * sum(layer.macs for layer in costs.attention)
    assert 2 * (costs.prefill_macs(n) + above_diagonal) == prefill.get_total_flops()
    assert 2 * costs.decode_macs(n + 1) == decode.get_total_flops()


@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_attended_positions_by_brute_force(window: int | None):
    layer = Attention(macs=3, window=window)
    for n in (1, 3, 4, 5, 20):
        steps = [3 * len([s for s in range(t + 1) if window is None or t - s < window]) for t in range(n)]
        assert layer.attended_by_all(n) == sum(steps)
        assert layer.attended(n) == steps[-1]


@pytest.mark.parametrize("window", [1, 4, 30])
def test_attended_positions_in_chunks_by_brute_force(window: int):
    layer = Attention(macs=3, window=window, chunked=True)
    for n in (1, 3, 4, 5, 8, 20):
        steps = [3 * len([s for s in range(t + 1) if s // window == t // window]) for t in range(n)]
        assert layer.attended_by_all(n) == sum(steps)
        assert layer.attended(n) == steps[-1]


def test_a_sliding_window_is_found():
    model = MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=6)).eval()
    assert [layer.window for layer in costs_of(model).attention] == [6, 6]
    assert [layer.window for layer in costs_of(dense_llama()).attention] == [None, None]


def test_parameters_per_token_count_a_tied_head_and_no_table():
    d_model, vocabulary = 32, 50
    for tied in (True, False):
        costs = costs_of(dense_llama(tie_word_embeddings=tied))
        table = 0 if tied else d_model * vocabulary
        assert costs.parameters_per_token == costs.parameters - table
        assert costs.head_macs == d_model * vocabulary


def test_cache_of_a_compressed_model():
    dense, compressed = costs_of(dense_llama()), costs_of(compressed_llama())
    n_kv_heads, float_bytes = 2, 4
    assert dense.kv_bytes_per_token == 2 * 2 * n_kv_heads * 8 * float_bytes
    kept = sum(2 * shape["rope_pairs"] + shape["value_dim"] for shape in SHAPES)
    assert compressed.kv_bytes_per_token == n_kv_heads * kept * float_bytes


@torch.no_grad()
def test_a_model_that_accelerate_keeps_on_disk(tmp_path: Path):
    model = compressed_llama()
    model.save_pretrained(tmp_path / "model")
    apart = type(model).from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=str(tmp_path / "disk")
    )
    assert apart.device.type == "meta"
    assert costs_of(apart) == costs_of(model)
    assert Runner(apart, torch.ones(2, 6, dtype=torch.long), SMALL).run().prefill > 0


def test_profiled_peak_counts_what_is_held_at_once():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        third = torch.empty(2000)
        del second, third
    assert _profiled_peak(profile) == 4 * (3000 + 2000)


@torch.no_grad()
def test_a_round_decodes_greedily_with_a_cache():
    model, ids = dense_llama(eos_token_id=None), torch.arange(12).reshape(2, 6)
    seen = []
    hook = model.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].clone()))
    timing = Runner(model, ids, SMALL).run()
    hook.remove()
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.cat(seen, dim=1), expected)
    assert len(timing.steps) == SMALL.new_tokens
    assert min(timing.prefill, *timing.steps) > 0


@torch.no_grad()
def test_memory_holds_weights_cache_and_more_with_the_batch():
    model = compressed_llama()
    costs, length = costs_of(model), SMALL.lengths[0] + SMALL.new_tokens
    peaks = []
    for batch in (1, 4):
        held = Runner(model, torch.ones(batch, SMALL.lengths[0], dtype=torch.long), SMALL).memory(costs.weight_bytes)
        assert held["cache_bytes"] == batch * length * costs.kv_bytes_per_token
        assert held["peak_memory_bytes"] > costs.weight_bytes + held["cache_bytes"]
        peaks.append(held["peak_memory_bytes"] - costs.weight_bytes)
    # All but a few position ids grows with the batch.
    assert 3.5 < peaks[1] / peaks[0] <= 4


def test_rounds_alternate_and_ratios_say_how_many_times_faster(monkeypatch: pytest.MonkeyPatch):
    """On a clock that a pass of each model moves by a set time, so that every figure is known exactly."""
    models, seconds = {"model": compressed_llama(), "against": dense_llama()}, {"model": 0.25, "against": 1.0}
    clock, order = [0.0], []
    monkeypatch.setattr("modegpt.benchmark.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def passes(name: str) -> None:
        order.append(name)
        clock[0] += seconds[name]

    for name, model in models.items():
        model.register_forward_pre_hook(lambda _module, _inputs, name=name: passes(name))
    costs, (row,) = benchmark(models, SMALL)
    one_round = 1 + SMALL.new_tokens
    probes, rounds = order[:2], order[2 : 2 + 8 * one_round]
    assert probes == ["model", "against"]
    assert rounds[::one_round] == ["model", "against", "against", "model"] * 2
    for task in ("prefill", "decode"):
        assert row["speedups"]["against"][task] == {"median": 4, "min": 4, "max": 4}
    for name, figures in row["models"].items():
        assert figures["prefill_seconds"] == [seconds[name]] * SMALL.repeats
        assert figures["decode_seconds"] == [SMALL.new_tokens * seconds[name]] * SMALL.repeats
        assert figures["first_token_seconds"] == figures["token_seconds"] == seconds[name]
        assert figures["prefill_tokens_per_second"] == 2 * 6 / seconds[name]
        assert figures["decode_tokens_per_second"] == 2 / seconds[name]
        assert figures["prefill_macs"] == 2 * costs[name].prefill_macs(6)


def test_one_slow_round_moves_no_figure(monkeypatch: pytest.MonkeyPatch):
    clock, n_passes = [0.0], [0]
    monkeypatch.setattr("modegpt.benchmark.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def one_pass(_module: object, _inputs: object) -> None:
        n_passes[0] += 1
        last_round = n_passes[0] > 1 + SMALL.repeats * (1 + SMALL.new_tokens)  # behind the probe, one warms up
        clock[0] += 8.0 if last_round else 1.0

    model = dense_llama()
    model.register_forward_pre_hook(one_pass)
    _costs, (row,) = benchmark({"model": model}, SMALL)
    figures = row["models"]["model"]
    assert figures["prefill_seconds"] == [1, 1, 8]
    assert figures["decode_seconds"] == [SMALL.new_tokens * each for each in (1, 1, 8)]
    assert figures["prefill_tokens_per_second"] == 2 * 6
    assert figures["decode_tokens_per_second"] == 2
    assert figures["first_token_seconds"] == figures["token_seconds"] == 1


def test_a_spread_is_median_least_and_greatest():
    assert spread([5.0, 1.0, 2.0]) == {"median": 2, "min": 1, "max": 5}


@torch.no_grad()
def test_a_compiled_step_decodes_the_same_tokens(monkeypatch: pytest.MonkeyPatch):
    """On the static cache that the graph is bound to, in every round; code generation is left out of the test."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, mode, **kwargs: compile_(*args, backend="eager", **kwargs))
    model, ids = compressed_llama(), torch.arange(12).reshape(2, 6)
    runner = Runner(model, ids, BenchSettings(new_tokens=3, compile=True))
    eager = Runner(model, ids, SMALL)._round(_next_token)[1]
    for _ in range(2):
        static = runner._round(runner._step)[1]
        for ours, theirs in zip(static.layers, eager.layers, strict=True):
            # The keys of decoded tokens tell which tokens these were; float32 rounding of numbers of size 1.
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (62,)}, "exceed the model's 64 positions"),
        ({"batch_sizes": (0,)}, "batch_sizes 0"),
        ({"batch_sizes": ()}, "batch_sizes is empty"),
        ({"repeats": 0}, "repeats 0"),
        ({"warmup": -1}, "warmup -1"),
    ],
)
def test_wrong_settings(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        check_settings(BenchSettings(**{"lengths": (4,), "new_tokens": 3, **changes}), [LlamaConfig(**LLAMA)])


def test_command(tmp_path: Path):
    compressed_llama().save_pretrained(tmp_path / "small")
    dense_llama().save_pretrained(tmp_path / "large")
    call = ["bench", tmp_path / "small", "--against", tmp_path / "large", "--batch-sizes", "1,2", "--lengths", "5"]
    done = modegpt(*call, "--new-tokens", "2", "--repeats", "2", "--json", tmp_path / "result.json")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["batch_size"] for row in result["results"]] == [1, 2]
    small, large = result["models"]["model"], result["models"]["against"]
    assert small["file_bytes"] == (tmp_path / "small" / "model.safetensors").stat().st_size
    for key in ("parameters", "parameters_per_token", "weight_bytes", "kv_bytes_per_token", "file_bytes"):
        assert small[key] < large[key]
    documented = (Path(__file__).parents[1] / "docs" / "json-output.md").read_text(encoding="utf-8")
    section = documented.split("## `bench`")[1].split("\n## ")[0]
    row = result["results"][0]
    for key in {*small, *result["protocol"], *row, *row["models"]["model"], *row["speedups"]["against"]["decode"]}:
        assert f"`{key}`" in section or f".{key}`" in section or key in ("command", "versions", "machine"), key
    assert "speedup" in done.output


def test_command_refuses_before_loading(tmp_path: Path):
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)  # no weights: opening the model would fail otherwise
    for options, message in (
        (["--lengths", "4,x"], "lengths '4,x'"),
        (["--preset", "none"], "preset 'none'"),
        (["--preset", "paper"], "exceed the model's 64 positions"),
        (["--dtype", "int8"], "dtype 'int8'"),
    ):
        done = modegpt("bench", tmp_path, *options)
        assert done.exit_code == 2
        assert message in done.stderr


@torch.no_grad()
def test_layers_that_read_the_keys_of_earlier_ones_count_and_are_passed_by_the_last_token():
    model = next(family for family in FAMILIES if family.name == "gemma4_text-small").dense()
    model.set_attn_implementation("eager")
    costs, n = costs_of(model), 5
    ids = torch.randint(5, 50, (1, n), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as prefill:
        cache = model(ids, use_cache=True, logits_to_keep=1)[CACHE]
    with FlopCounterMode(display=False) as decode:
        model(ids[:, :1], **{CACHE: cache})
    above_diagonal = n * (n - 1) // 2 * sum(layer.macs for layer in costs.attention if not layer.last_only)
    assert 2 * (costs.prefill_macs(n) + above_diagonal) == prefill.get_total_flops()
    assert 2 * costs.decode_macs(n + 1) == decode.get_total_flops()


def test_of_fused_experts_those_count_that_a_token_is_sent_to():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=97, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=2, head_dim=8, **sizes
    )
    model = MixtralForCausalLM(config).eval()
    expert, router, attention = 3 * 32 * 48, 32 * 8, 32 * 32 * 2 + 32 * 16 * 2
    found = costs_of(model)
    assert found.linear_macs == 2 * (2 * expert + router + attention)
    idle = 2 * 6 * expert
    assert found.parameters_per_token == found.parameters - 97 * 32 - idle  # without the embedding table


@pytest.mark.parametrize("per_token", [1, 2])
def test_experts_that_read_zeros_do_not_count(per_token: int):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Llama4TextConfig(
        vocab_size=97, num_hidden_layers=2, num_local_experts=8, num_experts_per_tok=per_token, head_dim=8, **sizes
    )
    found = costs_of(Llama4ForCausalLM(config).eval())
    assert [layer.chunked for layer in found.attention] == [True, True]
    expert, router, attention = 3 * 32 * 48, 32 * 8, 32 * 32 * 2 + 32 * 16 * 2
    assert found.linear_macs == 2 * ((1 + per_token) * expert + router + attention)
    assert found.parameters_per_token == found.parameters - 2 * (8 - per_token) * expert - 97 * 32


def test_other_copies_of_the_weights_are_not_counted_as_files(tiny_llama_dir: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert file_bytes(str(folder)) == (tiny_llama_dir / "model.safetensors").stat().st_size


def test_decoding_is_counted_halfway():
    costs, (row,) = benchmark({"model": compressed_llama()}, SMALL)
    halfway = 6 + (SMALL.new_tokens + 1) // 2
    assert row["models"]["model"]["decode_macs"] == 2 * costs["model"].decode_macs(halfway)


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minicpm3", "glm4_moe_lite", "phimoe", "laguna"),
        *("mixtral", "gpt_oss", "cohere-norm"),
    ],
)
@torch.no_grad()
def test_a_decoding_step_is_what_torch_counts(name: str):
    """Latents are expanded at each step, layers and norms have heads of their own, and routers are no linear layers."""
    model = next(family for family in FAMILIES if family.name == name).dense()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ids = torch.randint(5, 50, (1, 20), generator=torch.Generator().manual_seed(0))
    told = costs_of(model).decode_macs(21)
    cache = model(ids, use_cache=True)[CACHE]
    with FlopCounterMode(display=False) as decode:
        model(ids[:, :1], **{CACHE: cache})
    assert 2 * told == decode.get_total_flops()
