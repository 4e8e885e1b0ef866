"""Compressed language models back in their multimodal models: the same towers, the same logits, images seen."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

import modegpt
from command_line import modegpt as run_command
from conformance.helpers import run_python
from modegpt.errors import InputError
from modegpt.export.rejoin import rejoin
from modegpt.export.stock import export_stock
from modegpt.inspection import describe
from modegpt.loading.models import open_model
from modegpt.modeling_modegpt import _one_axis
from multimodal import CASES, TOKENS, logits, multimodal

SETTINGS = modegpt.CompressionConfig(sparsity=0.3, samples=8, seq_len=32)
IMAGE = 7
"""The token in whose place an image's hidden states stand."""
LLAVA = next(case for case in CASES if case[0] == "Llava")


def files(whole: PreTrainedModel, folder: Path) -> tuple[str, str, Any]:
    """Write a model and its compressed language model, and return the folders and the latter."""
    whole.save_pretrained(folder / "whole")
    compressed = modegpt.compress(str(folder / "whole"), TOKENS, SETTINGS, out=folder / "small")
    return str(folder / "small"), str(folder / "whole"), compressed


def opened(folder: Path | str) -> Any:
    """Open a multimodal model as anyone would; every weight must be found."""
    model, loading = AutoModelForMultimodalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return model.eval()


def rounding(expected: torch.Tensor) -> float:
    """By how much an export may differ: its zeros change the order of sums (tests/conformance/test_export.py).

    That is the rounding of one operation, grown a hundredfold.
    """
    return 100 * torch.finfo(torch.float32).eps * float(expected.abs().max())


@pytest.mark.parametrize(("outer", "text", "vision"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_it_is_the_compressed_language_model_among_the_same_towers(
    outer: str, text: str, vision: str | None, tmp_path: Path
):
    whole = multimodal(outer, text, vision)
    small, dense, compressed = files(whole, tmp_path)
    told = rejoin(small, dense, tmp_path / "joined")
    joined = opened(tmp_path / "joined")
    assert type(joined).__name__ == told["class"] == f"Modegpt{outer}ForConditionalGeneration"
    assert torch.equal(logits(joined), logits(compressed))
    class_of = joined.config.auto_map["AutoModel"].rpartition(".")[2]
    assert class_of == type(AutoModel.from_pretrained(tmp_path / "joined")).__name__
    if vision is not None:
        assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "joined")) is type(joined)

    inner = joined.config.modegpt["multimodal"]["language_model"]
    own, text_parts = whole.state_dict(), (f"model.{inner}.", "lm_head", "language_model.")  # the last of Llama 4
    towers = {name: tensor for name, tensor in joined.state_dict().items() if not name.startswith(text_parts)}
    assert towers
    assert all(torch.equal(tensor, own[name]) for name, tensor in towers.items())
    n_towers = sum(weight.numel() for name, weight in joined.named_parameters() if name in towers)
    assert told["parameters"]["towers"] == n_towers
    assert told["parameters"]["language_model"] == compressed.num_parameters()

    found = describe(tmp_path / "joined")
    alone = describe(small)
    assert found["layers"] == alone["layers"]
    assert found["parameters"]["compressed"] == alone["parameters"]["compressed"] + n_towers
    assert torch.equal(logits(open_model(str(tmp_path / "joined"))), logits(compressed))

    joined.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(opened(tmp_path / "again")), logits(compressed))

    export_stock(small, tmp_path / "stock")
    if outer == "Idefics2":
        with pytest.raises(
            InputError, match=r"MLPs of its width: 'model\.connector.*shape; give what modegpt compress"
        ):
            rejoin(str(tmp_path / "stock"), dense, tmp_path / "stock-joined")
        return
    assert rejoin(str(tmp_path / "stock"), dense, tmp_path / "stock-joined")["class"] == type(whole).__name__
    expected = logits(compressed)
    assert float((logits(opened(tmp_path / "stock-joined")) - expected).abs().max()) <= rounding(expected)


