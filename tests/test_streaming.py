"""Blocks from shards, hidden states on disk, layer files: the stream gives what the model in memory gives."""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

import modegpt
from command_line import modegpt as run_command
from conformance.families import FAMILIES
from modegpt import CompressionConfig, InputError
from modegpt.blocks import advance
from modegpt.compress import compress_to_folder, prepare
from modegpt.errors import WriteError
from modegpt.formats.checkpoint_files import find_tensors
from modegpt.formats.safetensors_merge import merge, read_header
from modegpt.formats.shard_fingerprint import fingerprint
from modegpt.hidden_states import HiddenStates
from modegpt.loading.shards import open_shards

SETTINGS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SETTINGS, **changes})).eval()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SETTINGS, num_local_experts=4, num_experts_per_tok=2)).eval()


def flex_olmo() -> FlexOlmoForCausalLM:
    torch.manual_seed(0)
    return FlexOlmoForCausalLM(FlexOlmoConfig(**SETTINGS, num_experts=4, num_experts_per_tok=2, pad_token_id=0)).eval()


def gemma4() -> PreTrainedModel:
    """As E2B: the last two layers read keys and values of the first two, each token has inputs of each layer."""
    return next(family for family in FAMILIES if family.name == "gemma4_text-small").dense()


def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def windows() -> torch.Tensor:
    return torch.randint(64, (6, 16), generator=torch.Generator().manual_seed(1))


def result_files(folder: Path) -> dict[str, bytes]:
    """Everything that must not depend on how the run went: all files but the report, which holds times."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "report.json"}


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "make",
    [
        llama,
        opt,
        mixtral,
        lambda: llama(tie_word_embeddings=True, rope_parameters=YARN),
        lambda: llama().to(torch.bfloat16),
    ],
    ids=["llama", "opt", "mixtral", "tied-yarn", "bfloat16"],
)
def test_streamed_equals_in_memory_and_transformers_bytes(make, tmp_path: Path):
    make().save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 1
    config = CompressionConfig(sparsity=0.25, batch_size=4)
    streamed = modegpt.compress(tmp_path / "dense", windows(), config, out=tmp_path / "a", tokenizer=None)
    assert not any("not streamed" in warning for warning in streamed.modegpt_report["warnings"])
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    in_memory = modegpt.compress(dense, windows(), replace(config, dtype=str(streamed.dtype).removeprefix("torch.")))
    for (name, left), right in zip(streamed.state_dict().items(), in_memory.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    streamed.save_pretrained(tmp_path / "b")
    assert result_files(tmp_path / "a") == result_files(tmp_path / "b")


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "opt", "mixtral"])
def test_a_model_in_16_bits_in_memory_is_computed_as_one_from_files(name: str, tmp_path: Path):
    """In float32 on a CPU, whose half precision crawls: embeddings, blocks and head, none of which is changed."""
    (family,) = (family for family in FAMILIES if family.name == name)
    family.dense().to(torch.bfloat16).save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    config = CompressionConfig(sparsity=0.25, allocation="error", device="cpu")
    in_memory, streamed = (modegpt.compress(source, windows(), config) for source in (dense, tmp_path))
    assert in_memory.dtype == streamed.dtype == dense.dtype == torch.bfloat16
    assert in_memory.modegpt_report["allocation"] == streamed.modegpt_report["allocation"]
    for (name, left), right in zip(streamed.state_dict().items(), in_memory.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def test_reading_an_embedding_that_has_a_buffer_draws_no_random_numbers(tmp_path: Path):
    """Gemma's, which is multiplied by one that no file holds."""
    config = Gemma3TextConfig(**SETTINGS, head_dim=8)
    dense = Gemma3ForCausalLM(config).eval()
    dense.save_pretrained(tmp_path)
    blocks = open_shards(tmp_path, config, torch.float32, torch.device("cpu"), None)
    assert not isinstance(blocks, str)
    before = torch.get_rng_state()
    calibration = blocks.embed(windows(), 6, HiddenStates())
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        embedded = dense(windows(), output_hidden_states=True).hidden_states[0]
    assert torch.equal(next(iter(calibration.hidden)), embedded)


