"""Checkpoints with 8-bit and 4-bit weights: unpacked as they are streamed, to what transformers makes of them."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_text_part import multimodal
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Mxfp4Config,
)

import modegpt
from modegpt import CompressionConfig, InputError
from modegpt.formats.packed import FOURS, unpack, unpack_fours
from modegpt.loading.models import open_model
from modegpt.running.source import open_source
from test_cli import assert_refused
from test_cli import modegpt as command

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALL = {"samples": 8, "seq_len": 64}
BLOCK = (16, 32)


def by_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize as DeepSeek's and Qwen's checkpoints are: one scale for each block."""
    rows, columns = weight.shape
    tiles = [strip.split(block[1], 1) for strip in weight.split(block[0])]
    scale = torch.stack([torch.stack([tile.abs().max() / LARGEST for tile in strip]) for strip in tiles])
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight / spread).to(torch.float8_e4m3fn), scale


def as_a_whole(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as Mistral's checkpoints are: one scale for a weight."""
    scale = weight.abs().max() / LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize as compressed-tensors does it by channel."""
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return (weight / scale).to(torch.float8_e4m3fn), scale


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
}
TILES: dict[str, Any] = {
    **CHANNELS,
    "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": list(BLOCK)}}},
}
ROWS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
KINDS = {
    "by block": (by_block, FP8, "_scale_inv"),
    "by row, as Meta does": (by_row, ROWS, "_scale"),
    "as a whole": (as_a_whole, STATIC, "_scale_inv"),
    "by row": (by_row, CHANNELS, "_scale"),
    "by block, as compressed-tensors does": (by_block, TILES, "_scale"),
    "as a whole, as AutoFP8 does": (as_a_whole, STATIC, "_scale"),
}


def packed(
    source: Path, target: Path, quantize: Callable[[Tensor], tuple[Tensor, Tensor]], about: dict[str, Any], end: str
) -> dict[str, Tensor]:
    """Write a checkpoint with the weights of its blocks in 8 bits, and return what they mean, by name."""
    shutil.copytree(source, target)
    tensors, meant = load_file(source / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        meant[name] = tensor
        if ".layers." in name and tensor.ndim == 2 and "norm" not in name and "gate.weight" not in name:
            tensors[name], scale = quantize(tensor)
            tensors[name + end] = scale
            meant[name] = tensors[name].float() * _spread(scale, tensor, about.get("weight_block_size") or BLOCK)
            if about is STATIC:
                tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    return meant


def _spread(scale: Tensor, weight: Tensor, block: Sequence[int] = BLOCK) -> Tensor:
    rows, columns = weight.shape
    if scale.numel() in (1, rows):
        return scale
    return torch.stack([scale[row // block[0], torch.arange(columns) // block[1]] for row in range(rows)])


def assert_compressed_alike(folder: Path, bits: int, calibration: Path | Tensor, config: CompressionConfig) -> None:
    """Compress `packed` and `plain` of a folder: they give the same bytes, and of one the report says what it was."""
    written = {}
    for name in ("packed", "plain"):
        out = folder / f"{name}-30"
        modegpt.compress(str(folder / name), calibration, config, out=out)
        written[name] = {f: (out / f).read_bytes() for f in ("model.safetensors", "config.json")}
        warnings = json.loads((out / "report.json").read_text())["warnings"]
        assert any(f"stored in {bits} bits, were unpacked" in line for line in warnings) == (name == "packed")
    assert written["packed"] == written["plain"]


@pytest.mark.parametrize("kind", KINDS)
def test_compressing_it_gives_what_the_unpacked_checkpoint_gives(
    kind: str, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    meant = packed(tiny_llama_dir, tmp_path / "packed", *KINDS[kind])
    shutil.copytree(tiny_llama_dir, tmp_path / "plain")
    save_file(meant, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    original = load_file(tiny_llama_dir / "model.safetensors")
    assert not all(torch.equal(meant[name], original[name]) for name in meant), "nothing was packed"
    assert_compressed_alike(tmp_path, 8, small_text_file, CompressionConfig(sparsity=0.3, **SMALL))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "packed-30").dtype == torch.float32


@pytest.mark.parametrize("kind", ["by block", "as a whole"])
def test_transformers_unpacks_the_same_weights(kind: str, tiny_llama_dir: Path, tmp_path: Path):
    folder = tmp_path / "packed"
    packed(tiny_llama_dir, folder, *KINDS[kind])
    theirs = open_model(str(folder), torch.float32)
    blocks = open_source(str(folder), CPU).blocks
    for index in range(2):
        for name, weight in blocks.take(index, CPU).named_parameters():
            assert torch.equal(weight, theirs.get_parameter(f"{blocks.prefix}.{index}.{name}")), name


def test_a_model_opened_from_it_is_a_plain_one(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    """As `eval`, `bench` and `sweep` open it."""
    folder = tmp_path / "packed"
    packed(tiny_llama_dir, folder, *KINDS["by block"])
    model = open_model(str(folder))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert getattr(model.config, "quantization_config", None) is None
    text = ["--data", small_text_file, "--seq-len", 64, "--max-windows", 2]
    assert command("eval", folder, *text).exit_code == 0
    sweep = ["--sparsity", "0.2", "--samples", 8, "--calibration", "python-docs", "--rounds", 0]
    done = command("sweep", folder, "--out", tmp_path / "sweep", *sweep, *text)
    assert done.exit_code == 0, done.output


def test_experts_in_8_bits(small_text: str, tmp_path: Path):
    config = MixtralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "dense")
    meant = packed(tmp_path / "dense", tmp_path / "packed", *KINDS["by block"])
    names = [name for name in meant if ".experts." in name]
    assert len(names) == 2 * 3 * 3
    source = open_source(str(tmp_path / "packed"), CPU)
    mixture = source.architecture.mixture(source.blocks.take(0, CPU))
    inside = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    for expert in range(3):
        gate, up, down = (meant[inside.format(expert, part)] for part in ("w1", "w3", "w2"))
        assert torch.equal(mixture.gate_up_proj[expert], torch.cat((gate, up)))
        assert torch.equal(mixture.down_proj[expert], down)


def in_fours(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `(experts, inputs, rows)` as gpt-oss is: return blocks, scales, and what they mean."""
    blocks = weight.mT.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).log2().floor() - 2  # so that the largest is 4 to 8 times its power
    levels = torch.tensor(FOURS)
    nearest = (blocks.abs()[..., None] / exponents.exp2()[..., None, None] - levels).abs().argmin(-1)
    codes = (nearest + 8 * (blocks < 0)).to(torch.uint8)
    meant = levels[nearest] * blocks.sign() * exponents.exp2()[..., None]
    return codes[..., ::2] + 16 * codes[..., 1::2], (exponents + 127).to(torch.uint8), meant.flatten(-2).mT


