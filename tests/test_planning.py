"""The dry run: what it says is what compress then does."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import modegpt
from command_line import modegpt as run_command
from conformance.families import FAMILIES
from modegpt import CompressionConfig, InputError
from modegpt.compress import prepare
from modegpt.pages.html_report import write_report
from modegpt.planning import make_plan
from modegpt.ranks.plan_file import read_plan
from modegpt.running.estimate import estimate

TEXT = ["--calibration", "python-docs", "--samples", "4", "--seq-len", "32"]


@pytest.mark.parametrize("rule", ["uniform", "influence", "influence-blocks", "owl", "error", "width"])
def test_a_plan_is_what_compress_does_and_compress_takes_it_back(rule: str, tiny_llama_dir: Path, tmp_path: Path):
    plan_file, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    how = ["--sparsity", "0.3", "--allocation", rule, *TEXT]
    done = run_command("plan", tiny_llama_dir, *how, "--json", plan_file, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    planned, unscored = json.loads(plan_file.read_text()), rule in ("uniform", "width")
    assert [layer["score"] is None for layer in planned["layers"]] == [unscored] * len(planned["layers"])
    for layer in planned["layers"]:
        counts = layer["parameters"]
        assert layer["sparsity"] == pytest.approx(1 - counts["compressed"] / counts["dense"], rel=1e-12)
    share, cache = planned["sparsity"], planned["kv_bytes_per_token"]
    assert {
        f"removed: {share['blocks']:.2%} of the decoder blocks, {share['total']:.2%} of the model",
        f"KV cache: {cache['dense']:,} bytes a token would become {cache['compressed']:,}",
    } <= set(done.stdout.splitlines())
    assert (planned["scoring_seconds"] is None) == unscored == ("scoring took" not in done.output)

    direct, by_plan = tmp_path / "direct", tmp_path / "by-plan"
    for out, options in ((direct, how), (by_plan, ["--plan", str(plan_file), *TEXT])):
        done = run_command("compress", tiny_llama_dir, "--out", out, *options)
        assert done.exit_code == 0, done.output
    report = json.loads((direct / "report.json").read_text())
    assert [layer["ranks"] for layer in report["layers"]] == [layer["ranks"] for layer in planned["layers"]]
    assert report["parameters"] == planned["parameters"]
    assert {k: report["sparsity"][k] for k in ("blocks", "total")} == {
        k: planned["sparsity"][k] for k in ("blocks", "total")
    }
    assert (direct / "model.safetensors").read_bytes() == (by_plan / "model.safetensors").read_bytes()
    described = json.loads((direct / "config.json").read_text())["modegpt"]["layers"]
    kept = sum(2 * layer["rope_pairs"] + layer["qk_plain"] + layer["value_dim"] for layer in described)
    dense_config = json.loads((tiny_llama_dir / "config.json").read_text())
    heads = dense_config["num_key_value_heads"]
    assert cache == {"dense": 2 * 2 * 16 * heads * 4, "compressed": kept * heads * 4}


def test_a_module_without_a_rank_has_none_in_a_plan_a_report_and_on_the_page(tmp_path: Path):
    """In layers of mixers, MLPs and attention that stays as it is."""
    dense = next(family for family in FAMILIES if family.name == "nemotron_h").dense()
    dense.save_pretrained(tmp_path / "dense")
    plan_file = tmp_path / "plan.json"
    done = run_command("plan", tmp_path / "dense", "--sparsity", "0.2", "--seq-len", "24", "--json", plan_file)
    assert done.exit_code == 0, done.output
    planned = json.loads(plan_file.read_text())["layers"]
    width = planned[0]["ranks"]["mlp"]
    assert width < 40
    lacking = [{"mlp": kept, "qk": None, "vo": None} for kept in (width, None, width, None)]
    assert [layer["ranks"] for layer in planned] == lacking
    config = CompressionConfig(allocation="plan", plan=read_plan(plan_file))
    ids = torch.randint(3, 101, (4, 24), generator=torch.Generator().manual_seed(0))
    report = modegpt.compress(tmp_path / "dense", ids, config, out=tmp_path / "out").modegpt_report
    assert [layer["ranks"] for layer in report["layers"]] == lacking
    write_report(tmp_path / "out", tmp_path / "page.html")
    rows = re.findall(r"<tr>\s*<t[hd][^>]*>([013])</t[hd]>(.*?)</tr>", (tmp_path / "page.html").read_text(), re.DOTALL)
    cells = {layer: re.findall(r">([^<>]+)</td>", row) for layer, row in rows}
    assert cells["0"][1:4] == [f"{width} of 40", "-", "-"]
    assert cells["3"][1:7] == ["-"] * 6


def test_owl_counts_what_is_above_the_threshold_that_was_asked_for():
    model, windows = small_models()["llama"], torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    config = CompressionConfig(sparsity=0.3, allocation="owl", owl_threshold=2.0)
    found = [layer["score"] for layer in make_plan(model, windows, config)["layers"]]
    linears = [[part for part in layer.modules() if isinstance(part, torch.nn.Linear)] for layer in model.model.layers]
    read: dict[torch.nn.Module, torch.Tensor] = {}
    for linear in itertools.chain(*linears):
        linear.register_forward_pre_hook(lambda module, inputs: read.update({module: inputs[0].flatten(0, -2)}))
    with torch.no_grad():
        model(windows)
    for score, own in zip(found, linears, strict=True):
        entries = torch.cat([(each.weight.abs() * read[each].norm(dim=0)).flatten() for each in own])
        # Float32 may put an entry that is nearly at the threshold on its other side.
        assert score == pytest.approx((entries > 2 * entries.mean()).double().mean().item(), abs=2 / len(entries))


def small_models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    opt = OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    post_norm = OPTConfig(**{**opt.to_dict(), "do_layer_norm_before": False})
    return {
        "llama": LlamaForCausalLM(llama).eval(),
        "opt": OPTForCausalLM(opt).eval(),
        "opt-post-norm": OPTForCausalLM(post_norm).eval(),
    }


@pytest.mark.parametrize("family", ["llama", "opt", "opt-post-norm"])
def test_the_parts_of_a_block_are_scored_on_the_stream_between_them(family: str):
    model = small_models()[family]
    windows = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    config = CompressionConfig(sparsity=0.3, allocation="influence-blocks")
    scores = torch.tensor([layer["score"] for layer in make_plan(model, windows, config)["layers"]])
    # Independently: the stream after attention is what the model's own modules add up to.
    with torch.no_grad():
        states = model(windows, output_hidden_states=True).hidden_states
    layers = model.base_model.get_submodule("layers" if family == "llama" else "decoder.layers")
    attended: list[torch.Tensor] = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _m, _i, output: attended.append(output[0])) for layer in layers
    ]
    with torch.no_grad():
        model(windows)
    for handle in handles:
        handle.remove()
    for index in range(2):  # the last entry of hidden_states is after the final norm
        middle = states[index] + attended[index]
        if family == "opt-post-norm":
            middle = layers[index].self_attn_layer_norm(middle).detach()
        for part, (before, after) in enumerate(((states[index], middle), (middle, states[index + 1]))):
            cosine = torch.cosine_similarity(before.double(), after.double(), dim=-1)
            # float32 states, cosines averaged in float64.
            assert scores[index, part].item() == pytest.approx((1 - cosine).mean().item(), abs=1e-6)


@pytest.mark.parametrize("rule", ["uniform", "influence"])
def test_token_ids_are_reckoned_with_as_they_are(rule: str):
    """And not as the settings for a text say, which this model could not even read."""
    model, windows = small_models()["llama"], torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    settings = {"sparsity": 0.3, "allocation": rule}
    estimates = [
        make_plan(model, ids, CompressionConfig(**settings, **said))["estimate"]["host_bytes"]
        for ids, said in ((windows, {}), (windows, {"samples": 4, "seq_len": 16}), (windows.repeat(2, 1), {}))
    ]
    assert estimates[0] == estimates[1]
    assert estimates[2] == pytest.approx(2 * estimates[0], rel=0.1)  # of 4 windows 0.75 are added, and of 8 are 1.5


def test_memory_and_time_are_reckoned_as_it_is_written(monkeypatch: pytest.MonkeyPatch):
    """On a machine that is made believe, with 2 and 1 GFLOP/s."""
    rates = {torch.float32: 2e9, torch.float64: 1e9}
    monkeypatch.setattr("modegpt.running.estimate._rate", lambda dtype, device: rates[dtype])
    model, windows = small_models()["llama"], torch.zeros(4, 16, dtype=torch.int64)
    block = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 96 * 32 + 2 * 32  # queries and outputs, keys and values, MLP, norms
    paper, best = (
        make_plan(model, windows, CompressionConfig(sparsity=0.3, solver=solver, device="cpu"))["estimate"]
        for solver in ("paper", "best")
    )
    # In float64 the MLP's moment and two working copies; the gates' in float32.
    assert paper["device_bytes"] == 4 * block + (8 + 2 * 8 + 4) * 96**2
    assert paper["host_bytes"] == 64 * 32 * 4
    products = 64 * (2 * 2 * 3 * block + 3 * 96**2)  # of two passes and of the moments, by 64 tokens in three layers
    assert paper["seconds"] == pytest.approx(products / 2e9 + 3 * 3 * 96**3 / 1e9, rel=1e-12)
    # The working copies are in float32, a fifth window is written, and all three blocks are measured together: held
    # are each one's moments, hidden states, neurons at every seventh of its tokens, and an output matrix.
    held = 12 * 96**2 + 8 * 32**2 + 80 * 32 * 4 + 12 * 96 * 4 + 96 * 32 * 4
    assert best["device_bytes"] == 4 * block + (8 + 2 * 4 + 4) * 96**2 + 3 * held
    assert best["host_bytes"] == 3 * 80 * 32 * 4  # of the dense model, the compressed one and the probe
    products = 80 * (2 * 2 * 3 * block + 3 * 96**2) + 16 * 2 * 3 * block + 3 * 3 * 96**3
    assert best["seconds"] == pytest.approx(products / 2e9, rel=1e-12)


def test_a_saved_model_is_reckoned_with_in_its_dtype_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saving leaves the config with the dtype's name. The GPU is one of which the speed is made believe."""
    monkeypatch.setattr("modegpt.running.estimate._rate", lambda dtype, device: 1e9)
    found, device = [], torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        model = small_models()["llama"].to(dtype)
        model.save_pretrained(tmp_path)
        config = CompressionConfig(solver="paper", device="cpu")
        run = prepare(model, torch.zeros(4, 16, dtype=torch.int64), config, None, None)
        assert isinstance(run.source.config.dtype, str)
        found.append(estimate(run.source, run.sizes, config, (4, 16), device))
    assert found[0]["host_bytes"] == 2 * found[1]["host_bytes"]
    assert "bfloat16" in found[1]["basis"]