def test_a_tensor_in_parts_is_joined_and_one_part_missing_is_told(tmp_path: Path):
    """Kimi Linear's convolutions: files hold those of queries, keys and values apart."""
    torch.manual_seed(0)
    config = KimiLinearConfig(
        **SETTINGS, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, n_group=1, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, linear_num_heads=4, linear_head_dim=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    dense = KimiLinearForCausalLM(config).eval()
    dense.save_pretrained(tmp_path)
    name, part = "model.layers.0.self_attn.conv1d.weight", "model.layers.0.self_attn.k_conv1d.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    assert part in tensors
    assert name not in tensors
    blocks = open_shards(tmp_path, config, torch.float32, torch.device("cpu"), None)
    assert not isinstance(blocks, str)
    assert torch.equal(blocks.whole()[name], dense.get_parameter(name))
    whole = tensors[part]
    tensors[part] = whole[:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_shards(tmp_path, config, torch.float32, torch.device("cpu"), None) == (
        f"its shards store '{name}' under another name or shape"
    )
    del tensors[part]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_shards(tmp_path, config, torch.float32, torch.device("cpu"), None) == (
        f"its shards store '{name}' under another name or shape"
    )


@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_other_weights_have_another_fingerprint_and_a_copy_has_the_same(name: str, tmp_path: Path):
    """Also of a tensor that is neither at the beginning of a file nor at its end."""
    dense, config = llama(hidden_size=256, intermediate_size=512, vocab_size=2048), CompressionConfig(sparsity=0.25)
    dense.save_pretrained(tmp_path / "dense")
    entry = find_tensors(tmp_path / "dense")[name]
    assert min(entry.start, entry.path.stat().st_size - entry.start - entry.size) > 2**20 + 2**14
    shutil.copytree(tmp_path / "dense", tmp_path / "copy", copy_function=shutil.copyfile)
    same, other = (fingerprint(find_tensors(tmp_path / folder)) for folder in ("dense", "copy"))
    assert same == other
    report = compress_to_folder(tmp_path / "dense", windows(), tmp_path / "out", config)
    assert compress_to_folder(tmp_path / "copy", windows(), tmp_path / "out", config, resume=True) == report
    with torch.no_grad():
        dense.get_parameter(name).mul_(2)
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(InputError, match="holds another run: its model is"):
        compress_to_folder(tmp_path / "dense", windows(), tmp_path / "out", config, resume=True)


def test_a_changed_stretch_of_a_long_tensor_is_seen(tmp_path: Path):
    tensor, found = torch.zeros(9 * 2**20), set()
    for start in (None, *range(0, len(tensor), 2**21)):  # nothing, then 8 MiB more of it each time
        if start is not None:
            tensor[start : start + 2**21] = 1
        save_file({"x": tensor}, tmp_path / "model.safetensors")
        found.add(fingerprint(find_tensors(tmp_path))["model.safetensors"])
    assert len(found) == 6


def test_merge_writes_what_safetensors_writes(tmp_path: Path):
    first = {"b.x": torch.randn(3, 5), "a": torch.arange(7), "é": torch.randn(2).bfloat16()}
    second = {"z": torch.randn(3).half(), "b.w": torch.randn(0, 3), "q": torch.zeros(3, dtype=torch.bool)}
    save_file(first, tmp_path / "1", {"format": "pt"})
    save_file(second, tmp_path / "2", {"other": "metadata"})
    save_file({**first, **second}, tmp_path / "whole", {"format": "pt"})
    merge(read_header(tmp_path / "1")[0] | read_header(tmp_path / "2")[0], tmp_path / "merged")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_spill_to_disk_and_come_back_bit_for_bit(dtype, tmp_path: Path):
    batches = [torch.randn(2, 3, 4).to(dtype) for _ in range(5)]
    hidden = HiddenStates(max_bytes=2 * batches[0].nbytes, folder=tmp_path)
    for batch in batches:
        hidden.append(batch)
    assert hidden.spilled == 3
    assert hidden.n_tokens == 5 * 2 * 3
    assert all(torch.equal(left, right) for left, right in zip(hidden, batches, strict=True))
    for index, batch in enumerate(batches):
        hidden[index] = 2 * batch
    assert all(torch.equal(left, 2 * right) for left, right in zip(hidden, batches, strict=True))
    for index, held in enumerate(hidden.in_place()):
        held[:, 0] += index
    for index, (left, right) in enumerate(zip(hidden, batches, strict=True)):
        right *= 2
        right[:, 0] += index
        assert torch.equal(left, right)
    assert hidden.spilled == 3
    copied, another = hidden.copy(), hidden.another()
    for batch in batches:
        another.append(batch)
    assert (copied.spilled, another.spilled) == (3, 3)
    assert all(torch.equal(left, right) for left, right in zip(copied, hidden, strict=True))
    del hidden, copied, another
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_disk_that_refuses_hidden_states_is_named(tmp_path: Path):
    import resource

    states = torch.zeros(2, 3, 400)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (states.nbytes // 2, unlimited[1]))
    try:
        for folder, named in ((tmp_path / "hidden", r"hidden'.*--resume"), (None, tempfile.gettempdir())):
            with pytest.raises(WriteError, match=rf"hidden states could not be written to '.*{named}") as told:
                HiddenStates(max_bytes=1, folder=folder).append(states)
            assert "File too large; make room" in str(told.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    with pytest.raises(WriteError, match=r"missing/hidden'"):
        HiddenStates(max_bytes=1, folder=tmp_path / "missing" / "hidden").append(states)


@pytest.mark.parametrize(("make", "n_streams"), [(llama, 3), (mixtral, 4), (flex_olmo, 5)])
def test_the_streams_of_a_run_share_the_memory_of_the_host(make: Callable[[], PreTrainedModel], n_streams: int):
    """Those of the dense model, of the compressed one and of the probe, what experts lack and what a norm reads."""
    batch = 2 * 16 * 32 * 4  # two windows of 16 tokens, 32 numbers each, in float32
    config = CompressionConfig(sparsity=0.25, batch_size=2, device="cpu", max_host_memory=2 * n_streams * batch)
    run = prepare(make(), windows(), config, None, None)
    assert run.source.n_streams(config) == n_streams
    assert run.source.n_streams(replace(config, solver="paper")) == 1
    assert run.embedding.shared(windows(), 1).hidden.spilled == 0
    assert run.embedding.shared(windows(), n_streams).hidden.spilled == 1  # of three batches two fit


def test_what_blocks_read_beside_the_hidden_states_shares_it_too():
    """Of 4 layers 8 inputs each; keys and values of 2 heads of 16 in one kind of layer, of 24 in the other; of 32."""
    config = CompressionConfig(sparsity=0.25, batch_size=2, device="cpu", max_host_memory=2**20)
    run = prepare(gemma4(), windows(), config, None, None)
    own, handed = 4 * 8, 2 * 2 * 16 + 2 * 2 * 24
    assert run.source.states_held(3) == 3 * (32 + handed) / 32 + own / 32
    assert run.source.states_held(2, 2) == 2 * (32 + handed + own) / 32  # of two texts
    calibration = run.embedding.shared(windows(), 3)
    for index in range(4):
        advance(run.source.blocks.peek(index, torch.device("cpu")), index, calibration, torch.device("cpu"))
    n_tokens, held = windows().numel(), calibration.arguments
    assert sum(each.nbytes for each in calibration.hidden) == n_tokens * 32 * 4
    assert sum(each.nbytes for states in held.by_token.values() for each in states) == n_tokens * own * 4
    pairs = [states for pair in held.handed.values() for states in pair]
    assert sum(each.nbytes for states in pairs for each in states) == n_tokens * handed * 4
    assert held.copy().by_token is held.by_token  # which nothing changes


@pytest.mark.parametrize("make", [llama, mixtral, gemma4])
def test_spilling_does_not_change_the_result(make: Callable[[], PreTrainedModel], tmp_path: Path):
    model = make()
    plain = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, batch_size=2))
    spilled = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, batch_size=2, max_host_memory=1))
    for left, right in zip(plain.state_dict().values(), spilled.state_dict().values(), strict=True):
        assert torch.equal(left, right)