def gpt_oss(folder: Path) -> None:
    """Write `plain`, its experts rounded to 4 bits, and the same as `packed`."""
    config = GptOssConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    packed_tensors = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, meant = in_fours(weight)
            weight.copy_(meant)
            packed_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            packed_tensors[name] = weight
    model.save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "packed")
    save_file(packed_tensors, folder / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "packed" / "config.json").read_text())
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "packed" / "config.json").write_text(json.dumps({**config, "quantization_config": about}))


def test_experts_in_4_bits(tmp_path: Path):
    gpt_oss(tmp_path)
    own = open_model(str(tmp_path / "packed"), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    meant = load_file(tmp_path / "plain" / "model.safetensors")
    assert own.state_dict().keys() == theirs.state_dict().keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(own.get_parameter(name), tensor), name
        assert torch.equal(theirs.get_parameter(name), tensor), name
    assert_compressed_alike(tmp_path, 4, torch.randint(0, 100, (8, 64)), CompressionConfig(sparsity=0.3))


def test_4_bits_without_a_word_in_the_config_are_refused(tmp_path: Path):
    gpt_oss(tmp_path)
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "packed" / "config.json")
    with pytest.raises(InputError, match="in 4 bits, and its config does not say"):
        open_source(str(tmp_path / "packed"), CPU)
    with pytest.raises(InputError, match="in 4 bits, and its config does not say"):
        open_model(str(tmp_path / "packed"), torch.float32)


def test_8_bits_without_a_scale_beside_4_bits_are_refused(tmp_path: Path):
    gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"has '{name}' in 8 bits and no scale"):
        open_model(str(tmp_path / "packed"), torch.float32)


