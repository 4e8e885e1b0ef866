"""Several answers to one context: the context runs once, and every answer goes on from its keys and values.

Most tasks ask for the log-likelihood of a few answers after the same question. One after another, each answer would run
its question again.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ..around_blocks import PassedBlock
from ..cache_name import CACHE


class Question(NamedTuple):
    """A context and the answers that are scored after it."""

    context: list[int]
    """Tokens."""
    answers: list[list[int]]
    """Tokens of each, at least one."""
    places: list[int]
    """Where each answer stands among the requests."""


class Row(NamedTuple):
    """An answer in a batch."""

    context: int
    """The row of its context."""
    place: int
    """Where it stands among the requests."""
    answer: list[int]
    """Its tokens."""


AT_ONCE = {"cpu": 0, "cuda": 4096}
"""Tokens, by device type, that run in about the time that it takes to start them: so few may be padded as they like."""

KEYS_AND_VALUES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose cache can be given to several texts."""

Score = tuple[float, bool]
"""`log p(answer | context)` in nats, and whether greedy decoding gives just this answer."""


def takes_part(model: Any) -> bool:
    """Tell whether a model's contexts can be shared: it keeps keys and values, and not a state that only moves on.

    And all of its blocks do: how long the past is, decoders read off the first of a kind, which may be passed by.
    """
    if not {CACHE, "logits_to_keep"} <= inspect.signature(model.forward).parameters.keys():
        return False
    if any(isinstance(module, PassedBlock) for module in model.modules()):
        return False
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return not getattr(model, "_is_stateful", False) and kinds <= KEYS_AND_VALUES


def turning_point(config: Any) -> int | None:
    """Return the length behind which a model rotates all of a text otherwise (longrope); None where there is none."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def questions(
    requests: Sequence[tuple[list[int], list[int]]], max_length: int, turn: int | None = None
) -> list[Question]:
    """Return the contexts that several requests share; one that does not fit with all its answers is left out.

    So is one whose answers cross the `turn`: its keys would be rotated for a shorter text than the answers' are.

    Args:
        requests: context and answer of each, as tokens.
        max_length: positions of the model; an answer's last token takes none.
        turn: see `turning_point`.
    """
    found: dict[tuple[int, ...], Question] = {}
    for place, (context, answer) in enumerate(requests):
        question = found.setdefault(tuple(context), Question(context, [], []))
        question.answers.append(answer)
        question.places.append(place)

    def fits(each: Question) -> bool:
        whole = len(each.context) + max(map(len, each.answers)) - 1
        crosses = turn is not None and len(each.context) <= turn < whole
        return len(each.answers) > 1 and whole <= max_length and not crosses

    return [each for each in found.values() if fits(each)]


@torch.inference_mode()
def score_answers(
    model: Any,
    asked: Sequence[Question],
    batch_size: int,
    dtype: torch.dtype | None,
    report: Callable[[int], None],
) -> dict[int, Score]:
    """Return the score of every answer, `log p(answer | context) = Σ_i log p(a_i | context, a_<i)`, by its place.

    Contexts of equal length run together, so that none is padded; answers are padded on the right, where causal
    attention leaves it without effect. So masks and positions are those that the model makes itself. The figures are
    those of the answers one by one, up to the rounding of sums in another order. Cost: the tokens of each context once,
    and those of its answers; the keys and values of a batch.

    Args:
        model: a causal language model that takes a cache.
        asked: the questions.
        batch_size: answers run at once.
        dtype: of the softmax; None for that of the logits.
        report: called after each batch with the answers that it scored.
    """
    scored = {}
    for batch in _batches(asked, batch_size):
        ids = torch.tensor([question.context for question in batch], device=model.device)
        found = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        first = found.logits[:, -1].log_softmax(-1, dtype=dtype)
        rows = [
            Row(number, place, answer)
            for number, each in enumerate(batch)
            for place, answer in zip(each.places, each.answers, strict=True)
        ]
        parts = _parts(rows, batch_size, AT_ONCE.get(first.device.type, 0))
        for number, part in enumerate(parts):
            cache = found[CACHE]
            if number + 1 < len(parts):
                cache = copy.deepcopy(cache)  # an answer's tokens are added to it
            scored |= _answers(model, cache, first, part, dtype)
            report(len(part))
    return scored


def _batches(asked: Sequence[Question], batch_size: int) -> Iterator[list[Question]]:
    """Yield questions with contexts of equal length, longest first, with up to `batch_size` answers or one question."""
    by_length = sorted(asked, key=lambda question: len(question.context), reverse=True)
    for _length, group in groupby(by_length, key=lambda question: len(question.context)):
        batch: list[Question] = []
        for question in group:
            if batch and sum(len(each.answers) for each in batch) + len(question.answers) > batch_size:
                yield batch
                batch = []
            batch.append(question)
        yield batch


def _parts(rows: list[Row], batch_size: int, at_once: int) -> list[list[Row]]:
    """Return the answers of a batch, longest first, in parts that need little padding: no more than a quarter each.

    Or that are no more than `at_once` tokens, whatever the padding.
    """
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.answer), reverse=True):
        part = parts[-1] if parts else []
        longest = len(part[0].answer) if part else 0
        alike = 4 * len(row.answer) >= 3 * longest or (len(part) + 1) * longest <= at_once
        if part and len(part) < batch_size and alike:
            part.append(row)
        else:
            parts.append([row])
    return parts


def _answers(model: Any, cache: Cache, first: Tensor, rows: list[Row], dtype: torch.dtype | None) -> dict[int, Score]:
    """Score answers to contexts whose keys and values are known.

    Args:
        model: the model.
        cache: of the batch's contexts; it is used up.
        first: `(contexts, vocab)` log-probabilities of the token after each context.
        rows: the answers.
        dtype: of the softmax.
    """
    device = first.device
    contexts = torch.tensor([row.context for row in rows], device=device)
    lengths = torch.tensor([[len(row.answer)] for row in rows], device=device)
    tokens = pad_sequence([torch.tensor(row.answer) for row in rows], batch_first=True).to(device)
    likelihood = first[contexts, tokens[:, 0]]
    greedy = first.argmax(-1)[contexts] == tokens[:, 0]
    if tokens.shape[1] > 1:
        cache.batch_select_indices(contexts)
        logits = model(input_ids=tokens[:, :-1], **{CACHE: cache}, use_cache=True).logits
        logs, wanted = logits.log_softmax(-1, dtype=dtype), tokens[:, 1:]
        held = torch.arange(1, tokens.shape[1], device=device) < lengths
        likelihood += torch.where(held, logs.gather(2, wanted[..., None])[..., 0], 0).sum(1)
        greedy &= ((logs.argmax(-1) == wanted) | ~held).all(1)
    places = [row.place for row in rows]
    return dict(zip(places, zip(likelihood.tolist(), greedy.tolist(), strict=True), strict=True))