def pixels(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


def prompt(n_tokens: int) -> dict[str, torch.Tensor]:
    """A text in which so many tokens stand for an image."""
    words = torch.randint(20, 300, (1, 6), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((words[:, :3], torch.full((1, n_tokens), IMAGE), words[:, 3:]), dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


SEEN: dict[str, tuple[dict[str, Any], Callable[[], dict[str, torch.Tensor]]]] = {
    # Its image is seen in both directions, by a mask of its own.
    "Gemma3": (
        {"mm_tokens_per_image": 4},
        lambda: {
            **prompt(4),
            "pixel_values": pixels(1, 3, 28, 28),
            "token_type_ids": (prompt(4)["input_ids"] == IMAGE).long(),
        },
    ),
    "Llava": ({}, lambda: {**prompt(4), "pixel_values": pixels(1, 3, 28, 28)}),
    "InternVL": ({}, lambda: {**prompt(1), "pixel_values": pixels(1, 3, 28, 28)}),
    "SmolVLM": ({}, lambda: {**prompt(1), "pixel_values": pixels(1, 1, 3, 28, 28)}),
    "Llama4": ({}, lambda: {**prompt(1), "pixel_values": pixels(1, 3, 28, 28)}),
    # Positions in three axes, of the image's grid; Qwen 3 VL adds what its tower finds to later layers, too.
    **{
        name: (
            {},
            lambda: {
                **prompt(4),
                "pixel_values": pixels(16, 3 * 2 * 14 * 14),
                "image_grid_thw": torch.tensor([[1, 4, 4]]),
                "mm_token_type_ids": (prompt(4)["input_ids"] == IMAGE).int(),
            },
        )
        for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Glm4v", "Glm46V", "Glm4vMoe")
    },
}
"""What config and inputs need beside a tiny model's sizes."""


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case[0] in SEEN], ids=lambda case: f"{case[0]}-{case[1]}")
def test_it_sees_what_its_stock_form_sees(case: tuple[str, str, str | None], tmp_path: Path):
    """The export has zeros where the compressed model has nothing, and runs by the multimodal model's own code."""
    changes, inputs = SEEN[case[0]]
    if case[0] == "Llama4" and transformers.__version__.startswith("5.24."):
        pytest.skip("its own class asks its language model for images")
    whole = multimodal(*case, image_token_id=IMAGE, **changes)
    for name, weight in whole.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # zeros in a new Gemma 3: every image is the same
            weight.normal_()
    small, dense, _compressed = files(whole, tmp_path)
    rejoin(small, dense, tmp_path / "joined")
    export_stock(small, tmp_path / "stock")
    told = rejoin(str(tmp_path / "stock"), dense, tmp_path / "stock-joined")
    assert told["class"] == type(whole).__name__
    joined, stock = opened(tmp_path / "joined"), opened(tmp_path / "stock-joined")
    assert type(stock) is type(whole)
    image = inputs()
    expected = stock(**image).logits
    allowed = rounding(expected)
    assert float((joined(**image).logits - expected).abs().max()) <= allowed
    other = joined(**{**image, "pixel_values": 1 - image["pixel_values"]}).logits
    assert float((other - expected).abs().max()) > 1e3 * allowed
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(joined.generate(**image, **settings), stock.generate(**image, **settings))


def test_tables_by_axes_are_those_of_a_newer_transformers():
    """In 5.16 Qwen 2 VL's rotary embedding gives one for each axis; here the newer one's own code makes one of them."""
    config = multimodal("Qwen2VL", "Qwen2VLTextConfig", None).config.text_config
    stock = Qwen2VLRotaryEmbedding(config)
    positions = torch.randint(50, (3, 2, 5), generator=torch.Generator().manual_seed(0))
    expected = stock(torch.zeros(2, 5, 32), positions)[0]
    angles = positions[..., None] * stock.inv_freq
    by_axis = torch.cat((angles, angles), dim=-1).cos()
    assert by_axis.shape == (3, *expected.shape)
    torch.testing.assert_close(_one_axis(by_axis, config.rope_parameters["mrope_section"]), expected, rtol=0, atol=1e-6)


def test_tables_that_an_older_transformers_does_not_interleave_are_read_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In 5.16 GLM 4.1V's have each number of all pairs once, and then once more."""
    small, dense, compressed = files(multimodal("Glm4v", "Glm4vTextConfig", None), tmp_path)
    rejoin(small, dense, tmp_path / "joined")

    def older(rotary: Any, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids.expand(3, -1, -1)[0, ..., None].float() * rotary.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(states.dtype), both.sin().to(states.dtype)

    monkeypatch.setattr(Glm4vTextRotaryEmbedding, "forward", older)
    monkeypatch.delattr(Glm4vTextRotaryEmbedding, "recomposition_frequencies")
    assert torch.equal(logits(opened(tmp_path / "joined")), logits(compressed))


def test_transformers_alone_opens_it(tmp_path: Path):
    small, dense, compressed = files(multimodal(*LLAVA), tmp_path)
    rejoin(small, dense, tmp_path / "joined")
    code = (
        "import sys, torch; sys.modules['modegpt'] = None\n"
        "from transformers import AutoModelForImageTextToText as Auto\n"
        f"model = Auto.from_pretrained({str(tmp_path / 'joined')!r}, trust_remote_code=True).eval()\n"
        "ids = torch.arange(8)[None]\n"
        "print(type(model).__name__, model(input_ids=ids).logits.double().sum().item().hex())"
    )
    with torch.no_grad():
        total = compressed(input_ids=torch.arange(8)[None]).logits.double().sum().item()
    assert run_python("-c", code, cache=tmp_path).split() == ["ModegptLlavaForConditionalGeneration", total.hex()]


def test_a_large_one_is_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small, dense, compressed = files(multimodal(*LLAVA), tmp_path)
    monkeypatch.setattr("modegpt.checkpoint.MAX_FILE_BYTES", 0)
    rejoin(small, dense, tmp_path / "joined")
    found = sorted(file.name for file in (tmp_path / "joined").glob("*.safetensors*"))
    assert found == [*(f"model-0000{part}-of-00002.safetensors" for part in (1, 2)), "model.safetensors.index.json"]
    assert torch.equal(logits(opened(tmp_path / "joined")), logits(compressed))


def test_the_command_tells_what_it_wrote_and_copies_what_reads_images(tmp_path: Path):
    small, dense, compressed = files(multimodal(*LLAVA), tmp_path)
    beside = {"preprocessor_config.json": "{}", "chat_template.jinja": "{{ messages }}", "notes.txt": "no"}
    for name, text in beside.items():
        (tmp_path / "whole" / name).write_text(text)
    call = ("rejoin", small, "--with", dense, "--out", str(tmp_path / "joined"))
    result = run_command(*call, "--json", str(tmp_path / "told.json"))
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["class"] == "ModegptLlavaForConditionalGeneration"
    assert f"{told['parameters']['towers']:,} of what stands beside it" in " ".join(result.output.split())
    copied = {file.name for file in (tmp_path / "joined").iterdir()}
    assert {"preprocessor_config.json", "chat_template.jinja", "report.json"} <= copied
    assert "notes.txt" not in copied
    assert run_command(*call).exit_code == 2  # the folder exists
    (reminded,) = [line for line in compressed.modegpt_report["warnings"] if "only the language model is taken" in line]
    assert reminded.endswith("modegpt rejoin puts back what is made of it")
    info = run_command("info", str(tmp_path / "joined"), "--json", "-")
    assert json.loads(info.stdout)["model_type"] == "modegpt_llava"


def edited(source: str, target: Path, **changes: Any) -> None:
    """Write a model again, with another config."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))


def with_weight(folder: Path) -> None:
    """Add a weight to a model that its class has no place for."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.more": torch.zeros(1)}, file, {"format": "pt"})