def test_scales_of_4_bits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="have scales of shape"):
        unpack_fours(
            torch.zeros(2, 3, 4, 16, dtype=torch.uint8), torch.zeros(2, 3, 5, dtype=torch.uint8), torch.float32
        )


def test_the_language_model_of_a_multimodal_checkpoint_in_8_bits(tmp_path: Path):
    """As Ministral 3's: names with another prefix, one scale a weight."""
    multimodal("Mistral3", "Ministral3Config", "PixtralVisionConfig").save_pretrained(tmp_path / "dense")
    meant = packed(tmp_path / "dense", tmp_path / "packed", *KINDS["as a whole"])
    blocks = open_source(str(tmp_path / "packed"), CPU).blocks
    for name, weight in blocks.take(1, CPU).named_parameters():
        (stored,) = (each for each in meant if each.endswith(f"layers.1.{name}") and "vision" not in each)
        assert torch.equal(weight, meant[stored]), name
    theirs = open_model(str(tmp_path / "packed"), torch.float32)
    assert torch.equal(
        theirs.get_parameter("model.layers.1.mlp.up_proj.weight"), blocks.take(1, CPU).mlp.up_proj.weight
    )


def test_a_config_that_says_packed_of_plain_files_is_not_followed(
    tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    shutil.copytree(tiny_llama_dir, tmp_path / "said")
    config = json.loads((tiny_llama_dir / "config.json").read_text())
    (tmp_path / "said" / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    settings, states = CompressionConfig(sparsity=0.3, solver="paper", **SMALL), []
    for folder in (tmp_path / "said", tiny_llama_dir):
        model = modegpt.compress(str(folder), small_text_file, settings)
        states.append(model.state_dict())
        assert not any("8 bits" in line for line in model.modegpt_report["warnings"])
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_last_blocks_may_be_smaller():
    weight = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    quantized, scale = by_block(weight)
    assert scale.shape == (3, 2)
    unpacked = unpack(quantized, scale, BLOCK)
    assert torch.equal(unpacked, quantized.float() * _spread(scale, weight))
    # Three bits behind the point: a sixteenth of the value at most, and of the largest in its block below that.
    assert ((unpacked - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 2**9).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_scales_are_of_any_kind(dtype: torch.dtype):
    quantized = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    powers = torch.tensor([[0.5, 2.0], [1.0, 0.25], [2**-20, 4.0]])
    # The bytes of the second kind are the third: exponents with a bias of 127 (OCP Microscaling, version 1.0, E8M0).
    stored = powers.to(torch.float8_e8m0fnu).view(torch.uint8) if dtype == torch.uint8 else powers.to(dtype)
    assert torch.equal(unpack(quantized, stored, BLOCK), unpack(quantized, powers, BLOCK))


@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1)])
def test_scales_of_any_shape(shape: tuple[int, ...]):
    quantized = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    expected = quantized.float() * scale.expand(40, 1) if shape == (40, 1) else quantized.float() * scale.view(-1, 1)
    assert torch.equal(unpack(quantized, scale, None), expected)
    # Several stacked, as of experts that a file holds together.
    stacked = torch.stack([quantized, quantized.float().neg().to(torch.float8_e4m3fn)])
    assert torch.equal(unpack(stacked, torch.stack([scale, scale]), None), torch.stack([expected, -expected]))


def test_a_model_opened_whole_has_the_weights_of_a_run(tiny_llama_dir: Path, tmp_path: Path):
    """transformers takes the 96 rows of an up projection in 64s to be two blocks of 48."""
    about = {**FP8, "weight_block_size": [64, 48]}
    packed(tiny_llama_dir, tmp_path / "packed", lambda weight: by_block(weight, (64, 48)), about, "_scale_inv")
    opened, blocks = open_model(str(tmp_path / "packed")), open_source(str(tmp_path / "packed"), CPU).blocks
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    expected = unpack(tensors[name], tensors[f"{name}_scale_inv"], (64, 48))
    assert torch.equal(opened.get_parameter(name), expected)
    assert torch.equal(blocks.take(1, CPU).mlp.up_proj.weight, expected)
    assert (expected - load_file(tiny_llama_dir / "model.safetensors")[name]).abs().max() < 0.01


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", None])
def test_a_config_without_a_dtype_to_write_in_gives_bfloat16(
    dtype: str | None, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    packed(tiny_llama_dir, tmp_path / "packed", *KINDS["by block"])
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    result = modegpt.compress(str(tmp_path / "packed"), small_text_file, CompressionConfig(sparsity=0.2, **SMALL))
    assert result.dtype == torch.bfloat16


def test_scales_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"a weight of shape \(40, 50\) has scales of shape \(2, 2\)"):
        unpack(torch.zeros(40, 50), torch.ones(2, 2), BLOCK)
    with pytest.raises(ValueError, match="has scales of shape"):
        unpack(torch.zeros(40, 50), torch.ones(3, 2), None)