def test_the_cache_of_what_the_model_writes_is_reckoned_with():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
    )  # fmt: skip
    windows = torch.randint(64, (4, 512), generator=torch.Generator().manual_seed(1))
    settings = {"sparsity": 0.3, "coverage": 1.0, "solver": "paper"}
    with_cache, without = (
        make_plan(LlamaForCausalLM(config), windows, CompressionConfig(**settings, **limit))["estimate"]["device_bytes"]
        for limit in ({}, {"max_host_memory": 10**9})
    )
    # Four windows are written: keys and values of 2048 tokens, in three layers of 32 numbers, in float32.
    assert with_cache - without == 2 * 2048 * 3 * 32 * 4


def test_blocks_that_stay_while_the_model_writes_are_reckoned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    block = (4 * 32 * 32 + 3 * 32 * 16 + 2 * 32) * 4  # attention, MLP and norms, in float32
    windows = torch.randint(64, (4, 512), generator=torch.Generator().manual_seed(1))
    settings = CompressionConfig(sparsity=0.3, coverage=1.0, solver="paper")
    found = []
    for room in (0, block, 2 * block, 10 * block):
        monkeypatch.setattr("modegpt.running.own_text.BLOCK_BYTES", room)
        found.append(make_plan(str(tmp_path), windows, settings)["estimate"]["device_bytes"])
    assert [beside - found[0] for beside in found] == [0, block, 2 * block, 2 * block]  # of three, one always runs


