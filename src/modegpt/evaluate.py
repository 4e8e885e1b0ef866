"""Perplexity of a language model on a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .default_device import on_the_cpu
from .errors import InputError, NumericalError
from .loading.models import beyond_vocabulary, device_of
from .positions import position_limit
from .progress import Progress

LOGIT_BYTES = 2**30
"""Bound on the float32 logits of one batch."""
TOKENS_PER_BATCH = 8192
"""Bound on the tokens of one batch, which is what its hidden states grow with."""


class PerplexityResult(NamedTuple):
    """What `perplexity` measured, and on how much."""

    perplexity: float
    """`exp(nll)`."""
    nll: float
    """Mean negative log-likelihood of a predicted token, in nats."""
    tokens: int
    """Predicted tokens: `seq_len - 1` a window."""
    windows: int
    seq_len: int


def check_window(config: Any, seq_len: int, option: str = "--seq-len") -> None:
    """Raise `InputError` when a window of `seq_len` tokens has more positions than the model of `config` knows.

    `option` is what sets the window.
    """
    positions = position_limit(config)
    if positions is not None and seq_len > positions:
        raise InputError(
            f"a window of {seq_len} tokens is longer than the model's {positions} positions;"
            f" give {option} {positions} or less"
        )


@on_the_cpu()
def perplexity(
    model: PreTrainedModel,
    tokens: Tensor,
    seq_len: int,
    max_windows: int | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> PerplexityResult:
    """Measure `exp(−mean log p(token | the tokens before it in its window))`.

    Windows are taken from the start of the text and do not overlap; the last, partial one is dropped. The first token
    of a window is context only. The likelihood is computed in float32 whatever the model's dtype, one window at a
    time, and summed in float64.

    Args:
        model: a causal language model; left in the mode (training or not) in which it came.
        tokens: `(n_tokens,)` ids of the whole text.
        seq_len: tokens of a window, at least 2.
        max_windows: use no more than the first so many windows.
        batch_size: windows run at once; by default as many as keep the float32 logits below 1 GiB.
        progress: called after each batch with `evaluate`, the windows done and the windows in all.

    Raises:
        InputError: the text is shorter than one window, the window too long or too short for the model, or a token is
            outside its vocabulary.
        NumericalError: the loss of a window is NaN or infinite; names the window.
    """
    windows = _windows(model, tokens, seq_len, max_windows)
    if batch_size is None:
        batch_size = _default_batch(seq_len, model.config.get_text_config().vocab_size)
    elif batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; give at least 1")
    device = device_of(model)
    total, done = 0.0, 0
    with evaluating(model), torch.inference_mode():
        for batch in windows.split(batch_size):
            ids = batch.to(device)
            logits = model(input_ids=ids, use_cache=False).logits
            for index, (window_logits, window) in enumerate(zip(logits, ids, strict=True), start=done):
                total += _window_nll(window_logits, window, index)
            # Freed before the next batch, or two batches of logits would be held at once.
            del logits
            done += len(batch)
            if progress is not None:
                progress("evaluate", done, len(windows))
    n_predicted = done * (seq_len - 1)
    nll = total / n_predicted
    # torch's exp gives infinity where math.exp raises.
    return PerplexityResult(torch.tensor(nll, dtype=torch.float64).exp().item(), nll, n_predicted, done, seq_len)


def _windows(model: PreTrainedModel, tokens: Tensor, seq_len: int, max_windows: int | None) -> Tensor:
    """Check the request and return the `(windows, seq_len)` ids."""
    if seq_len < 2:
        raise InputError(f"a window of {seq_len} tokens predicts nothing; give --seq-len 2 or more")
    check_window(model.config, seq_len)
    if max_windows is not None and max_windows < 1:
        raise InputError(f"max_windows is {max_windows}; give at least 1")
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens are of type {type(tokens).__name__}; give a tensor of (n_tokens,) token ids")
    if tokens.ndim != 1 or tokens.is_floating_point():
        raise InputError(
            f"tokens have shape {tuple(tokens.shape)} and dtype {tokens.dtype}; give (n_tokens,) token ids"
        )
    n_windows = len(tokens) // seq_len
    if n_windows == 0:
        raise InputError(
            f"the text has {len(tokens)} tokens, fewer than one window of {seq_len};"
            " give a longer text or a smaller --seq-len"
        )
    n_windows = min(n_windows, max_windows or n_windows)
    windows = tokens[: n_windows * seq_len].long().view(n_windows, seq_len)
    if (bounds := beyond_vocabulary(windows, model)) is not None:
        low, high, rows = bounds
        raise InputError(
            f"token {low if low < 0 else high} is outside the model's vocabulary of {rows};"
            " give the tokenizer that belongs to the model"
        )
    return windows


def _default_batch(seq_len: int, vocab_size: int) -> int:
    return max(1, min(LOGIT_BYTES // (seq_len * vocab_size * 4), TOKENS_PER_BATCH // seq_len))


def _window_nll(logits: Tensor, window: Tensor, index: int) -> float:
    """Return the summed negative log-likelihood of all tokens of a window but the first."""
    losses = nn.functional.cross_entropy(logits[:-1].float(), window[1:].to(logits.device), reduction="none")
    # Moved before it is made float64, which some accelerators do not have.
    nll = losses.cpu().double().sum()
    if not torch.isfinite(nll):
        raise NumericalError(
            f"the loss of evaluation window {index} (counted from 0) is {nll.item()}:"
            " the model's weights or activations hold NaN or infinity"
        )
    return nll.item()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each of its modules back into its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
