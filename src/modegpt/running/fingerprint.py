"""What decides the result of a run, by which an unfinished one is known again."""

import hashlib
import json
from typing import Any

import torch

from ..config import CompressionConfig
from ..versions import versions
from .source import Source
from .text import Text


def run_fingerprint(
    source: Source, text: Text, config: CompressionConfig, out_dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return everything that decides the result of a run, by field, as JSON values."""
    settings = config.as_dict()
    for irrelevant in ("device", "dtype", "max_host_memory"):  # the dtype that is written is told below
        settings.pop(irrelevant, None)
    model_config = json.loads(source.config.to_json_string(use_diff=False))
    model_config.pop("_name_or_path", None)  # how the call spelled it: the weights are told by themselves
    ids = hashlib.sha256(str(tuple(text.windows.shape)).encode())
    ids.update(text.windows.to(torch.int64).contiguous().numpy().tobytes())
    return {
        "model": source.identity,
        "model config": hashlib.sha256(json.dumps(model_config, sort_keys=True).encode()).hexdigest(),
        "calibration tokens": ids.hexdigest(),
        "output dtype": str(out_dtype).removeprefix("torch."),
        "device type": device.type,
        "versions": versions(),
        **{f"setting {name}": value for name, value in settings.items()},
    }