class StopError(Exception):
    pass


def stop_after(n_blocks: int):
    def progress(stage: str, done: int, _total: int) -> None:
        if stage == "compress" and done == n_blocks:
            raise StopError

    return progress


@pytest.mark.parametrize(
    ("allocation", "solver", "make"),
    [
        ("uniform", "best", llama),
        ("influence", "paper", llama),
        ("error", "best", llama),
        ("uniform", "best", mixtral),
        ("uniform", "paper", mixtral),
        ("error", "best", gemma4),
    ],
)
def test_a_stopped_run_resumes_to_the_same_bytes(allocation, solver, make, tmp_path: Path):
    make().save_pretrained(tmp_path / "dense")
    config = CompressionConfig(sparsity=0.25, batch_size=4, allocation=allocation, solver=solver, dtype="bfloat16")
    compress_to_folder(tmp_path / "dense", windows(), tmp_path / "whole", config)
    with pytest.raises(StopError):
        compress_to_folder(tmp_path / "dense", windows(), tmp_path / "out", config, progress=stop_after(2))
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="unfinished run: continue it with --resume"):
        compress_to_folder(tmp_path / "dense", windows(), tmp_path / "out", config)
    compress_to_folder(tmp_path / "dense", windows(), tmp_path / "out", config, resume=True)
    assert result_files(tmp_path / "out") == result_files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()
    again = compress_to_folder(tmp_path / "dense", windows(), tmp_path / "out", config, resume=True)
    assert again == json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sparsity": 0.3}, "setting sparsity"),
        ({"modules": ("mlp",)}, "setting modules"),
        ({"dtype": "bfloat16"}, "output dtype"),
    ],
)
def test_resuming_another_run_is_refused_by_field(change, field, tmp_path: Path):
    model = llama()
    settings = {"sparsity": 0.25, "batch_size": 4}
    with pytest.raises(StopError):
        compress_to_folder(model, windows(), tmp_path / "out", CompressionConfig(**settings), progress=stop_after(1))
    before = sorted((tmp_path / "out.partial").rglob("*"))
    config = CompressionConfig(**{**settings, **change})
    with pytest.raises(InputError, match=f"its {field} is"):
        compress_to_folder(model, windows(), tmp_path / "out", config, resume=True)
    with pytest.raises(InputError, match="its calibration tokens is"):
        compress_to_folder(model, windows().flip(0), tmp_path / "out", CompressionConfig(**settings), resume=True)
    assert sorted((tmp_path / "out.partial").rglob("*")) == before


