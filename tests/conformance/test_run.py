"""A whole run on every family: scores, budget, report, what stays whole, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig, GlmMoeDsaConfig, GPT2Config, MptConfig, OlmoConfig

from modegpt.architectures import architecture_of
from modegpt.cache_name import CACHE
from modegpt.checks.tiny import random_model
from modegpt.compress import compress
from modegpt.config import MODULES, CompressionConfig
from modegpt.errors import InputError
from modegpt.inspection import describe
from modegpt.modeling_modegpt import decoder_layers
from modegpt.ranks.whole import allowed_error
from modegpt.running.sizes import layer_sizes

from .conftest import Pair
from .families import LATENT, NO_WIDTH, SIZES, tokens

MLPS = ("mlp", "ffn", "fc2", "shared_mlp", "feed_forward", "block_sparse_moe", "mixer")
"""What gives a block's MLP output, in one family or another; of Granite 4 with experts two of them together."""
SUMS = {"BloomMLP": "dense_4h_to_h", "MptMLP": "down_proj"}
"""MLPs that put out the sum with the residual stream, and what in them puts out what they add."""
WHOLE = ("falcon_h1", "gpt_neo", *(() if CACHE == "cache" else ("gptj", "codegen")))
"""Families whose blocks have a buffer in no file; those of the latter two until transformers 5.23."""
WINDOWS = tokens(rows=6, length=16, seed=3)


def test_modules_stay_whole_where_the_family_needs_it(pair: Pair):
    architecture, dims = pair.family.architecture, pair.family.dims
    for index, block in enumerate(decoder_layers(pair.dense, architecture.describe())):
        assert layer_sizes(block, architecture, dims).whole == pair.family.whole_in(index)


def cosine_loss(before: torch.Tensor, after: torch.Tensor) -> float:
    return 1 - nn.functional.cosine_similarity(before.double(), after.double(), dim=-1).mean().item()


def expected_scores(pair: Pair) -> list[list[float]]:
    """Influence of attention and MLP, from what each adds to the residual stream of the dense model."""
    architecture = pair.family.architecture
    blocks = decoder_layers(pair.dense, architecture.describe())
    seen: dict[nn.Module, Any] = {}
    hooks = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        # Falcon adds the attention's output to the MLP's in place.
        seen[module] = (inputs[0].clone(), (output[0] if isinstance(output, tuple) else output).clone())

    last: dict[nn.Module, list[nn.Module]] = {}
    for block in blocks:
        mixing = [module for module, _as_pair in architecture.mixing(block)]
        mlps = [name for name in MLPS if getattr(block, name, None) not in (None, *mixing)]
        norm = architecture.output_norm(block)
        last[block] = [block.get_submodule(name) if norm is None else norm for name in mlps]
        last[block] = [mlp.get_submodule(SUMS.get(type(mlp).__name__, "")) for mlp in last[block]]
        if hasattr(block, "post_per_layer_input_norm"):  # of what Gemma 4 adds of a token's input of this layer
            last[block].append(block.post_per_layer_input_norm)
        hooks += [module.register_forward_hook(note) for module in (block, *last[block])]
    with torch.no_grad():
        pair.dense(WINDOWS)
    for hook in hooks:
        hook.remove()
    scores = []
    for block in blocks:
        before, after = seen[block]
        added = sum((seen[mlp][1].view(before.shape) for mlp in last[block]), torch.zeros_like(before))
        added = added * getattr(block, "residual_multiplier", getattr(block, "residual_scale", 1.0))
        after = after / getattr(block, "layer_scalar", 1.0)  # by which Gemma 4 multiplies the sum
        if architecture.parallel:
            scores.append([cosine_loss(before, after - added), cosine_loss(before, before + added)])
        else:
            scores.append([cosine_loss(before, after - added), cosine_loss(after - added, after)])
    return scores


def allowed_miss(pair: Pair, sparsity: float) -> float:
    """The share of the blocks' parameters by which whole ranks may miss a sparsity."""
    architecture = pair.family.architecture
    blocks = decoder_layers(pair.dense, architecture.describe())
    sizes = [layer_sizes(block, architecture, pair.family.dims) for block in blocks]
    total = sum(size.total for size in sizes)
    return allowed_error(sparsity * total, sizes) / total