def test_planning_leaves_the_global_random_state_alone():
    model = small_models()["llama"]
    state = torch.get_rng_state()
    make_plan(model, torch.zeros(4, 16, dtype=torch.int64), CompressionConfig(sparsity=0.3))
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_round_to_what_kernels_like():
    model = small_models()["llama"]
    windows = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    config = CompressionConfig(sparsity=0.4, allocation="influence", round_to=4, temperature=1.0)
    for layer in modegpt.compress(model, windows, config).modegpt_report["layers"]:
        assert all(rank % 4 == 0 for rank in layer["ranks"].values())


def mlp_widths(width: int, **settings: Any) -> list[int]:
    """The widths to which the MLPs of a small model are cut."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=width, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    windows = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    model = modegpt.compress(LlamaForCausalLM(config), windows, CompressionConfig(solver="paper", **settings))
    return [layer["ranks"]["mlp"] for layer in model.modegpt_report["layers"]]


@pytest.mark.parametrize("allocation", ["uniform", "influence"])
@pytest.mark.parametrize(
    ("width", "settings", "grain"),
    [
        (1024, {"dtype": "bfloat16"}, 8),
        (1024, {"dtype": "float16"}, 8),
        (1024, {"dtype": "float32"}, 1),
        (1024, {"dtype": "bfloat16", "round_to": 1}, 1),
        (1023, {"dtype": "bfloat16"}, 1),
        (1036, {"dtype": "bfloat16"}, 1),
    ],
)
def test_widths_suit_tensor_cores_where_weights_have_16_bits(
    width: int, settings: dict[str, Any], grain: int, allocation: str
):
    found = mlp_widths(width, sparsity=0.3, modules=("mlp",), allocation=allocation, temperature=1.0, **settings)
    assert all(0 < rank < width for rank in found)
    assert any(rank % 8 for rank in found) == (grain == 1)


def test_the_widths_of_a_plan_are_taken_as_they_are():
    plan = tuple({"mlp": 701, "qk": 8, "vo": 8} for _ in range(2))
    assert mlp_widths(1024, allocation="plan", plan=plan, dtype="bfloat16") == [701, 701]


def test_an_impossible_budget_names_the_largest_possible(tiny_llama_dir: Path):
    config, told = CompressionConfig(sparsity=0.9, modules=("qk",), allocation="influence", samples=2, seq_len=16), []
    with pytest.raises(InputError, match=r"largest|at most"):
        make_plan(tiny_llama_dir, "python-docs", config, progress=lambda *stage: told.append(stage))
    assert told == []  # no block was scored


@pytest.mark.parametrize(
    ("content", "message"),
    [("nonsense", "cannot be read"), ("{}", "no list of layers"), ('[{"mlp": 1}]', "layer 0: give the ranks")],
)
def test_a_file_that_is_no_plan_is_refused(content: str, message: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_plan(path)
