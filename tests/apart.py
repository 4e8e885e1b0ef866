"""A device whose tensors are apart from the CPU's, as a GPU's are, on any machine: what mixes the two raises.

Its tensors are wrappers around CPU tensors, and compute what these would. For a process of its own: the backend that it
registers stays, and two of torch's functions are replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("apart")
DEVICE = torch.device("apart:0")
CPU = torch.device("cpu")
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""They take indices from the CPU on every device; and tensors without dims go with all."""


class Apart(Tensor):
    """A tensor on the device."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Apart":
        """Wrap a tensor; views of it stay views."""
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = Tensor._make_wrapper_subclass(cls, raw.size(), device=DEVICE, **layout)
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    def tolist(self) -> Any:
        """Return what is not defined for subclasses."""
        return self.raw.tolist()

    def __repr__(self) -> str:
        return f"Apart({self.raw})"


class Here(TorchDispatchMode):
    """While it is entered, the device is known."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute on CPU tensors what a function gives on tensors that are apart, or are to be."""
    wanted = kwargs.get("device")
    if function is aten._to_copy.default:
        there = isinstance(args[0], Apart) if wanted is None else torch.device(wanted).type == "apart"
        kept = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")}
        raw = aten._to_copy.default(args[0].raw if isinstance(args[0], Apart) else args[0], **kept)
        return Apart(raw) if there else raw
    flat, shape = tree_flatten((args, dict(kwargs)))
    there = any(isinstance(each, Apart) for each in flat)
    if there:
        check(function, args, flat)
    if wanted is not None:
        there = torch.device(wanted).type == "apart"
    flat = [each.raw if isinstance(each, Apart) else CPU if each == DEVICE else each for each in flat]
    plain, named = tree_unflatten(flat, shape)
    given = {id(each.raw): each for each in tree_flatten((args, dict(kwargs)))[0] if isinstance(each, Apart)}

    def wrap(made: Any) -> Any:
        if not isinstance(made, Tensor) or not there:
            return made
        known = given.get(id(made))  # in place, a function gives back what it was given
        return Apart(made) if known is None else known

    return tree_map(wrap, function(*plain, **named))


def check(function: Any, args: Sequence[Any], flat: Sequence[Any]) -> None:
    """Raise where a GPU would: tensors of both places meet."""
    if function is aten.copy_.default:
        return
    foreign = [each for each in flat if isinstance(each, Tensor) and not isinstance(each, Apart) and each.ndim]
    if function in INDEXING:
        values = args[2] if len(args) > 2 else None
        foreign = [each for each in (args[0], values) if any(each is other for other in foreign)]
    inside = isinstance(args[0], Tensor) and not isinstance(args[0], Apart) and function._schema.is_mutable
    if foreign or inside:
        raise RuntimeError(f"{function}: some tensors are apart and some on the CPU")


_tensor, _generator = torch.tensor, torch.Generator


def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Stand in for `torch.tensor`, which fills memory itself."""
    made = _tensor(data, **options)
    return made if device is None else made.to(device)


def generator(device: Any = "cpu") -> torch.Generator:
    """Stand in for `torch.Generator`, of which the device has none."""
    return _generator(CPU if torch.device(device).type == "apart" else device)


def install() -> None:
    """Replace what cannot be dispatched. Libraries that name `torch.Generator` in annotations must be imported."""
    torch.tensor, torch.Generator = tensor, generator