def without_weight(source: str, target: Path, end: str = "layers.1.mlp.up_proj.weight") -> None:
    """Write a model again, without a weight of it."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}
    assert len(kept) == len(tensors) - 1
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})


def headed(folder: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)


def test_one_that_was_trained_since_gets_back_with_a_warning(tmp_path: Path):
    small, dense, _compressed = files(multimodal(*LLAVA), tmp_path)
    model = open_model(small)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    model.save_pretrained(tmp_path / "trained")
    (warning,) = rejoin(str(tmp_path / "trained"), dense, tmp_path / "joined")["warnings"]
    assert "unless they were trained since, it is another model" in warning
    assert torch.equal(logits(opened(tmp_path / "joined")), logits(model))


def test_a_language_model_in_8_bits_gets_back_unpacked(tmp_path: Path):
    """Ministral 3's files: the language model's weights are packed, its towers' are not."""
    case = next(case for case in CASES if case[1] == "Ministral3Config")
    whole = multimodal(*case)
    whole.save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "whole")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "language_model" in name and name.endswith("proj.weight"):
            scale = tensor.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            tensors[name], tensors[name + "_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), scale
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    about = {"quant_method": "fp8", "activation_scheme": "static"}
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    compressed = modegpt.compress(str(tmp_path / "whole"), TOKENS, SETTINGS, out=tmp_path / "small")
    told = rejoin(str(tmp_path / "small"), str(tmp_path / "whole"), tmp_path / "joined")
    assert told["warnings"] == []
    joined = opened(tmp_path / "joined")
    assert torch.equal(logits(joined), logits(compressed))
    assert not hasattr(joined.config, "quantization_config")

    tower = next(name for name in tensors if "projector" in name and name.endswith("weight"))
    tensors[tower] = tensors[tower].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="in 8 bits, too"):
        rejoin(str(tmp_path / "small"), str(tmp_path / "whole"), tmp_path / "again")