def test_what_cannot_be_unpacked_is_refused_before_the_run(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    folder, name = tmp_path / "packed", "model.layers.1.mlp.up_proj.weight"
    packed(tiny_llama_dir, folder, *KINDS["by block"])
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def refused(*words: str) -> None:
        out = tmp_path / "out"
        call = ["--calibration", small_text_file, "--samples", 8, "--seq-len", 64]
        assert_refused(command("compress", folder, "--out", out, *call), *words)
        assert not out.exists()

    save_file({k: v for k, v in tensors.items() if k != f"{name}_scale_inv"}, folder / "model.safetensors")
    refused(f"has '{name}' in 8 bits and no scale ('{name}_scale_inv'): fetch it again")
    save_file({**tensors, f"{name}_scale_inv": torch.ones(2, 2)}, folder / "model.safetensors")
    refused(f"'{name}' cannot be unpacked: a weight of shape (96, 64) has scales of shape (2, 2)")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    refused("in 8 bits, and its config does not say how it is quantized")
    for about in (
        {**FP8, "expert_dtype": "fp4"},
        {**CHANNELS, "format": "pack-quantized"},
        {**CHANNELS, "transform_config": {"config_groups": {}}},
        {**CHANNELS, "config_groups": ["Linear"]},
        {"quant_method": "gptq"},
    ):
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
        refused(f"the model is quantized ({about['quant_method']}): give its checkpoint in 16 or 32 bits")
    for block in ([128], "128", {"rows": 128}, [0, 128]):
        (folder / "config.json").write_text(
            json.dumps({**config, "quantization_config": {**FP8, "weight_block_size": block}})
        )
        refused(f"the config's quantization has blocks of {block!r}: give two numbers, rows and columns")
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused("weights in 8 bits are unpacked tensor by tensor, and this model cannot be read so: it has no safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    refused("_scale_inv', and its config does not say how it is quantized")


@pytest.mark.parametrize("lost", ["scales", "config"])
def test_no_command_runs_on_weights_whose_scale_is_not_known(
    lost: str, tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path
):
    folder = tmp_path / "packed"
    packed(tiny_llama_dir, folder, *KINDS["by block"])
    if lost == "scales":
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    else:
        shutil.copy(tiny_llama_dir / "config.json", folder)
    for call in (
        ["eval", folder, "--data", small_text_file, "--seq-len", 64],
        ["generate", folder, "--prompt", "the"],
        ["check", folder, "--weights"],
        ["bench", folder, "--lengths", "64", "--new-tokens", 4],
    ):
        assert_refused(command(*call), "in 8 bits")


def test_bytes_that_are_no_floats_are_not_read_as_numbers(tiny_llama_dir: Path, small_text_file: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "ints")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(96, 64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj.weight' as I8"):
        modegpt.compress(str(folder), small_text_file, CompressionConfig(sparsity=0.1, **SMALL))


def test_an_object_that_is_packed_is_refused(tiny_llama_dir: Path):
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.config.quantization_config = FP8
    with pytest.raises(InputError, match=r"quantized \(fp8\) and is given as an object: give its folder or hub name"):
        modegpt.compress(model, torch.zeros(8, 64, dtype=torch.long), CompressionConfig(sparsity=0.1))


def test_check_knows_it(tiny_llama_dir: Path, tmp_path: Path):
    packed(tiny_llama_dir, tmp_path / "packed", *KINDS["by block"])
    done = command("check", tmp_path / "packed", "--weights")
    assert done.exit_code == 0, done.output
    assert "all passed" in done.output
