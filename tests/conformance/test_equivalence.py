"""The compressed model computes what the dense model would with the dropped coordinates zeroed."""

import copy
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import CohereConfig, Gemma3TextConfig, GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2MoeConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from modegpt.architectures.access import Layout, affine
from modegpt.modeling_modegpt import compressed_class, decoder_layers
from modegpt.running.sizes import layer_sizes

from .conftest import Pair
from .families import EXPERTS, GROUPED, LLAMA_3, SIZES, WINDOW, Family, tokens
from .helpers import compressed_from, densify, in_float64


def kernels(pair: Pair) -> tuple[str, ...]:
    """The attention kernels of torch that the stock family runs on."""
    return ("eager", "sdpa") if pair.dense._supports_sdpa else ("eager",)


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_ranks_leave_the_logits_alone(pair: Pair, dtype: torch.dtype):
    full = compressed_from(pair.family, pair.dense, pair.family.full_ranks()).to(dtype)
    for implementation in kernels(pair):
        dense = copy.deepcopy(pair.dense).to(dtype)
        dense.set_attn_implementation(implementation)
        full.set_attn_implementation(implementation)
        result, expected = logits(full, tokens()), logits(dense, tokens())
        if pair.family.same_bits:
            # The same operations on the same numbers, in the same order.
            assert torch.equal(result, expected)
        else:
            # Rounding of one operation, grown a hundredfold by three layers.
            allowed = 100 * torch.finfo(dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(result, expected, rtol=0, atol=allowed)


def test_equals_the_dense_model_with_dropped_coordinates_zeroed(pair: Pair):
    compressed = in_float64(pair.compressed)
    dense = densify(pair.family, compressed, pair.dense)
    expected = logits(dense, tokens())
    torch.testing.assert_close(logits(compressed, tokens()), expected, rtol=0, atol=pair.family.exact)
    assert (expected - logits(in_float64(pair.dense), tokens())).abs().max() > 0.1, "nothing was dropped"


def test_query_and_key_rows_are_the_dense_ones_at_their_places(pair: Pair):
    """With the test above: what was kept are the dense model's own coordinates at their own frequencies."""
    if pair.family.architecture.whole_attention:
        pytest.skip("queries and keys stay whole")
    if not pair.family.architecture.rotary:
        pytest.skip("unrotated coordinates may stand anywhere, so their places are not stored")
    architecture, dims = pair.family.architecture, pair.family.dims
    dense = decoder_layers(pair.dense, architecture.describe())
    # The paper's solver selects rows; the default one turns them as well.
    compressed = compressed_from(pair.family, pair.dense, pair.family.ranks(), solver="paper")
    widened = decoder_layers(densify(pair.family, compressed, pair.dense), architecture.describe())
    for source, target in zip(dense, widened, strict=True):
        own = architecture.block_dims(source, dims)  # a block without a rotary embedding has no such rows
        layout = Layout.dense(architecture, own)
        for role in ("query", "key"):
            original, kept = (
                getattr(layout.read(block), role).weight.unflatten(0, (-1, dims.d_head))[:, : own.rotary_dim]
                for block in (source, target)
            )
            assert torch.equal(kept, original * kept.ne(0).any(-1, keepdim=True))


def test_shapes_and_parameter_counts_follow_the_ranks(pair: Pair):
    dims, architecture = pair.family.dims, pair.family.architecture
    config, layout = pair.compressed.config, Layout.dense(architecture, dims)
    assert config.num_attention_heads == pair.dense.config.num_attention_heads
    blocks = decoder_layers(pair.compressed, architecture.describe())
    dense_blocks = decoder_layers(pair.dense, architecture.describe())
    for block, rank, layer in zip(blocks, pair.family.ranks(), config.modegpt["layers"], strict=True):
        weights = layout.narrowed(layer).read(block)
        expected = {
            "query": (dims.n_heads * rank["qk"], dims.d_model),
            "key": (dims.n_kv_heads * rank["qk"], dims.d_model),
            "value": (dims.n_kv_heads * rank["vo"], dims.d_model),
            "output": (dims.d_model, dims.n_heads * rank["vo"]),
        }
        for role, shape in expected.items():
            assert tuple(getattr(weights, role).weight.shape) == (shape if not architecture.whole_attention else (0, 0))
        if weights.down is not None:
            assert tuple(weights.down.weight.shape) == (dims.d_model, rank["mlp"])
        n_ups = len(architecture.up) if architecture.has_mlp(block) else 0
        assert [tuple(up.weight.shape) for up in weights.ups] == [(rank["mlp"], dims.d_model)] * n_ups
        for expert in weights.experts:
            n_ups = 1 + architecture.gated_experts
            assert [tuple(up.weight.shape) for up in expert.ups] == [(rank["mlp"], dims.d_model)] * n_ups
            assert tuple(expert.down.weight.shape) == (dims.d_model, rank["mlp"])
        for module in architecture.linears(block):
            sizes = (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)
            assert sizes == tuple(affine(module).weight.shape)
            assert module.bias is None or len(module.bias) == sizes[0]
    # What a report says was removed is what is gone.
    saved = sum(
        layer_sizes(block, architecture, dims).removed(rank)
        for block, rank in zip(dense_blocks, pair.family.ranks(), strict=True)
    )
    assert pair.dense.num_parameters() - pair.compressed.num_parameters() == saved > 0


def test_eager_attention_of_falcon_takes_a_boolean_mask(pairs: dict[str, Pair]):
    """As the stock one does, which masks by itself; the common one would add it to the scores."""
    model, ids = in_float64(pairs["falcon"].compressed), tokens()
    mask = torch.ones(20, 20, dtype=torch.bool).tril().expand(len(ids), 1, -1, -1)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, ids, attention_mask=mask), logits(model, ids), rtol=0, atol=1e-11)