def test_a_run_scores_attention_and_mlp_and_meets_the_budget(pair: Pair):
    config = CompressionConfig(sparsity=0.05, allocation="influence-blocks", batch_size=4, coverage=0)
    compressed = compress(pair.dense, WINDOWS, config)
    report = compressed.modegpt_report
    assert report["parameters"] == {
        "dense": pair.dense.num_parameters(),
        "compressed": compressed.num_parameters(),
    }
    assert report["sparsity"]["blocks"] == pytest.approx(0.05, abs=allowed_miss(pair, 0.05))
    for module in MODULES:
        said = [warning for warning in report["warnings"] if warning.startswith(f"{module} stays whole in every layer")]
        assert bool(said) == (module in pair.family.whole)
    full = pair.family.dims.full_ranks
    for index, layer in enumerate(report["layers"]):
        told, unranked = layer["ranks"], pair.family.unranked_in(index)
        assert {module for module, rank in told.items() if rank is None} == unranked
        assert all(told[module] == full[module] for module in pair.family.whole_in(index) - unranked)
    if pair.family.architecture.adds_mlp:  # else the stream after attention is not what the MLP's output is added to
        scores = torch.tensor(report["allocation"]["scores"])
        # float32 states, read at other places.
        torch.testing.assert_close(scores, torch.tensor(expected_scores(pair)), rtol=0, atol=1e-5)


def test_a_run_allocates_by_the_damage_of_every_module(covered: Pair):
    config = CompressionConfig(sparsity=0.05, allocation="error", batch_size=4)
    report = compress(covered.dense, WINDOWS, config).modegpt_report
    assert report["sparsity"]["blocks"] == pytest.approx(0.05, abs=allowed_miss(covered, 0.05))
    for layer, damages in enumerate(report["allocation"]["scores"]):
        whole = covered.family.whole_in(layer)
        assert all((damage == 0) == (module in whole) for module, damage in zip(MODULES, damages, strict=True))


def test_a_run_from_files_gives_the_bits_of_one_in_memory(pair: Pair, tmp_path: Path):
    """Streamed from shards, block by block, and written layer by layer; `info` then counts what the report says."""
    pair.dense.save_pretrained(tmp_path / "dense")
    config = CompressionConfig(sparsity=0.05, batch_size=4)
    expected = compress(pair.dense, WINDOWS, config)
    written = compress(str(tmp_path / "dense"), WINDOWS, config, out=tmp_path / "out")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(written.state_dict()[name], tensor), name
    whole = [warning for warning in written.modegpt_report["warnings"] if "loaded whole" in warning]
    assert bool(whole) == (pair.family.name in WHOLE)
    found = describe(tmp_path / "out")
    assert [layer["ranks"] for layer in found["layers"]] == [
        layer["ranks"] for layer in written.modegpt_report["layers"]
    ]
    assert found["parameters"] == written.modegpt_report["parameters"]
    assert found["sparsity"]["blocks"] == pytest.approx(written.modegpt_report["sparsity"]["blocks"], abs=1e-12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OlmoConfig(**SIZES, clip_qkv=8.0), "clips .* at 8.0"),
        (MptConfig(attn_config={"clip_qkv": 6.0}), "clips .* at 6.0"),
        (GPT2Config(**NO_WIDTH, add_cross_attention=True), "cross attention"),
        (Gemma4TextConfig(**SIZES, num_kv_shared_layers=3), "num_kv_shared_layers 3, and no more layers"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(config: Any, reason: str):
    with pytest.raises(InputError, match=reason):
        architecture_of(config)


def test_windows_are_no_longer_than_what_layers_pick_for_others():
    """Within that all keys are picked, and no layer needs to be told which; beyond it one would have to be."""
    config = GlmMoeDsaConfig(
        **SIZES, **LATENT, index_topk=16, index_head_dim=16, indexer_types=["full", "shared", "shared"]
    )
    dense, settings = random_model(config), CompressionConfig(sparsity=0.05, solver="paper")
    compress(dense, tokens(rows=2, length=16), settings)
    with pytest.raises(InputError, match=r"windows of 17 tokens.*give --seq-len 16 or less"):
        compress(dense, tokens(rows=2, length=17), settings)