def test_a_truncated_layer_file_is_made_again(tmp_path: Path):
    model, config = llama(), CompressionConfig(sparsity=0.25, batch_size=4)
    compress_to_folder(model, windows(), tmp_path / "whole", config)
    with pytest.raises(StopError):
        compress_to_folder(model, windows(), tmp_path / "out", config, progress=stop_after(3))
    layer = tmp_path / "out.partial" / "layers" / "00001.safetensors"
    layer.write_bytes(layer.read_bytes()[:-10])
    compress_to_folder(model, windows(), tmp_path / "out", config, resume=True)
    assert result_files(tmp_path / "out") == result_files(tmp_path / "whole")


def test_a_truncated_or_missing_shard_of_the_model_is_named(tmp_path: Path):
    llama().save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    shard = sorted((tmp_path / "dense").glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(InputError, match=rf"{shard.name}.*truncated"):
        modegpt.compress(tmp_path / "dense", windows(), CompressionConfig(sparsity=0.25))
    shard.unlink()
    with pytest.raises(InputError, match=rf"{shard.name}.*not in"):
        modegpt.compress(tmp_path / "dense", windows(), CompressionConfig(sparsity=0.25))


def test_pickled_weights_are_loaded_whole_and_the_report_says_so(tmp_path: Path):
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "dense" / "pytorch_model.bin")
    compressed = modegpt.compress(tmp_path / "dense", windows(), CompressionConfig(sparsity=0.25))
    assert any("loaded whole, not streamed: it has no safetensors" in w for w in compressed.modegpt_report["warnings"])


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_at_random_moments_it_resumes_to_the_same_bytes(tiny_llama_dir: Path, tmp_path: Path):
    call = [
        "compress", str(tiny_llama_dir), "--calibration", "python-docs", "--sparsity", "0.3", "--samples", "16",
        "--seq-len", "64", "--allocation", "influence",
    ]  # fmt: skip
    out, command = tmp_path / "out", [sys.executable, "-m", "modegpt", *call]

    whole = run_command(*call, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    rng = random.Random(0)
    for _ in range(2):
        process = subprocess.Popen([*command, "--out", str(out), "--resume"], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        # From the moment the run has a folder, its remaining life is well under two seconds.
        while process.poll() is None and not (tmp_path / "out.partial").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = run_command(*call, "--out", out, "--resume")
    assert done.exit_code == 0, done.output
    assert result_files(out) == result_files(tmp_path / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes")
def test_a_disk_that_refuses_a_file_keeps_what_was_finished(tmp_path: Path):
    import resource

    model, config = llama(), CompressionConfig(sparsity=0.25, batch_size=4)
    compress_to_folder(model, windows(), tmp_path / "whole", config)
    layers = tmp_path / "out.partial" / "layers"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refuse_from_layer_2(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("compress", 2):
            half = (layers / "00001.safetensors").stat().st_size // 2
            resource.setrlimit(resource.RLIMIT_FSIZE, (half, unlimited[1]))

    try:
        with pytest.raises(WriteError, match=r"layer 2 could not be written .* go on with --resume"):
            compress_to_folder(model, windows(), tmp_path / "out", config, progress=refuse_from_layer_2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in layers.glob("*.safetensors")) == ["00000.safetensors", "00001.safetensors"]
    compress_to_folder(model, windows(), tmp_path / "out", config, resume=True)
    assert result_files(tmp_path / "out") == result_files(tmp_path / "whole")


IDS = torch.arange(128).view(4, 32)
PLAIN = CompressionConfig(sparsity=0.25, samples=4, seq_len=32, solver="paper")


def test_shards_of_one_name_in_two_folders_are_told_apart(tiny_llama_dir: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model, ignore=shutil.ignore_patterns("*.safetensors"))
    state = load_file(tiny_llama_dir / "model.safetensors")
    weight_map = {name: f"{'x' if number % 2 else 'y'}/w.safetensors" for number, name in enumerate(sorted(state))}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def write(factor: float) -> None:
        for folder in ("x", "y"):
            (model / folder).mkdir(exist_ok=True)
            own = {
                name: state[name] * (factor if folder == "x" else 1) for name in state if weight_map[name][0] == folder
            }
            save_file(own, model / folder / "w.safetensors", {"format": "pt"})

    write(1.0)
    compress_to_folder(model, IDS, tmp_path / "out", PLAIN)
    write(2.0)
    with pytest.raises(InputError, match="its model is"):
        compress_to_folder(model, IDS, tmp_path / "out", PLAIN, resume=True)


def test_weights_that_are_links_into_the_output_are_not_replaced(tiny_llama_dir: Path, tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_llama_dir, out)
    shutil.copytree(tiny_llama_dir, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "model.safetensors").symlink_to(out / "model.safetensors")
    with pytest.raises(InputError, match=r"out' holds '.*model\.safetensors', which the model is read from"):
        compress_to_folder(model, IDS, out, PLAIN, overwrite=True)
    assert load_file(model / "model.safetensors").keys() == load_file(tiny_llama_dir / "model.safetensors").keys()


def test_a_config_without_a_dtype_leaves_it_to_the_files(tiny_llama_dir: Path, tmp_path: Path):
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.bfloat16).save_pretrained(model)
    said = json.loads((model / "config.json").read_text())
    said.pop("dtype")
    (model / "config.json").write_text(json.dumps(said))
    assert AutoModelForCausalLM.from_pretrained(model).dtype == torch.bfloat16
    compress_to_folder(model, IDS, tmp_path / "out", PLAIN)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} >= {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_shard_whose_header_is_wrong_is_named(tiny_llama_dir: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    file = model / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "F16"
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        compress_to_folder(model, IDS, tmp_path / "out", PLAIN)
