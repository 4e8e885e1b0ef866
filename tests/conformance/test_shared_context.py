"""Answers scored after a context that ran once have the scores of full forward passes."""

from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, Phi3Config

from modegpt.baselines.layers import without
from modegpt.measuring.shared_context import AT_ONCE, questions, score_answers, takes_part, turning_point

from .conftest import Pair
from .families import tokens
from .helpers import in_float64

CONTEXTS = [*tokens(rows=3, length=9).tolist(), *tokens(rows=1, length=4).tolist()]
"""Longer and shorter than the sliding window; three run together."""
ANSWERS = [[5, 9, 7, 23, 40], [6], [8, 11]]
REQUESTS = [(context, answer) for answer in ANSWERS for context in CONTEXTS]


@torch.no_grad()
def alone(model, context: list[int], answer: list[int]) -> tuple[float, bool]:
    logs = model(torch.tensor([context + answer[:-1]]), use_cache=False).logits[0, len(context) - 1 :].log_softmax(-1)
    likelihood = sum(logs[place, token].item() for place, token in enumerate(answer))
    return likelihood, logs.argmax(-1).tolist() == answer


def test_scores_are_those_of_full_passes(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    scores_are_those_of_full_passes(pair, pair.dense, monkeypatch)


def test_scores_of_a_compressed_model_are_those_of_full_passes(one_attending: Pair, monkeypatch: pytest.MonkeyPatch):
    """Where the stock attention runs its cache is the stock one."""
    scores_are_those_of_full_passes(one_attending, one_attending.compressed, monkeypatch)


def scores_are_those_of_full_passes(pair: Pair, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_float64(model)
    indexed = "indexed_attention" in (getattr(pair.dense.config, "layer_types", None) or ())
    if pair.dense._is_stateful or pair.family.architecture.mixers or indexed:
        assert not takes_part(model)
        pytest.skip("a state that only moves on cannot be shared, nor, here, what picks keys")
    assert takes_part(model)
    requests = list(REQUESTS)
    # What greedy decoding gives, so that answers are told to be just that, one of them shorter than those beside it.
    greedy: list[int] = []
    for _ in range(2):
        logits = model(torch.tensor([CONTEXTS[0] + greedy]), use_cache=False).logits
        greedy.append(int(logits[0, -1].argmax()))
        requests.append((CONTEXTS[0], list(greedy)))
    expected = {place: alone(model, *request) for place, request in enumerate(requests)}
    assert expected[len(REQUESTS)][1]
    assert expected[len(REQUESTS) + 1][1]
    # Each context alone, then those of one length together, in two batches, and then those of all lengths.
    for at_once, batch_size in ((0, 1), (0, 2), (64, 64)):
        monkeypatch.setitem(AT_ONCE, "cpu", at_once)
        reported: list[int] = []
        found = score_answers(model, questions(requests, 64), batch_size, None, reported.append)
        assert sum(reported) == len(requests)
        assert found.keys() == expected.keys()
        for place, (likelihood, is_greedy) in expected.items():
            # Up to five tokens, each with the rounding of its logit and of its normaliser.
            rounding = max(pair.family.exact, pair.family.stepwise)
            assert found[place][0] == pytest.approx(likelihood, abs=10 * rounding, rel=0)
            assert found[place][1] == is_greedy


def test_what_cannot_be_shared_is_left_out():
    short, long = [1, 2], [3] * 9
    requests = [(short, [4]), (long, [4]), (short, [5, 6]), (long, [5, 6]), ([7], [8])]
    (found,) = questions(requests, max_length=9)
    assert (found.context, found.answers, found.places) == (short, [[4], [5, 6]], [0, 2])
    assert len(questions(requests, max_length=10)) == 2


def test_where_answers_cross_the_length_at_which_all_is_rotated_otherwise_nothing_is_shared():
    requests = [([1] * length, answer) for length in (3, 6, 7) for answer in ([4], [5, 6, 7])]
    # Answers of three tokens reach two places further: 3 + 2 ≤ 6, 6 + 2 > 6, and 7 is behind it from the start.
    assert [len(question.context) for question in questions(requests, 20, turn=6)] == [3, 7]
    assert [len(question.context) for question in questions(requests, 20)] == [3, 6, 7]
    scaled = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "original_max_position_embeddings": 16}
    assert turning_point(Phi3Config(rope_parameters=scaled, max_position_embeddings=64, **sizes)) == 16
    assert turning_point(Phi3Config()) is None


def test_a_model_without_keys_and_values_takes_no_part():
    assert not takes_part(torch.nn.Linear(2, 2))
    kinds = ["conv", "full_attention"]
    mixed = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=kinds,
    )  # fmt: skip
    assert not takes_part(Lfm2ForCausalLM(mixed))


def test_a_model_with_layers_left_out_takes_no_part(pairs: dict[str, Pair]):
    dense = pairs["llama-tied"].dense
    assert takes_part(dense)
    assert not takes_part(without(dense, [0]).model)
