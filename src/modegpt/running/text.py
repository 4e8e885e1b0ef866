"""The calibration text of a run: windows of tokens, checked before the model is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..architectures import architecture_of
from ..calibration import begin_windows, check_source, draw_windows, load_text, start_token, tokenize
from ..config import TOKEN_IDS, CompressionConfig
from ..errors import InputError
from ..evaluate import check_window
from ..loading.models import beyond_vocabulary, check_model
from ..loading.tokenizers import has_tokenizer, open_tokenizer
from .source import Source, absolute

IDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""What token ids may be given in."""


@dataclass
class Text:
    """The calibration windows, and the tokenizer that made them."""

    windows: Tensor
    tokenizer: Any
    tokenizer_of: str | None
    """The model whose tokenizer it is as it is; None where it was given as an object, or there is none."""
    about: dict[str, Any]


def open_text(
    calibration: str | Path | Tensor,
    config: CompressionConfig,
    model: PreTrainedModel | str,
    tokenizer: Any,
) -> Text:
    """Return `(samples, seq_len)` windows, checking all that can be checked before the model is loaded.

    Raises:
        InputError: the model, the data or the window is unusable.
    """
    name = None if isinstance(model, PreTrainedModel) else model
    tokenizer_of = absolute(name) if name is not None and tokenizer is None else None
    model_config = model.config if isinstance(model, PreTrainedModel) else check_model(model)[0]
    architecture_of(model_config)
    if not isinstance(calibration, str | Path | Tensor):
        raise InputError(
            f"calibration is of type {type(calibration).__name__}; give (samples, seq_len) token ids as a tensor, a "
            "data set or a file"
        )
    if isinstance(calibration, Tensor):
        if calibration.ndim != 2 or calibration.dtype not in IDS or not calibration.numel():
            raise InputError(
                f"calibration has shape {tuple(calibration.shape)} and dtype {calibration.dtype}; "
                "give (samples, seq_len) token ids, a data set or a file"
            )
        calibration = calibration.to("cpu", torch.int64)
        check_window(model_config, calibration.shape[1])
        if tokenizer is None and name is not None and has_tokenizer(name):
            tokenizer = open_tokenizer(name)
        return Text(calibration, tokenizer, tokenizer_of, _about(TOKEN_IDS, calibration))
    data = str(calibration)
    check_source(data)
    check_window(model_config, config.seq_len)
    if tokenizer is None:
        if name is None:
            raise InputError("text for a model in memory needs its tokenizer: pass tokenizer=..., or token ids")
        tokenizer = open_tokenizer(name)
    tokens, start = tokenize(load_text(data, "calibration"), tokenizer), start_token(model_config, tokenizer)
    own = config.seq_len - (start is not None)
    if not own:
        raise InputError("seq_len 1 leaves no room behind the model's first token; give 2 or more")
    windows = draw_windows(tokens, config.samples, own, config.sampling, config.seed, data)
    windows = begin_windows(windows.flatten(), config.seq_len, start).view(len(windows), -1)
    return Text(windows, tokenizer, tokenizer_of, {**_about(data, windows), "file": _file(data), "start_token": start})


def check_ids(text: Text, source: Source) -> None:
    """Raise `InputError` if a token of the text is outside the model's vocabulary."""
    if (bounds := beyond_vocabulary(text.windows, source.blocks.model)) is not None:
        low, high, rows = bounds
        raise InputError(
            f"the calibration text has tokens from {low} to {high}, and the model has {rows} of them: give "
            "ids by this model's own tokenizer"
        )


def plain_text(config: CompressionConfig) -> Tensor:
    """Return windows that stand for a text which nothing will read: their shape, and no tokens."""
    return torch.zeros(1, 1, dtype=torch.int64).expand(config.samples, config.seq_len)


def _about(data: str, windows: Tensor) -> dict[str, Any]:
    return {"data": data, "samples": len(windows), "seq_len": windows.shape[1], "tokens": windows.numel()}


def _file(data: str) -> str | None:
    """Return the whole path of a text in a file; None of a known data set."""
    return str(Path(data).resolve()) if Path(data).is_file() else None
