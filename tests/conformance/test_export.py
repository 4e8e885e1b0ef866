"""What `modegpt export` makes of a compressed model: transformers' own class, with its logits, in every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from modegpt import stock_model

from .conftest import Pair
from .families import Family, tokens
from .helpers import compressed_from, run_python

WIDTH = 24
"""Below the width of every family of the suite, and a multiple of 8 for experts."""


def one_width(family: Family) -> list[dict[str, int]]:
    """Ranks as the rule `width` gives them."""
    return [
        {**full, "mlp": full["mlp"] if "mlp" in family.whole_in(layer) else WIDTH}
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
    stock = reopened(stock_model(compressed), tmp_path)
    architecture = pair.family.architecture
    assert type(stock) is type(pair.dense)
    assert architecture.mlp_width(stock.config) == WIDTH
    assert_same_logits(compressed, stock)
    padded = stock.num_parameters() - compressed.num_parameters()
    if architecture.shared_experts and getattr(pair.dense.config, architecture.shared_experts):
        # An MLP beside experts is so many experts wide: less than one more in each layer that has them.
        layers = pair.family.dims.n_layers - pair.family.whole_mlps
        assert 0 <= padded < layers * 3 * pair.family.dims.d_model * WIDTH
    else:
        assert padded == 0
    assert stock.num_parameters() < pair.dense.num_parameters()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_stand_apart_in_the_files_as_in_those_of_the_dense_model(pairs: dict[str, Pair], name: str, tmp_path):
    pair = pairs[name]
    stock = stock_model(compressed_from(pair.family, pair.dense, one_width(pair.family)))
    listed = []
    for folder, model in (("stock", stock), ("dense", pair.dense)):
        model.save_pretrained(tmp_path / folder)
        code = (
            "import sys; from safetensors import safe_open\n"
            "with safe_open(sys.argv[1], framework='pt') as file: print(sorted(file.keys()))"
        )
        listed.append(run_python("-c", code, tmp_path / folder / "model.safetensors", cache=tmp_path))
    assert listed[0] == listed[1]
    assert ".experts.0." in listed[0]


def test_a_dense_model_is_refused(pairs: dict[str, Pair]):
    with pytest.raises(ValueError, match="a LlamaForCausalLM is not a compressed model"):
        stock_model(pairs["llama-tied"].dense)
