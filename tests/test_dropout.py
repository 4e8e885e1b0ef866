"""A compressed model drops what the stock one drops when it trains: in attention weights and after the projections."""

import pytest
import torch
from transformers import GPT2Config, OPTConfig, PreTrainedConfig, SeedOssConfig, Starcoder2Config

from conformance.families import GROUPED, NO_WIDTH, OPT_SIZES, SIZES, Family, tokens
from conformance.helpers import compressed_from
from modegpt import CompressionConfig, compress

DROPPING = {
    "starcoder2": lambda share: Starcoder2Config(**SIZES, **GROUPED, residual_dropout=share),
    "seed_oss": lambda share: SeedOssConfig(**SIZES, **GROUPED, residual_dropout=share, attention_dropout=0.0),
    "gpt2": lambda share: GPT2Config(**NO_WIDTH, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=share),
    "opt": lambda share: OPTConfig(**OPT_SIZES, dropout=share, attention_dropout=0.0),
}


def made(name: str, share: float) -> PreTrainedConfig:
    return DROPPING[name](share)


@pytest.mark.parametrize("name", DROPPING)
def test_the_same_seed_drops_the_same(name: str):
    """At full rank nothing else differs, so a share that is lost or moved changes the draws, and the bits."""
    outputs = []
    for share in (0.0, 0.5):
        family = Family(name, lambda share=share: made(name, share))
        dense = family.dense()
        full = compressed_from(family, dense, family.full_ranks())
        for model in (dense, full):
            torch.manual_seed(3)
            with torch.no_grad():
                outputs.append(model.train()(tokens()).logits)
    undropped, _, dropped, compressed = outputs
    assert torch.equal(compressed, dropped)
    assert not torch.equal(dropped, undropped), "nothing was dropped"


@pytest.mark.parametrize("name", DROPPING)
def test_a_model_in_training_mode_is_compressed_without_its_dropout(name: str):
    """And is in training mode again afterwards."""
    dense = Family(name, lambda: made(name, 0.5)).dense()
    config = CompressionConfig(sparsity=0.25)
    expected = compress(dense.eval(), tokens(rows=8, length=32), config).state_dict()
    found = compress(dense.train(), tokens(rows=8, length=32), config)
    assert dense.training
    assert all(module.training for module in dense.modules())
    assert not found.training
    for key, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
