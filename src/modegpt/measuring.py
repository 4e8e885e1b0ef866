"""Perplexity and a generated sample of several models, one in memory at a time, as `eval --json` writes them."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .calibration import check_source, load_text, tokenize
from .compress import Progress
from .errors import InputError
from .evaluate import check_window, perplexity
from .models import open_config, open_model, open_tokenizer, resolve_device
from .report import protocol

DEFAULT_WINDOW = 2048


def measure(
    models: Sequence[str],
    data: Sequence[str] = (),
    prompts: Sequence[str] = (),
    *,
    seq_len: int | None = None,
    max_windows: int | None = None,
    max_new_tokens: int = 64,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure the models alike, on the same tokens and prompts.

    Args:
        models: hub names, folders or `.gguf` files that share the first one's tokenizer.
        data: known data sets or text files, for perplexity.
        prompts: texts to continue, the likeliest token each time.
        seq_len: tokens of a window; by default 2048, or the models' positions.
        max_windows: use only the first windows of each text.
        max_new_tokens: of a continuation, at most.
        dtype: to compute in.
        device: to compute on.
        progress: called as by `perplexity`.

    Returns:
        For each model a result like that of `eval --json`, and all samples (`model`, `prompt`, `text`, `tokens`).

    Raises:
        InputError: a model, a text or the window is unusable; no model was loaded.
    """
    target = resolve_device(device)
    for source in data:
        check_source(source)
    window = _window(models, seq_len, prompts, max_new_tokens)
    tokenizer = open_tokenizer(models[0])
    texts = {source: tokenize(load_text(source, "evaluation"), tokenizer) for source in data}
    for source, tokens in texts.items():
        if len(tokens) < window:
            raise InputError(
                f"data '{source}' has {len(tokens)} tokens, fewer than one window of {window}; give a longer text, "
                "or a smaller --seq-len"
            )
    evals, samples = [], []
    for name in models:
        network = open_model(name, dtype, target)
        results = []
        for source, tokens in texts.items():
            start = time.perf_counter()
            outcome = perplexity(network, tokens, window, max_windows, progress=progress)
            results.append({"data": source, **outcome._asdict(), "seconds": round(time.perf_counter() - start, 3)})
        about = {"model": name, "dtype": str(network.dtype).removeprefix("torch."), "device": str(target)}
        about |= {"split": "evaluation", "max_windows": max_windows, "stride": window, **protocol()}
        if results:
            evals.append({"model": name, "results": results, "protocol": about})
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(target)
            added = _continue(network, inputs, max_new_tokens)
            text = tokenizer.decode(added, skip_special_tokens=True)
            samples.append({"model": name, "prompt": prompt, "text": text, "tokens": len(added)})
        del network
    return evals, samples


def _window(models: Sequence[str], seq_len: int | None, prompts: Sequence[str], max_new_tokens: int) -> int:
    """Check every model's positions and return the window that all of them take."""
    configs = [open_config(name) for name in models]
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None) for config in configs]
    window = seq_len or min(DEFAULT_WINDOW, *(limit for limit in limits if limit is not None), DEFAULT_WINDOW)
    if window < 2:
        raise InputError(f"a window of {window} tokens predicts nothing; give --seq-len 2 or more")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} is not a positive whole number")
    for config in configs:
        check_window(config, window)
    if any(not prompt for prompt in prompts):
        raise InputError("the prompt is empty; give some text to continue")
    return window


def _continue(network: Any, inputs: Any, max_new_tokens: int) -> Tensor:
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].cpu()
