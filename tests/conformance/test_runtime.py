"""The compressed model as a Python object: copied, pickled, compiled, quantised."""

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StaticCache, pipeline

from modegpt.cache_name import CACHE
from modegpt.modeling_modegpt import decoder_layers
from modegpt.running.sizes import cached_numbers

from .conftest import Pair
from .families import tokens
from .helpers import greedy, run_python


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_copy_and_pickle(covered: Pair):
    expected = logits(covered.compressed, tokens())
    for again in (copy.deepcopy(covered.compressed), pickle.loads(pickle.dumps(covered.compressed))):
        assert type(again) is type(covered.compressed)
        assert torch.equal(logits(again, tokens()), expected)
        with torch.no_grad():
            next(again.parameters()).add_(1.0)
        assert torch.equal(logits(covered.compressed, tokens()), expected), "the copy shares its weights"


def test_a_copy_decodes_by_its_own_rotary_numbers(pairs: dict[str, Pair]):
    """When one token is decoded they are read in one place for all layers."""
    model, ids = pairs["llama-grouped"].compressed, tokens(length=9)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, buffer in again.named_buffers():
            if name.endswith("rope_index"):
                buffer.copy_(buffer.flip(-1))
        assert len(again.model.rotary_emb(torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.long))) == 3
        expected = greedy(again, ids, 5)
        assert not torch.equal(expected, greedy(model, ids, 5)), "the numbers do not matter"
        assert torch.equal(again.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_the_cache_holds_as_many_numbers_a_token_as_is_told(pair: Pair):
    family, blocks = pair.family, decoder_layers(pair.dense, pair.family.architecture.describe())
    told = cached_numbers(blocks, family.architecture, family.dims, family.ranks())
    for name, model in (("dense", pair.dense), ("compressed", pair.compressed)):
        with torch.no_grad():
            layers = model(tokens(rows=1, length=5), use_cache=True)[CACHE].layers
        # Convolutions and states of linear attention do not grow with the text.
        attending = [layer for layer in layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
        found = sum(part[0, :, 0].numel() for layer in attending for part in (layer.keys, layer.values))
        picking = [getattr(layer, "indexer_keys", None) for layer in attending]
        found += sum(keys[0, 0].numel() for keys in picking if keys is not None)
        assert found == told[name], name


def test_a_pickle_opens_in_a_fresh_process(pairs: dict[str, Pair], tmp_path: Path):
    """As `torch.save(model)` and worker processes need it."""
    pair = pairs["qwen2"]
    torch.save({"model": pair.compressed, "logits": logits(pair.compressed, tokens()), "ids": tokens()}, tmp_path / "m")
    code = (
        "import sys, torch; torch.set_num_threads(1); saved = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(saved['model'](saved['ids']).logits, saved['logits'])"
    )
    run_python("-c", code, tmp_path / "m", cache=tmp_path)


def test_compiles_to_one_graph(covered_attending: Pair):
    """The `eager` backend traces as any other and breaks at the same places, without the minutes of code generation."""
    torch._dynamo.reset()
    model = covered_attending.compressed
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    # A second length is traced anew with a symbolic one, which takes as long again: for one family.
    for ids in (tokens(), tokens(length=11))[: 2 if covered_attending.family.name == "llama-grouped" else 1]:
        # Float32 rounding of logits of size 100, should the graph's order of operations differ.
        torch.testing.assert_close(logits(compiled, ids), logits(model, ids), rtol=0, atol=1e-3)


def test_decoding_with_a_static_cache_compiles_to_one_graph(pairs: dict[str, Pair]):
    torch._dynamo.reset()
    model, ids = pairs["qwen2"].compressed, tokens(length=12)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :9], **{CACHE: cache})
        for step in range(9, 12):
            results = [
                run(ids[:, step : step + 1], **{CACHE: cache}).logits
                for run, cache in zip((model, compiled), caches, strict=True)
            ]
            torch.testing.assert_close(*results, rtol=0, atol=1e-3)  # as above


def test_a_moved_model_takes_its_rotary_numbers_along(covered: Pair):
    """Every tensor of the model is a parameter or a buffer, so `.to` and `.half` reach all and leave integers whole."""
    model = copy.deepcopy(covered.compressed).to("meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    loose = [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        # Stock rotary embeddings keep a second reference to their unscaled frequencies.
        and key != "original_inv_freq"
    ]
    assert loose == []
    whole = copy.deepcopy(covered.compressed).half()
    assert all(not buffer.is_floating_point() for name, buffer in whole.named_buffers() if name.endswith("rope_index"))


def test_pipeline(covered: Pair, tokenizer):
    """The text pipeline, which looks at the class's name and config, generates what the model does."""
    run = pipeline("text-generation", model=covered.compressed, tokenizer=tokenizer)
    text = " ".join(f"w{number}" for number in range(5, 14))
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    generated = run(text, max_new_tokens=5, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    assert generated == greedy(covered.compressed, ids, 5)[0].tolist()


def test_a_continuous_batch_gives_the_same_tokens(pairs: dict[str, Pair]):
    """Requests share a cache whose pages have the dense head dim in every layer."""
    pair, prompts = pairs["llama-grouped"], tokens(rows=2, length=9)
    assert {rank["qk"] for rank in pair.family.ranks()} != {pair.family.dims.d_head}, "nothing would be padded"
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)  # for a cache that fills most of the memory
    answers = pair.compressed.generate_batch(prompts.tolist(), settings, small)
    assert len(answers) == len(prompts), "a request failed"
    generated = [answer.generated_tokens for _name, answer in sorted(answers.items())]
    assert generated == greedy(pair.compressed, prompts, 5)[:, 9:].tolist()


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "gpt_neo"])
def test_a_kernel_that_leaves_out_what_is_added_to_the_scores_is_refused(name: str, pairs: dict[str, Pair]):
    """As stock Falcon does; kernels for flash attention and pages know no bias by key, and no mask of a layer's own."""
    model, seen = copy.deepcopy(pairs[name].compressed), []
    attention = decoder_layers(model, pairs[name].family.architecture.describe())[0].get_submodule(
        pairs[name].family.architecture.attention
    )
    attention.register_forward_pre_hook(lambda _m, given, named: seen.append((given, named)), with_kwargs=True)
    model(tokens())
    given, named = seen[0]
    attention.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention by 'flash_attention_2' leaves out"):
        attention(*given, **named)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_weight_only_on_top(pair: Pair, folders: dict[str, Path]):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        folders[pair.family.name], quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    assert any(type(parameter) is not nn.Parameter for parameter in loaded.parameters()), "nothing was quantised"
    expected = logits(pair.compressed, tokens())
    # Rounding weights to 8 bits by row is relative 2^-8 at worst; over three layers it stays within a tenth.
    assert (logits(loaded, tokens()) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma3_text"])
def test_exporting_a_model_leaves_it_as_it_was(name: str, pairs: dict[str, Pair]):
    """One with a rotary embedding, one without, and one with two."""
    model, ids = copy.deepcopy(pairs[name].compressed), tokens(rows=1, length=9)
    before = model.generate(ids, max_new_tokens=3, do_sample=False)
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    assert model.generate(ids, max_new_tokens=3, do_sample=False).tolist() == before.tolist()
    one = torch.export.export(model, (), {"input_ids": ids[:, :1], "use_cache": False})
    with torch.no_grad():
        for program, part in ((exported, ids), (one, ids[:, :1])):
            found = program.module()(input_ids=part, use_cache=False).logits
            torch.testing.assert_close(found, model(part, use_cache=False).logits)
