"""Session fixtures: each family's dense and compressed model, and the folders they were saved to."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .families import FAMILIES, VOCAB, Family, covering, covering_attention, one_of_each_attention
from .helpers import compressed_from


class Pair(NamedTuple):
    """A family's models; tests leave both as they are."""

    family: Family
    dense: Any
    compressed: Any


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    # The models are so small that threads only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pairs() -> dict[str, Pair]:
    made = {}
    for family in FAMILIES:
        dense = family.dense()
        made[family.name] = Pair(family, dense, compressed_from(family, dense, family.ranks()))
    return made


def each_of(names: Iterable[str]) -> Any:
    """Return a fixture that gives the pairs of some families, one after another."""

    @pytest.fixture(params=list(names))
    def one(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
        return pairs[request.param]

    return one


pair = each_of(family.name for family in FAMILIES)
attending = each_of(family.name for family in FAMILIES if not family.architecture.whole_attention)
"""Those whose compressed attention runs in place of the stock one."""
one_attending = each_of(one_of_each_attention())
"""Those of them in which it runs each in a way of its own."""
covered = each_of(covering())
"""Those that have each trait between them: for what libraries do with any model alike."""
covered_attending = each_of(covering_attention())
"""Those of them whose compressed attention runs."""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "<unk>", *(f"w{n}" for n in range(3, VOCAB))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture(scope="session")
def folders(
    pairs: dict[str, Pair], tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Return where each family's compressed model and tokenizer are saved."""
    root = tmp_path_factory.mktemp("saved")
    for name, pair in pairs.items():
        pair.compressed.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in pairs}
