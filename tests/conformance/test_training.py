"""A compressed model trains like a stock one: with gradient checkpointing, and with LoRA adapters from PEFT."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import constants
from torch import nn
from transformers import AutoModelForCausalLM

from modegpt.modeling_modegpt import decoder_layers

from .conftest import Pair
from .families import tokens
from .helpers import run_python

BATCH = tokens(rows=4, length=12)
LORA_DEFAULTS = dict(constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
del LORA_DEFAULTS["mixtral"]  # which PEFT loses when it looks for experts among no targets


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)  # PhiMoE draws the experts of its tokens
    model(BATCH, labels=BATCH).loss.backward()
    # The correction of a choice of experts is learned otherwise, and so is what picks the keys to attend to.
    corrections = ("e_score_correction_bias", "expert_bias")
    own = {n: p for n, p in model.named_parameters() if not n.endswith(corrections) and ".indexer." not in n}
    learned = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
    return {name: parameter.grad for name, parameter in learned.items()}


def train(model, steps: int = 3) -> list[float]:
    """Return the loss before each of a few Adam steps on one batch."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(trainable, lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(BATCH, labels=BATCH).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_parameter_has_a_gradient_and_checkpointing_does_not_change_it(covered: Pair):
    model = copy.deepcopy(covered.compressed).train()
    for module in model.modules():
        # Dropout (OPT's default is 0.1) draws its masks anew in each run.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "residual_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    plain = {name: gradient.clone() for name, gradient in gradients(model).items()}
    assert [name for name, gradient in plain.items() if not gradient.abs().sum() > 0] == []
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    for name, gradient in gradients(model).items():
        # The same operations; but the parts of a tied weight's gradient may be added in another order (float32).
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5 * plain[name].abs().max().item())


def test_full_fine_tuning_lowers_the_loss_and_is_saved(covered: Pair, tmp_path: Path):
    model = copy.deepcopy(covered.compressed)
    losses = train(model)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(BATCH).logits, model(BATCH).logits)


def test_lora(covered: Pair, folders: dict[str, Path], tmp_path: Path):
    """Of every projection."""
    architecture = covered.family.architecture
    linears = architecture.linears(decoder_layers(covered.compressed, architecture.describe())[0])
    modules = sorted({n.rsplit(".")[-1] for n, module in covered.compressed.named_modules() if module in linears})
    targets: dict[str, Any] = {"target_modules": modules}
    if not modules:  # there are experts alone, whose fused weights are no modules
        targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **targets)
    train_and_merge(covered, folders[covered.family.name], settings, tmp_path)


def test_lora_of_what_peft_takes_by_default(covered: Pair, folders: dict[str, Path], tmp_path: Path):
    """What that is, every family is asked below."""
    if covered.dense.config.model_type not in LORA_DEFAULTS:
        pytest.skip("PEFT has no defaults for the dense family")
    settings = peft.LoraConfig(r=2, task_type="CAUSAL_LM")
    train_and_merge(covered, folders[covered.family.name], settings, tmp_path)


def adapted(model: Any) -> set[str]:
    """Return the weights that an adapter trains beside a model's own."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("mixtral", ["q_proj", "w1", "w2", "w3"]),
        ("qwen3_moe", ["v_proj", "gate_proj", "up_proj", "down_proj"]),
        ("deepseek_v3", "all-linear"),
        ("granitemoe", "all-linear"),  # whose experts PEFT does not know
    ],
)
def test_lora_reaches_the_experts_that_peft_knows(
    pairs: dict[str, Pair], folders: dict[str, Path], tmp_path: Path, name: str, targets: Any
):
    """It does so by the model type: the experts are fused, and no linear modules."""
    settings = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    expected = adapted(peft.get_peft_model(copy.deepcopy(pairs[name].dense), copy.deepcopy(settings)))
    assert any(".experts." in weight for weight in expected) == (name != "granitemoe")
    model = train_and_merge(pairs[name], folders[name], settings, tmp_path)
    assert adapted(model) == expected


def train_and_merge(pair: Pair, folder: Path, settings: peft.LoraConfig, tmp_path: Path) -> Any:
    """Train an adapter of the model in `folder`, save, load and merge it; return the trained model."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings)
    with torch.no_grad():
        # LoRA's second matrix starts at zero, so the adapter begins as the identity.
        assert torch.equal(model(BATCH).logits, pair.compressed(BATCH).logits)
    losses = train(model)
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        expected = model(BATCH).logits
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(BATCH).logits, expected)
    assert again.peft_config["default"].base_model_name_or_path == str(folder)

    merged = again.merge_and_unload()
    assert type(merged) is type(pair.compressed)
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        # Merging adds the adapter to the weights first: float32 rounding of logits of size 100.
        torch.testing.assert_close(reloaded(BATCH).logits, expected, rtol=1e-4, atol=1e-3)
    return model


def test_the_defaults_are_those_of_the_dense_family(pair: Pair):
    dense = type(pair.dense).config_class.model_type
    for settings, known in (
        (peft.LoraConfig, LORA_DEFAULTS),
        (peft.IA3Config, constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING),
    ):
        if dense in known:
            adapter = peft.get_peft_model(copy.deepcopy(pair.compressed), settings(task_type="CAUSAL_LM"))
            assert set(adapter.peft_config["default"].target_modules) == set(known[dense])
        else:
            with pytest.raises(ValueError, match="target_modules"):
                peft.get_peft_model(copy.deepcopy(pair.compressed), settings(task_type="CAUSAL_LM"))


@pytest.mark.parametrize("peft_first", [True, False])
def test_the_defaults_do_not_depend_on_the_order_of_imports(folders: dict[str, Path], tmp_path: Path, peft_first: bool):
    """In a fresh process, with the code of the checkpoint; and PEFT, which is slow to import, is left alone."""
    code = f"""
import sys
{"import peft" if peft_first else ""}
from transformers import AutoModelForCausalLM
load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model, mixture = load({str(folders["qwen2"])!r}), load({str(folders["mixtral"])!r})
assert ("peft" in sys.modules) == {peft_first}
assert "modegpt" not in sys.modules
import peft
print(sorted(peft.get_peft_model(mixture, peft.LoraConfig(target_modules=["w1", "w2", "w3"])).targeted_parameter_names))
print(sorted(peft.get_peft_model(model, peft.LoraConfig()).peft_config["default"].target_modules))
"""
    printed = run_python("-c", code, cache=tmp_path)
    # Below it may stand PEFT's own deprecation warnings.
    experts, defaults = printed.splitlines()[:2]
    assert defaults == "['q_proj', 'v_proj']"
    assert "model.layers.2.mlp.experts.gate_up_proj" in experts
