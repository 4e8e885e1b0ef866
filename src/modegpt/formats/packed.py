"""Checkpoints whose weights are stored in 8-bit or 4-bit floating point: unpacked tensor by tensor, as they are read.

A weight `q` stands beside a scale `s`, and means `s q`: one scale for all of it, one for each row, or one for each
block of it, `weight_block_size` rows by columns (DeepSeek-V3 technical report, 2024, section 3.3), of which the last
ones may be smaller. Scales of activations play no part: nothing is computed in 8 bits here.

The experts of gpt-oss are in 4 bits, 32 inputs of a row to a scale, as OCP's Microscaling Formats Specification 1.0
(2023) calls `MXFP4`. For a weight `X` the files have `X_blocks`, two numbers a byte, the lower half first, and
`X_scales`.
"""

import copy
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError

FLOATS = ("F8_E4M3", "F8_E5M2")
"""What safetensors calls the dtypes of packed weights."""
PLAIN = ("F64", "F32", "BF16", "F16")
"""And those of weights that mean what they say."""
SCALES = {"fp8": ("_scale_inv", "_scale"), "compressed-tensors": ("_scale",), "fbgemm_fp8": ("_scale",)}
"""What may follow the name of a weight in the name of its scale, by `quant_method`."""
FOUR_BITS = "mxfp4"
"""The `quant_method` of weights in 4 bits."""
BLOCKS = ("_blocks", "_scales")
"""What follows the name of such a weight."""
FOURS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of such a number mean (E2M1); the fourth is its sign."""


class Packing(NamedTuple):
    """How a checkpoint's weights are packed."""

    scales: tuple[str, ...]
    """What may follow the name of a weight in the name of its scale."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None where all do, or all of a row."""
    bits: int = 8
    """Of a number, 8 or 4."""

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
        names = [name + end for end in self.scales]
        if (found := next((each for each in names if each in stored), None)) is None:
            raise InputError(f"the checkpoint has '{name}' in 8 bits and no scale ('{names[0]}'): fetch it again")
        return found


def packing(config: Any) -> Packing | None:
    """Return how the weights of a model are packed, by its config; None if they are not, or in no way known here.

    Raises:
        InputError: the config says it in a form that is none.
    """
    about = quantization(config)
    method = about.get("quant_method")
    if getattr(config, "modegpt", None) or not isinstance(method, str):
        return None
    if method == FOUR_BITS:
        return Packing(BLOCKS[1:], None, bits=4)
    if method not in SCALES:
        return None
    known, block = about.get("expert_dtype", "fp8") == "fp8", about.get("weight_block_size")
    if method == "compressed-tensors":
        groups = about.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
        blocks = [each.get("block_structure") for each in weights]
        # A transform turns the weights at run time, and a sparse format leaves some of them out.
        sparsity = (about.get("sparsity_config") or {}).get("format") or "dense"
        simple = not about.get("transform_config") and sparsity == "dense"
        alike = len(weights) == len(groups) > 0 and blocks.count(blocks[0]) == len(blocks)
        known, block = about.get("format") == "float-quantized" and simple and alike, blocks[0] if blocks else None
    return Packing(SCALES[method], _block(block)) if known else None


def _block(said: Any) -> tuple[int, int] | None:
    """Read the size of a block: two numbers, or a text such as `128x128`."""
    if not said:
        return None
    sizes = said.split("x") if isinstance(said, str) else said
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise InputError(f"the config's quantization has blocks of {said!r}: give two numbers, rows and columns")
    return rows, columns


def quantization(config: Any) -> dict[str, Any]:
    """Return what a config says of the quantization of its model; nothing if it says nothing."""
    about = getattr(config, "quantization_config", None) or {}
    return about if isinstance(about, dict) else about.to_dict()


def plain(config: Any) -> Any:
    """Return the config of the unpacked model; the config itself where nothing is packed, or in no way known here.

    A dtype of 8 bits, or none, becomes bfloat16.
    """
    if packing(config) is None:
        return config
    config = copy.deepcopy(config)
    del config.quantization_config
    dtype = getattr(config, "dtype", None)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype is None or dtype.itemsize == 1:
        config.dtype = torch.bfloat16
    return config


def unpack(packed: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return `s q` in float32.

    Args:
        packed: `(rows, columns)`, or several of these stacked, as their scales are.
        scale: one number, `(rows,)` or `(rows, 1)`, or with a `block` one number for each: `(⌈rows / block[0]⌉,
            ⌈columns / block[1]⌉)`. Bytes are exponents of two, less 127.
        block: rows and columns that share a scale, or None.

    Raises:
        ValueError: the scale has another shape.
    """
    shape = tuple(packed.shape)
    if packed.ndim == 3 and scale.ndim and len(scale) == len(packed):
        return torch.stack([unpack(own, part, block) for own, part in zip(packed, scale, strict=True)])
    scale = torch.exp2(scale.to(torch.float32) - 127) if scale.dtype == torch.uint8 else scale.to(torch.float32)
    weight = packed.to(torch.float32)
    if scale.numel() == 1:
        return weight.mul_(scale.item())
    if packed.ndim != 2:
        raise ValueError(f"a weight of shape {shape} has scales of shape {tuple(scale.shape)}")
    rows, columns = shape
    if scale.numel() == rows and scale.shape[0] == rows:
        return weight.mul_(scale.view(rows, 1))
    if block is None or scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"a weight of shape {shape} has scales of shape {tuple(scale.shape)}")
    for strip, own in zip(weight.split(block[0]), scale, strict=True):
        strip.mul_(own.repeat_interleave(block[1])[:columns])
    return weight


def unpack_fours(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `2^(scale − 127) q` for each number `q`, `(experts, inputs, rows)`, exact in float32 and in bfloat16.

    One expert after another: beside the result there is one of them in float32.

    Args:
        blocks: `(experts, rows, inputs / 32, 16)` bytes.
        scales: `(experts, rows, inputs / 32)` bytes.
        dtype: of the result.

    Raises:
        ValueError: the scales have another shape.
    """
    if blocks.ndim != 4 or scales.shape != blocks.shape[:3]:
        raise ValueError(f"blocks of shape {tuple(blocks.shape)} have scales of shape {tuple(scales.shape)}")
    n_experts, n_rows, n_blocks, n_bytes = blocks.shape
    values = torch.tensor(FOURS + tuple(-value for value in FOURS))
    result = torch.empty(n_experts, 2 * n_bytes * n_blocks, n_rows, dtype=dtype)
    for target, own, exponents in zip(result, blocks, scales, strict=True):
        halves = torch.stack((own & 15, own >> 4), dim=-1).flatten(-2)
        numbers = torch.ldexp(values[halves.int()], exponents[..., None].int() - 127)
        target.copy_(numbers.flatten(1).mT)
    return result
