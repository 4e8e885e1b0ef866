"""What `modegpt export` makes of a compressed model: transformers' own class, with its logits, in every family."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from modegpt import InputError, stock_model
from modegpt.formats.checkpoint_files import find_tensors
from modegpt.modeling_modegpt import compressed_class

from .conftest import Pair
from .families import Family, tokens
from .helpers import compressed_from

WIDTH = 24
"""Below the width of every family of the suite, and a multiple of 8 for experts."""


def one_width(family: Family) -> list[dict[str, int]]:
    """Ranks as the rule `width` gives them."""
    return [
        {**full, "mlp": full["mlp"] if "mlp" in family.whole_in(layer) else WIDTH * full["mlp"] // family.dims.d_int}
        for layer, full in enumerate(family.full_ranks())
    ]


def reopened(model: PreTrainedModel, folder: Path) -> Any:
    """Save a model and open it as anyone would; every weight must be found."""
    model.save_pretrained(folder)
    opened, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    return opened.eval()


def assert_same_logits(ours: Any, theirs: Any) -> None:
    with torch.no_grad():
        expected, result = ours(tokens()).logits, theirs(tokens()).logits
    # Zeros change the length of a sum and with it the order of its terms: rounding of one operation, grown a
    # hundredfold by three layers. A fifth of it was seen.
    allowed = 100 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(result, expected, rtol=0, atol=allowed)


def test_any_compressed_model_fits_into_its_stock_class_with_zeros(pair: Pair, tmp_path: Path):
    before = {name: tensor.clone() for name, tensor in pair.compressed.state_dict().items()}
    stock = stock_model(pair.compressed)
    assert type(stock) is type(pair.dense)
    assert stock.num_parameters() == pair.dense.num_parameters(), "one of its MLPs is as wide as the dense one"
    assert_same_logits(pair.compressed, reopened(stock, tmp_path))
    after = pair.compressed.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_one_width_fits_without_zeros(pair: Pair, tmp_path: Path):
    compressed = compressed_from(pair.family, pair.dense, one_width(pair.family))
    stock = reopened(stock_model(compressed), tmp_path / "stock")
    if type(stock.config) is type(pair.dense.config):  # not where another family's classes run it
        pair.dense.save_pretrained(tmp_path / "dense")
        # As the family's files have them, experts apart: it is these names that converters and engines read.
        names, expected = (set(find_tensors(tmp_path / name)) for name in ("stock", "dense"))
        assert names == expected
    architecture = pair.family.architecture
    assert type(stock) is type(pair.dense)
    assert_same_logits(compressed, stock)
    architecture.set_mlp_width(narrow := copy.deepcopy(pair.dense.config), WIDTH)
    if architecture.mlp_width(narrow) != WIDTH:
        assert stock.num_parameters() == pair.dense.num_parameters(), "the config has no other width"
        return
    assert architecture.mlp_width(stock.config) == WIDTH
    padded = stock.num_parameters() - compressed.num_parameters()
    if architecture.shared_experts and getattr(pair.dense.config, architecture.shared_experts):
        # An MLP beside experts is so many experts wide: less than one more in each layer that has them.
        layers = pair.family.dims.n_layers - len(pair.family.whole_mlps)
        assert 0 <= padded < layers * 3 * pair.family.dims.d_model * WIDTH
    else:
        assert padded == 0
    assert stock.num_parameters() < pair.dense.num_parameters()


def test_a_dense_model_is_refused(pairs: dict[str, Pair]):
    with pytest.raises(ValueError, match="a LlamaForCausalLM is not a compressed model"):
        stock_model(pairs["llama-tied"].dense)


def test_a_classifier_becomes_a_stock_one(pairs: dict[str, Pair], tmp_path: Path):
    pair = pairs["llama-grouped"]
    pair.compressed.save_pretrained(tmp_path)
    model = compressed_class("LlamaForSequenceClassification").from_pretrained(tmp_path).eval()  # pyright: ignore
    stock: Any = stock_model(model)
    assert type(stock) is LlamaForSequenceClassification
    assert torch.equal(stock.score.weight, model.score.weight)
    assert_same_logits(model, stock)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_has_the_dtype_of_the_model_and_not_of_the_config(pairs: dict[str, Pair], dtype: torch.dtype):
    stock = stock_model(copy.deepcopy(pairs["llama-tied"].compressed).to(dtype))
    assert {parameter.dtype for parameter in stock.parameters()} == {dtype}
    assert stock.config.dtype == dtype


def test_an_adapter_that_is_not_merged_is_refused(pairs: dict[str, Pair]):
    model = copy.deepcopy(pairs["llama-tied"].compressed)
    adapted: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    with pytest.raises(InputError, match="is not a compressed model"):
        stock_model(adapted)
    with pytest.raises(InputError, match=r"do not hold the same weights: 'model.layers.0.*; merge adapters before"):
        stock_model(adapted.get_base_model())
    merged = adapted.merge_and_unload()
    assert_same_logits(merged, stock_model(merged))


def test_what_is_not_in_memory_or_quantized_is_refused(pairs: dict[str, Pair]):
    model = copy.deepcopy(pairs["llama-tied"].compressed)
    model.model.layers[1].to("meta")
    with pytest.raises(InputError, match="a part of the model is not in memory"):
        stock_model(model)
    model = copy.deepcopy(pairs["llama-tied"].compressed)
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(InputError, match=r"the model is quantized \(torchao\): export it before"):
        stock_model(model)