def test_layers_with_full_attention_have_no_window():
    """Of Qwen 2 with experts, whose config sets one window for all; flash kernels read it from here."""
    switches = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    sizes = {**SIZES, **GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24}
    family = Family("windows", lambda: Qwen2MoeConfig(**sizes, **switches))
    model = compressed_from(family, family.dense(), family.ranks())
    kinds = model.config.layer_types
    assert set(kinds) == {"full_attention", "sliding_attention"}
    windows = [layer.self_attn._window() for layer in model.model.layers]
    assert windows == [WINDOW if kind == "sliding_attention" else None for kind in kinds]


def test_sdpa_and_eager_agree_and_eager_returns_the_attentions(pair: Pair):
    model = copy.deepcopy(pair.compressed)
    model.set_attn_implementation(kernels(pair)[-1])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    expected = logits(model, tokens(), attention_mask=mask)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(tokens(), attention_mask=mask, output_attentions=True, output_hidden_states=True)
    # float32 rounding, 1e-7 of the largest logits, summed in another order over three layers.
    close = {"rtol": 0, "atol": 1e-5 * expected.abs().max().item()}
    torch.testing.assert_close(output.logits[mask.bool()], expected[mask.bool()], **close)
    dims = pair.family.dims
    shapes = [tuple(layer.shape) for layer in output.attentions]
    assert shapes == [(2, dims.n_heads, 20, 20)] * pair.family.n_attentions
    # Softmax rows over visible tokens sum to one, or to less where a sink has a share, and stock code shows it so.
    sums, stock = output.attentions[0][0].sum(-1), copy.deepcopy(pair.dense)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        shown = stock(tokens(), output_attentions=True).attentions[0][0].sum(-1)
    whole = torch.ones(dims.n_heads, 20)
    if torch.allclose(shown, whole):
        torch.testing.assert_close(sums, whole)
    else:
        assert sums.min() > 0
        assert sums.max() < 1
    assert len(output.hidden_states) == dims.n_layers + 1