def test_both_may_be_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache that is laid out as the hub's client lays it out; nothing is asked of the network."""
    small, dense, compressed = files(multimodal(*LLAVA), tmp_path)
    (tmp_path / "whole" / "chat_template.jinja").write_text("{{ messages }}")
    for name, folder in {"small": small, "whole": dense}.items():
        place = tmp_path / "hub" / f"models--some--{name}"
        shutil.copytree(folder, place / "snapshots" / ("0" * 40))
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("0" * 40)
    code = "import sys, modegpt; modegpt.rejoin('some/small', 'some/whole', sys.argv[1])"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    run_python("-c", code, tmp_path / "joined", cache=tmp_path)
    assert torch.equal(logits(opened(tmp_path / "joined")), logits(compressed))
    assert (tmp_path / "joined" / "chat_template.jinja").is_file()


@pytest.mark.parametrize(
    ("model", "whole", "reason"),
    [
        ("small", "text", "is of type 'llama', not a dense multimodal one"),
        ("small", "joined", "is of type 'modegpt_llava', not a dense multimodal one"),
        ("whole", "whole", "is multimodal: give the language model"),
        ("joined", "whole", "is multimodal: give the language model"),
        ("small", "wider", "has hidden_size 32, and the language model in '.*wider' 48"),
        ("small", "mistral", "is of type 'llama', and the language model in '.*mistral' of type 'mistral'"),
        ("small", "quantized", "'.*quantized' is quantized"),
        ("headed", "whole", "was saved as a ModegptLlamaForSequenceClassification, and a ModegptLlamaForCausalLM"),
        ("short", "whole", "model '.*short' is broken: the files in .* lack the weight '.*up_proj.weight'"),
        ("long-stock", "whole", "model '.*long-stock' holds 'model.more', which has no place in its class"),
        ("short-stock", "whole", "model '.*short-stock' is broken: its shards store '.*up_proj.weight' under another"),
        ("undescribed", "whole", "the key 'modegpt' in the config of '.*undescribed' is broken"),
        ("adapted", "whole", "model '.*adapted' has an adapter beside its weights"),
        ("small", "cut", "lack 'model.multi_modal_projector.linear_1.weight'"),
    ],
)
def test_what_does_not_belong_together_is_refused(model: str, whole: str, reason: str, tmp_path: Path):
    dense = multimodal(*LLAVA)
    small, folder, _compressed = files(dense, tmp_path)
    made: dict[str, Callable[[Path], object]] = {
        "text": lambda path: open_model(folder).save_pretrained(path),
        "joined": lambda path: rejoin(small, folder, path),
        "headed": lambda path: headed(small).save_pretrained(path),
        "short": lambda path: without_weight(small, path),
        "short-stock": lambda path: (export_stock(small, f"{path}-whole"), without_weight(f"{path}-whole", path)),
        "long-stock": lambda path: (export_stock(small, path), with_weight(path)),
        "undescribed": lambda path: edited(small, path, modegpt={"version": 1, "layers": [{}]}),
        "adapted": lambda path: (shutil.copytree(small, path), (path / "adapter_config.json").write_text("{}")),
        "wider": lambda path: multimodal(*LLAVA, sizes={"hidden_size": 48}).save_pretrained(path),
        "mistral": lambda path: multimodal("Llava", "MistralConfig", LLAVA[2]).save_pretrained(path),
        "quantized": lambda path: edited(
            folder, path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
        ),
        "cut": lambda path: without_weight(folder, path, "linear_1.weight"),
    }
    for name in {model, whole}.intersection(made):
        made[name](tmp_path / name)
    with pytest.raises(InputError, match=reason):
        rejoin(str(tmp_path / model), str(tmp_path / whole), tmp_path / "out")
    assert not (tmp_path / "out").exists()
