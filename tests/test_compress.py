"""The run, end to end on small random models in the process."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from psutil import Process, virtual_memory
from torch.nn.utils import prune
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import modegpt
from modegpt import CompressionConfig, InputError, NumericalError
from modegpt.running.source import open_source


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


def windows(samples: int = 12, seq_len: int = 16, vocab: int = 64) -> torch.Tensor:
    return torch.randint(vocab, (samples, seq_len), generator=torch.Generator().manual_seed(1))


def test_sparsity_zero_returns_the_dense_model_bit_for_bit():
    model = tiny_llama()
    compressed = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.0))
    ids = windows(2)
    with torch.no_grad():
        assert torch.equal(compressed(ids).logits, model(ids).logits)
    assert compressed.modegpt_report["sparsity"] == {"requested": 0.0, "blocks": 0.0, "total": 0.0}


def test_the_dense_model_is_left_as_it_was():
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modegpt.compress(model, windows(), CompressionConfig(sparsity=0.5))
    assert type(model) is LlamaForCausalLM
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_identity_of_a_model_in_memory_feels_every_weight(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("modegpt.running.source._PIECE", 100)  # several of each matrix
    model, cpu = tiny_llama(), torch.device("cpu")
    before = open_source(model, cpu).identity
    assert open_source(tiny_llama(), cpu).identity == before
    for parameter in model.parameters():
        kept = parameter.data.view(-1)[-1].clone()
        parameter.data.view(-1)[-1] += 1e-3
        assert open_source(model, cpu).identity != before
        parameter.data.view(-1)[-1] = kept
    assert open_source(model, cpu).identity == before


@pytest.mark.parametrize("modules", [("mlp",), ("qk",), ("vo",), ("mlp", "qk", "vo")])
def test_the_report_tells_what_the_model_is(modules):
    model, resident, start = tiny_llama(), Process().memory_info().rss, time.perf_counter()
    compressed = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, modules=modules))
    report, passed = compressed.modegpt_report, time.perf_counter() - start
    full = {"mlp": 48, "qk": 8, "vo": 8}
    uniform = {"mlp": 36, "qk": 6, "vo": 6}
    expected = {name: uniform[name] if name in modules else full[name] for name in full}
    for layer, block in zip(report["layers"], compressed.model.layers, strict=True):
        assert layer["ranks"] == expected
        assert block.mlp.down_proj.weight.shape == (32, expected["mlp"])
        assert block.self_attn.q_proj.weight.shape == (4 * expected["qk"], 32)
        assert block.self_attn.v_proj.weight.shape == (2 * expected["vo"], 32)
        for name in full:
            assert (layer["error"][name] > 0) == (name in modules)
            assert layer["error"][name] < 1
    dense = sum(parameter.numel() for parameter in model.parameters())
    kept = sum(parameter.numel() for parameter in compressed.parameters())
    assert report["parameters"] == {"dense": dense, "compressed": kept}
    assert report["sparsity"]["total"] == (dense - kept) / dense
    in_blocks = sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert report["sparsity"]["blocks"] == (dense - kept) / in_blocks
    seconds = report["seconds"]
    assert {"load", "embed", "moments", "decompose", "forward", "total"} <= seconds.keys()
    stages = [value for stage, value in seconds.items() if stage != "total"]
    # Each is rounded to a millisecond.
    assert sum(stages) - 0.0005 * (len(stages) + 1) <= seconds["total"] <= passed + 0.0005
    # The kernel counts pages lazily, so what it says of now and of the most differs by some.
    assert 0.9 * resident < report["peak_memory_bytes"] < virtual_memory().total
    assert report["warnings"] == [
        f"{name} stays whole, as it is not among the modules to compress: nothing makes up for it under 'uniform'"
        for name in full
        if name not in modules
    ]
    json.dumps(report)


def test_influence_hits_the_budget_and_gives_important_layers_more():
    # Units of rank are coarse in a model this small: the budget holds within one step of the largest module.
    model = tiny_llama(num_hidden_layers=4, intermediate_size=96)
    config = CompressionConfig(sparsity=0.3, allocation="influence", temperature=0.05)
    report = modegpt.compress(model, windows(), config).modegpt_report
    scores = report["allocation"]["scores"]
    sparsities = [layer["sparsity"] for layer in report["layers"]]
    assert max(range(4), key=scores.__getitem__) == min(range(4), key=sparsities.__getitem__)
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    largest_step = (4 + 2) * 32 * 2
    assert abs(report["sparsity"]["blocks"] - 0.3) * 4 * block <= largest_step


def test_opt_with_its_biases_compresses():
    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    compressed = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25))
    attention = compressed.model.decoder.layers[0].self_attn
    assert attention.k_proj.bias.shape == attention.k_proj.weight.shape[:1] == (4 * 6,)
    assert attention.out_proj.bias.shape == (32,)
    assert compressed.model.decoder.layers[0].fc1.bias.shape == (48,)


def test_more_text_than_one_batch_gives_the_same_ranks_and_weights():
    model = tiny_llama()
    one = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, batch_size=12))
    many = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, batch_size=5))
    for (name, left), right in zip(one.state_dict().items(), many.state_dict().values(), strict=True):
        # float32 products of other batch shapes round differently; the solves amplify by the moments' condition.
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4, msg=name)


def test_a_folder_in_a_folder_out(tiny_llama_dir: Path, tmp_path: Path):
    out = tmp_path / "small"
    config = CompressionConfig(sparsity=0.25, samples=4, seq_len=32)
    compressed = modegpt.compress(tiny_llama_dir, "python-docs", config, out=out)
    assert not out.with_name("small.partial").exists()
    report = json.loads((out / "report.json").read_text())
    assert report["sparsity"] == compressed.modegpt_report["sparsity"]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("Some text.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, compressed(ids).logits)
    with pytest.raises(InputError, match="exists"):
        modegpt.compress(tiny_llama_dir, "python-docs", config, out=out)
    modegpt.compress(tiny_llama_dir, "python-docs", config, out=out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


def test_nan_in_the_weights_names_layer_and_matrix_and_leaves_nothing(tmp_path: Path):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(NumericalError, match=r"layer 1: .*mlp\.up_proj\.weight"):
        modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25), out=tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("solver", ["paper", "best"])
def test_nan_outside_the_blocks_is_named_before_any_work(solver: str, name: str, tmp_path: Path):
    model, seen = tiny_llama(), []
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = float("nan")
    with pytest.raises(NumericalError, match=f"NaN or infinity in '{name}'"):
        modegpt.compress(
            model, windows(), CompressionConfig(solver=solver), out=tmp_path / "a", progress=lambda *a: seen.append(a)
        )
    assert not seen
    assert list(tmp_path.iterdir()) == []


def test_the_config_of_a_model_in_memory_is_left_as_it_was():
    model = tiny_llama()
    model.config.dtype = None
    before = model.config.to_dict()
    modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25))
    assert model.config.to_dict() == before


def test_the_dtype_is_that_of_the_weights_whatever_the_config_says():
    config = CompressionConfig(sparsity=0.0)
    narrow = tiny_llama().bfloat16()
    narrow.config.dtype = torch.float32
    assert modegpt.compress(narrow, windows(), config).dtype == torch.bfloat16
    wide = tiny_llama()
    wide.config.dtype = torch.bfloat16
    found = modegpt.compress(wide, windows(), config)
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in wide.state_dict().items())


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "lm_head.weight"])
def test_a_weight_that_float16_cannot_hold_is_refused(name: str, tmp_path: Path):
    model = tiny_llama()
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = 1e5
    config = CompressionConfig(sparsity=0.0, dtype="float16")
    with pytest.raises(NumericalError, match=f"'{name}' is too large for float16: ask for bfloat16 or float32"):
        modegpt.compress(model, windows(), config, out=tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_a_refit_that_float32_cannot_hold_names_its_layer():
    model = tiny_llama()
    mlp = model.model.layers[2].mlp
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight[:] = weight[:1].clone()  # neurons alike: those that stay take over what the others gave
        mlp.down_proj.weight.fill_(3.3e38)
    with pytest.raises(NumericalError, match="layer 2: the decomposition produced NaN or infinity"):
        modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, solver="paper", modules=("mlp",)))


def test_infinite_activations_name_layer_and_matrix():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.mul_(1e25)  # keys are finite, and their squares are not
    with pytest.raises(NumericalError, match="layer 2: NaN or infinity in the key states"):
        modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, solver="paper"))
    # `best` takes what keys differ by, which is finite, until the model itself overflows.
    modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25))
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(1e25)
    with pytest.raises(NumericalError, match="NaN or infinity in the gradients of the logits"):
        modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, coverage=0))


@pytest.mark.parametrize(
    ("n_kv_heads", "expected"),
    [
        (2, [(0.229281, 0.446337, 0.296796), (0.270802, 0.414345, 0.285925), (0.29383, 0.40666, 0.256162)]),
        (4, [(0.234901, 0.392529, 0.222403), (0.274326, 0.408147, 0.223989), (0.283964, 0.382133, 0.220254)]),
    ],
)
def test_the_papers_solvers_give_what_they_gave_when_there_were_no_others(n_kv_heads, expected):
    model = tiny_llama(num_key_value_heads=n_kv_heads)
    report = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, solver="paper")).modegpt_report
    for layer, errors in zip(report["layers"], expected, strict=True):
        # Written with six digits; float32 rounding differs between machines.
        assert tuple(layer["error"].values()) == pytest.approx(errors, abs=1e-5)


def test_each_module_takes_the_solver_it_was_given():
    def first_errors(**settings: object) -> dict[str, float]:
        # One coverage and one weighting for all, so that the first layer has the same moments whatever the solvers.
        config = CompressionConfig(sparsity=0.25, coverage=0, rarity=0, **settings)
        return modegpt.compress(tiny_llama(num_hidden_layers=1), windows(), config).modegpt_report["layers"][0]["error"]

    paper, best = first_errors(solver="paper"), first_errors(solver="best")
    mixed = first_errors(solver="best", qk_solver="cr", mlp_solver="leverage")
    assert mixed == {"mlp": paper["mlp"], "qk": paper["qk"], "vo": best["vo"]}
    mixed = first_errors(solver="paper", vo_solver="context", mlp_solver="energy")
    assert (mixed["qk"], mixed["vo"]) == (paper["qk"], best["vo"])
    # Energy reads the MLP behind the compressed attention, which is another one.
    assert mixed["mlp"] not in (paper["mlp"], best["mlp"])


def test_feedback_brings_the_model_nearer_to_the_dense_one():
    model = tiny_llama()

    def run(**settings: object) -> LlamaForCausalLM:
        # By energies: in a random model the choice by saliencies has a chance that outweighs what is tested.
        config = CompressionConfig(sparsity=0.25, modules=("mlp",), mlp_solver="energy", **settings)
        return modegpt.compress(model, windows(), config)

    default, fed, alone = run(), run(feedback=True), run(feedback=False)
    pairs = zip(default.state_dict().values(), fed.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    ids = windows()
    with torch.no_grad():
        dense = model.model(ids).last_hidden_state
        drifts = [(each.model(ids).last_hidden_state - dense).norm() for each in (fed, alone)]
    assert drifts[0] < drifts[1]
    assert not CompressionConfig(solver="paper").feeds_back
    assert CompressionConfig(solver="paper", mlp_solver="energy").feeds_back
    assert not CompressionConfig(modules=("qk",)).feeds_back
    assert not CompressionConfig(feedback=0).feeds_back  # a zero of a settings file is a no, too


def test_best_adds_coverage_and_paper_does_not():
    model = tiny_llama(num_hidden_layers=1)

    def weights(**settings: object) -> torch.Tensor:
        config = CompressionConfig(sparsity=0.25, modules=("mlp",), **settings)
        return modegpt.compress(model, windows(), config).model.layers[0].mlp.down_proj.weight

    assert torch.equal(weights(solver="paper"), weights(solver="paper", coverage=0))
    assert torch.equal(weights(solver="best"), weights(solver="best", coverage=0.1875))
    assert not torch.equal(weights(solver="best"), weights(solver="best", coverage=0))
    assert not torch.equal(weights(solver="paper"), weights(solver="paper", coverage=0.25))
    assert CompressionConfig(solver="best").coverage_share == 0.1875
    assert CompressionConfig(solver="best", coverage=0).coverage_share == 0
    assert CompressionConfig(solver="paper").coverage_share == 0


def test_dead_neurons_are_dropped_first_and_reported():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:12] = 0
    compressed = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25, modules=("mlp",)))
    report = compressed.modegpt_report
    # Nothing that spoke was dropped: what is left is the root of the float32 rounding of sums, 2^-24.
    assert report["layers"][0]["error"]["mlp"] < 2**-12
    assert any("layer 0, mlp: 12 neurons are zero" in warning for warning in report["warnings"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0 is outside \[0, 1\)"),
        ({"sparsity": -0.1}, r"outside \[0, 1\)"),
        ({"sparsity": float("nan")}, r"outside \[0, 1\)"),
        ({"modules": ()}, "modules is empty"),
        ({"modules": ("mpl",)}, "modules 'mpl' is unknown; allowed: mlp, qk, vo"),
        ({"sampling": "all"}, "allowed: random, sequential"),
        ({"samples": 0}, "samples 0 is not a positive"),
        ({"temperature": 0.0}, "temperature"),
        ({"dtype": "int8"}, "allowed: auto, float32"),
        ({"solver": "good"}, "solver 'good' is unknown; allowed: paper, best"),
        ({"mlp_solver": "cr"}, "mlp_solver 'cr' is unknown; allowed: leverage, energy"),
        ({"qk_solver": "svd"}, "qk_solver 'svd' is unknown; allowed: cr, logits"),
        ({"vo_solver": "best"}, "vo_solver 'best' is unknown; allowed: svd, context"),
        ({"feedback": True, "solver": "paper"}, "feedback needs the MLP solver 'saliency' or 'energy'"),
        ({"rarity": -0.5}, r"rarity -0\.5 is outside \[0, 1\]"),
        ({"coverage": 1.5}, r"coverage 1\.5 is outside \[0, 1\]"),
        ({"coverage": float("nan")}, "coverage nan is outside"),
        ({"coverage": "x"}, "coverage 'x' is no number"),
        ({"sparsity": "0.3"}, "sparsity '0.3' is no number"),
        ({"samples": None}, "samples None is no whole number"),
        ({"modules": "mlp"}, "modules is the text 'mlp': give a sequence"),
        (
            {"allocation": "plan", "plan": [{"mlp": torch.tensor(4)}]},
            r"layer 0: mlp has rank tensor\(4\), which is no number",
        ),
        ({"round_to": 2.5}, "round_to 2.5 is no whole number"),
        ({"temperature": None}, "temperature None is neither"),
        ({"allocation": "plan", "plan": (3, 4)}, "no sequence of ranks by layer"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(InputError, match=message):
        CompressionConfig(**settings)


def test_wrong_calls_are_refused_before_work():
    model = tiny_llama()
    with pytest.raises(InputError, match="positions"):
        modegpt.compress(model, windows(2, 65), CompressionConfig())
    with pytest.raises(InputError, match="needs its tokenizer"):
        modegpt.compress(model, "python-docs", CompressionConfig(samples=2, seq_len=16))
    for tokens in (torch.zeros(4), torch.zeros(2, 16), windows().bool(), windows()[:0], windows()[:, :0]):
        with pytest.raises(InputError, match=r"\(samples, seq_len\) token ids"):
            modegpt.compress(model, tokens, CompressionConfig())
    with pytest.raises(InputError, match="of type list"):
        modegpt.compress(model, windows().tolist(), CompressionConfig())
    with pytest.raises(InputError, match=r"config is of type dict; give a modegpt\.CompressionConfig"):
        modegpt.compress(model, windows(), {"sparsity": 0.3})  # pyright: ignore[reportArgumentType]
    for tokens in (windows() - 1, windows() + 1):
        with pytest.raises(InputError, match=r"has tokens from -?\d+ to \d+, and the model has 64"):
            modegpt.compress(model, tokens, CompressionConfig())
    compressed = modegpt.compress(model, windows(), CompressionConfig(sparsity=0.25))
    with pytest.raises(InputError, match="already compressed"):
        modegpt.compress(compressed, windows(), CompressionConfig())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("rule", ["uniform", "influence-blocks", "owl"])
def test_token_ids_of_any_integers(dtype: torch.dtype, rule: str):
    config = CompressionConfig(sparsity=0.3, allocation=rule)
    expected = modegpt.compress(tiny_llama(), windows(), config).state_dict()
    found = modegpt.compress(tiny_llama(), windows().to(dtype), config).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_what_is_no_causal_language_model_in_memory_is_refused(tmp_path: Path):
    def refused(model: Any, message: str) -> None:
        for out in (None, tmp_path / "out"):
            with pytest.raises(InputError, match=message):
                modegpt.compress(model, windows(), out=out)

    config, adapted = tiny_llama().config, get_peft_model(tiny_llama(), LoraConfig(r=2))
    refused(torch.nn.Linear(2, 2), "of type Linear")
    refused(adapted, "of type PeftModel.*merge_and_unload")
    refused(adapted.get_base_model(), "holds adapters")
    refused(AutoModel.from_config(config), "of type LlamaModel, which has no language head")
    refused(AutoModelForSequenceClassification.from_config(config), "has no language head")
    refused(tiny_llama().to("meta"), "not all weights of the model are in memory")


def pruned(model: LlamaForCausalLM) -> None:
    prune.l1_unstructured(model.model.layers[1].mlp.up_proj, "weight", amount=0.3)


def biased(model: LlamaForCausalLM) -> None:
    model.model.layers[1].mlp.down_proj.bias = torch.nn.Parameter(torch.ones(32))


def shorter(model: LlamaForCausalLM) -> None:
    del model.model.layers[1]


def narrower(model: LlamaForCausalLM) -> None:
    model.model.layers[2].mlp.up_proj = torch.nn.Linear(32, 24, bias=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (pruned, r"'model\.layers\.1\.mlp\.up_proj\.weight' is not there, and by the config of shape \(48, 32\)"),
        (biased, r"down_proj\.bias' is of shape \(32,\), and by the config not there"),
        (shorter, r"'model\.layers\.2\..* is not there"),
        (narrower, r"up_proj\.weight' is of shape \(24, 32\), and by the config of shape \(48, 32\)"),
    ],
)
def test_a_model_in_memory_with_other_tensors_than_its_config_says_is_refused(
    change: Callable[[LlamaForCausalLM], None], told: str, tmp_path: Path
):
    model = tiny_llama()
    change(model)
    for out in (None, tmp_path / "out"):
        with pytest.raises(InputError, match=told):
            modegpt.compress(model, windows(), CompressionConfig(sparsity=0.0), out=out)
    assert list(tmp_path.iterdir()) == []


def test_generation_settings_that_cannot_be_saved_are_refused_before_the_work(tmp_path: Path):
    model, seen = tiny_llama(), []
    model.generation_config.temperature = 0.7  # without sampling
    with pytest.raises(InputError, match=r"does not save the model's generation_config: .*temperature"):
        modegpt.compress(model, windows(), out=tmp_path / "out", progress=lambda *a: seen.append(a))
    assert not seen
    assert list(tmp_path.iterdir()) == []
    assert modegpt.compress(model, windows()).generation_config.temperature == 0.7


def test_an_output_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be made \(.*\): choose another output"):
        modegpt.compress(tiny_llama(), windows(), out=tmp_path / "file" / "out")


def test_no_folder_is_replaced_that_the_model_in_memory_or_the_text_comes_from(tmp_path: Path):
    tiny_llama().save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    with pytest.raises(InputError, match="holds the model"):
        modegpt.compress(model, windows(), out=tmp_path / "dense", overwrite=True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "own.txt").write_text("A text of its own.")
    with pytest.raises(InputError, match="holds the calibration text"):
        modegpt.compress(tiny_llama(), tmp_path / "texts" / "own.txt", out=tmp_path / "texts", overwrite=True)
    assert (tmp_path / "texts" / "own.txt").exists()


def test_numbers_of_numpy_and_names_of_torch_are_settings_like_others(tmp_path: Path):
    settings = {"sparsity": 0.25, "samples": 4, "seed": 3, "batch_size": 2, "temperature": 0.5}
    ranks = {"mlp": 24, "qk": 4, "vo": 4}
    plain = CompressionConfig(**settings, dtype="bfloat16", device="cpu", allocation="plan", plan=(ranks,) * 3)
    of_numpy = {name: np.asarray(value)[()] for name, value in settings.items()}
    assert all(isinstance(value, np.generic) for value in of_numpy.values())
    other = CompressionConfig(
        **of_numpy, dtype=torch.bfloat16, device=torch.device("cpu"), allocation="plan",  # type: ignore[arg-type]
        plan=tuple({module: np.int64(rank) for module, rank in ranks.items()} for _ in range(3)),
    )  # fmt: skip
    assert other == plain
    modegpt.compress(tiny_llama(), windows(), other, out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["config"] == json.loads(
        json.dumps(plain.as_dict())
    )


def test_the_default_device_of_the_process_changes_nothing():
    """As a notebook may set one: what is made on the meta device has no numbers, so that any use of it would fail."""
    model, calibration, ids = tiny_llama(), windows(), windows(2)
    compressed = modegpt.compress(model, calibration, CompressionConfig(sparsity=0.25))
    found = modegpt.perplexity(compressed, ids.flatten(), 16)
    with torch.device("meta"):
        again = modegpt.compress(model, calibration, CompressionConfig(sparsity=0.25))
        assert modegpt.perplexity(again, ids.flatten(), 16) == found
        stock = modegpt.stock_model(again)
    assert {parameter.device.type for parameter in stock.parameters()} == {"cpu"}
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in compressed.state_dict().items())
