"""Perplexity and a generated sample of several models, one in memory at a time, as `eval --json` writes them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..calibration import begin_windows, check_source, load_text, start_token, tokenize
from ..errors import InputError
from ..evaluate import check_window, perplexity
from ..loading.models import open_config, open_model, resolve_device
from ..loading.tokenizers import has_tokenizer, open_tokenizer
from ..measuring.prompts import LIKELIEST, encode
from ..positions import position_limit
from ..progress import Progress
from ..report import protocol

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
        InputError: a model, a text, a prompt or the window is unusable, or a model has another vocabulary than the
            first; no model was loaded.
    """
    target = resolve_device(device)
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} is not a positive whole number")
    for source in data:
        check_source(source)
    configs = [open_config(name) for name in models]
    window, tokenizer = common_window(configs, seq_len), open_tokenizer(models[0])
    for name in models[1:]:
        if has_tokenizer(name) and open_tokenizer(name).get_vocab() != tokenizer.get_vocab():
            raise InputError(
                f"'{name}' has another tokenizer than '{models[0]}': their figures do not compare; give the model that "
                "it was compressed from"
            )
    texts = open_texts(data, configs[0], tokenizer, window)
    encoded = [[encode(tokenizer, prompt, config, max_new_tokens) for prompt in prompts] for config in configs]
    evals, samples = [], []
    for name, own in zip(models, encoded, strict=True):
        network = open_model(name, dtype, target)
        if texts:
            about = {"model": name, "dtype": str(network.dtype).removeprefix("torch."), "device": str(target)}
            about |= {"split": "evaluation", "max_windows": max_windows, "stride": window}
            about |= {"start_token": start_token(configs[0], tokenizer), **protocol()}
            results = measure_texts(network, texts, window, max_windows, progress=progress)
            evals.append({"model": name, "results": results, "protocol": about})
        for prompt, inputs in zip(prompts, own, strict=True):
            added = _continue(network, inputs.to(target), max_new_tokens)
            text = tokenizer.decode(added, skip_special_tokens=True)
            samples.append({"model": name, "prompt": prompt, "text": text, "tokens": len(added)})
        del network
    return evals, samples


def common_window(configs: Sequence[Any], seq_len: int | None, option: str = "--seq-len") -> int:
    """Return the window for all models: `seq_len`, or 2048 tokens where all have the positions, else what they have.

    Raises:
        InputError: it predicts nothing, or a model has fewer positions.
    """
    window = seq_len or min([DEFAULT_WINDOW, *filter(None, map(position_limit, configs))])
    if window < 2:
        raise InputError(f"a window of {window} tokens predicts nothing; give 2 or more")
    for config in configs:
        check_window(config, window, option)
    return window


def open_texts(
    data: Sequence[str], config: Any, tokenizer: Any, window: int, option: str = "--seq-len"
) -> dict[str, Tensor]:
    """Return the token ids of each text's evaluation part, cut for the models of one config and tokenizer.

    Raises:
        InputError: a text is unknown, unreadable, or shorter than one window.
    """
    start = start_token(config, tokenizer)
    loaded = {source: tokenize(load_text(source, "evaluation"), tokenizer) for source in data}
    texts = {source: begin_windows(tokens, window, start) for source, tokens in loaded.items()}
    begun = "" if start is None else ", the model's first token among them"
    for source, tokens in texts.items():
        if len(tokens) < window:
            raise InputError(
                f"data '{source}' has {len(loaded[source])} tokens, fewer than one window of {window}{begun}; give a "
                f"longer text, or a smaller {option}"
            )
    return texts


def seen_text(calibration: str, data: Sequence[str]) -> list[str]:
    """Return a warning for each text to measure on that the model was calibrated on; known data sets have splits."""

    def same(source: str) -> bool:
        try:
            return Path(source).is_file() and Path(source).samefile(calibration)
        except (OSError, ValueError):
            return False  # it is elsewhere, or not ours to look at

    return [
        f"'{source}' is the text that the model is calibrated on: its perplexity there says little of other text"
        for source in data
        if same(source)
    ]


def measure_texts(
    network: Any,
    texts: dict[str, Tensor],
    window: int,
    max_windows: int | None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Return the `results` of `eval --json`: one entry for each text."""
    results = []
    for source, tokens in texts.items():
        start = time.perf_counter()
        outcome = perplexity(network, tokens, window, max_windows, batch_size, progress)
        results.append({"data": source, **outcome._asdict(), "seconds": round(time.perf_counter() - start, 3)})
    return results


def _continue(network: Any, inputs: Any, max_new_tokens: int) -> Tensor:
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, **LIKELIEST)
    return output[0, inputs["input_ids"].shape[1] :].cpu()
