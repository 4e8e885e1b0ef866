"""Checkpoints whose weights are stored in 8-bit floating point: unpacked tensor by tensor, as they are read.

A weight `q` stands beside a scale `s`, and means `s q`: one scale for all of it, one for each row, or one for each
block of it, `weight_block_size` rows by columns (DeepSeek-V3 technical report, 2024, section 3.3), of which the last
ones may be smaller. Scales of activations play no part: nothing is computed in 8 bits here.
"""

import copy
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import InputError

FLOATS = ("F8_E4M3", "F8_E5M2")
"""What safetensors calls the dtypes of packed weights."""
SCALES = {"fp8": "_scale_inv", "compressed-tensors": "_scale", "fbgemm_fp8": "_scale"}
"""What follows the name of a weight in the name of its scale, by `quant_method`."""


class Packing(NamedTuple):
    """How a checkpoint's weights are packed."""

    scale: str
    """What follows the name of a weight in the name of its scale."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None where all do, or all of a row."""

    def scale_of(self, name: str, dtype: str, stored: Collection[str]) -> str | None:
        """Return the name of the scale of a tensor; None of one that is not packed.

        Args:
            name: of the tensor, in the files.
            dtype: of it, as safetensors calls it.
            stored: the names of all tensors in the files.

        Raises:
            InputError: it is packed, and its scale is missing.
        """
        if dtype not in FLOATS:
            return None
        if (scale := name + self.scale) not in stored:
            raise InputError(f"the checkpoint has '{name}' in 8 bits and no '{scale}': fetch it again")
        return scale


def packing(config: Any) -> Packing | None:
    """Return how the weights of a model are packed, by its config; None if they are not, or in no way known here."""
    about = quantization(config)
    method = about.get("quant_method")
    if getattr(config, "modegpt", None) or method not in SCALES:
        return None
    known, block = about.get("expert_dtype", "fp8") == "fp8", about.get("weight_block_size")
    if method == "compressed-tensors":
        groups = (about.get("config_groups") or {}).values()
        blocks = {tuple((group.get("weights") or {}).get("block_structure") or ()) for group in groups}
        known, block = about.get("format") == "float-quantized" and len(blocks) == 1, next(iter(blocks), None)
    return Packing(SCALES[method], tuple(block) if block else None) if known else None


def quantization(config: Any) -> dict[str, Any]:
    """Return what a config says of the quantization of its model; nothing if it says nothing."""
    about = getattr(config, "quantization_config", None) or {}
    return about if isinstance(about, dict) else about.to_dict()


def plain(config: Any) -> Any:
    """Return the config of the unpacked model; the config itself where nothing is packed, or in no way known here."""
    if packing(config) is None:
        return config
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


def unpack(packed: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return `s q` in float32.

    Args:
        packed: `(rows, columns)`.
        scale: one number, `(rows,)` or `(rows, 1)`, or with a `block` one number for each: `(⌈rows / block[0]⌉,
            ⌈columns / block[1]⌉)`. Bytes are exponents of two, less 127.
        block: rows and columns that share a scale, or None.

    Raises:
        ValueError: the scale has another shape.
    """
    rows, columns = packed.shape
    scale = torch.exp2(scale.to(torch.float32) - 127) if scale.dtype == torch.uint8 else scale.to(torch.float32)
    if scale.numel() == 1:
        return packed.to(torch.float32) * scale.flatten()
    if scale.numel() == rows and scale.shape[0] == rows:
        return packed.to(torch.float32) * scale.view(rows, 1)
    if block is None or scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"a weight of shape {(rows, columns)} has scales of shape {tuple(scale.shape)}")
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return spread.mul_(packed.to(torch.float32))