def test_other_attention_kernels_get_what_the_stock_layers_give_them(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Flash kernels read the window, the scale and the dropout from the call, and want one head dim in a layer."""
    calls: list[dict] = []

    def record(module, query, key, value, attention_mask, **options):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        names = ("sliding_window", "scaling", "dropout", "softcap")
        sinks = None if (own := options.get("s_aux")) is None else own.tolist()
        calls.append({name: options.get(name) for name in names} | {"is_causal": module.is_causal, "sinks": sinks})
        return sdpa_attention_forward(module, query, key, value, attention_mask, **{**options, "softcap": None})

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "recording", record)
    if "ALL_ATTENTION_FUNCTIONS" not in vars(sys.modules[type(pair.dense).__module__]):
        pytest.skip("the stock attention calls its kernels itself")
    if "indexed_attention" in (getattr(pair.dense.config, "layer_types", None) or ()):
        pytest.skip("the stock attention needs a mask, which other kernels get none of")
    seen = []
    for original in (pair.dense, pair.compressed):
        for training in (False, True):
            model = copy.deepcopy(original).train(training)
            for module in model.modules():
                for name in ("attention_dropout", "dropout", "attn_dropout"):
                    own = getattr(module, name, None) if hasattr(module, "scaling") else None
                    if isinstance(own, nn.Dropout):
                        own.p = 0.25
                    elif own is not None:
                        setattr(module, name, 0.25)
            model.set_attn_implementation("recording")
            logits(model, tokens())
        seen.append(calls.copy())
        calls.clear()
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2 * pair.family.n_attentions


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "VaultGemmaForCausalLM"])
def test_a_kernel_without_a_cap_is_never_chosen(name: str, monkeypatch: pytest.MonkeyPatch):
    """Until transformers 5.21 some stock classes with capped scores said that they run on SDPA, which drops the cap."""
    monkeypatch.setattr(getattr(transformers, name), "_supports_sdpa", True)
    assert compressed_class.__wrapped__(name)._supports_sdpa is False
    assert compressed_class("LlamaForCausalLM")._supports_sdpa is True  # pyright: ignore[reportAttributeAccessIssue]


ROPE_SCALINGS = {
    "llama3": LLAMA_3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(4)],
        "long_factor": [2.0 + 0.5 * i for i in range(4)],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


BASE = {"rope_theta": 10000.0}
SCALED = {
    **{
        name: (LlamaConfig, {**GROUPED, "rope_parameters": {**scaling, **BASE}})
        for name, scaling in ROPE_SCALINGS.items()
    },
    "phi3 longrope": (Phi3Config, {"rope_parameters": {**ROPE_SCALINGS["longrope"], **BASE}}),
    "gemma3_text linear, full layers alone": (
        Gemma3TextConfig,
        {
            **GROUPED,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**ROPE_SCALINGS["linear"], "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", **BASE},
            },
        },
    ),
    "cohere dynamic, interleaved": (CohereConfig, {"rope_parameters": {**ROPE_SCALINGS["dynamic"], **BASE}}),
    "gpt_neox yarn, partial": (
        GPTNeoXConfig,
        {"rope_parameters": {**ROPE_SCALINGS["yarn"], **BASE, "partial_rotary_factor": 0.5}},
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_rotary_embeddings_past_the_trained_length(name: str):
    """Dynamic and longrope change the frequencies with the length seen, so they must come from the model's own."""
    make, options = SCALED[name]
    sizes = {**SIZES, "max_position_embeddings": 16 if "dynamic" in name else 64}
    whole = ("qk",) if make is Gemma3TextConfig else ()
    # Cohere rotates in float32, whatever the model's dtype.
    family = Family(
        name, lambda: make(**sizes, **copy.deepcopy(options)), whole, exact=1e-4 if make is CohereConfig else 1e-11
    )
    dense = family.dense()
    compressed = in_float64(compressed_from(family, dense, family.ranks()))
    wide = densify(family, compressed, dense)
    short, long = tokens(length=12), tokens(length=48)
    for ids in (short, long, short):
        torch.testing.assert_close(logits(compressed, ids), logits(wide, ids), rtol=0, atol=family.exact)
    plain = Family("plain", lambda: make(**sizes, **{k: v for k, v in options.items() if k != "rope_parameters"}))
    config = plain.config()
    if "partial" in name:
        config.rope_parameters["partial_rotary_factor"] = 0.5
    unscaled = type(wide)(config).double().eval()
    unscaled.load_state_dict(wide.state_dict())
    assert (logits(unscaled, long) - logits(wide, long)).abs().max() > 1e-3, "the scaling must matter for this to test"
