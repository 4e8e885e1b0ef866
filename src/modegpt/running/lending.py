"""A model in memory is lent to a run: how the run needs it, and as it was before."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from ..errors import InputError
from ..evaluate import evaluating
from ..observing.in_turn import in_turn

_LENT: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()
"""Models that are lent now, and to which thread."""
_GUARD = threading.Lock()


@contextmanager
def lent(model: object) -> Iterator[None]:
    """Keep a model in memory as a run needs it, and give it back as it was.

    It is in evaluation mode, as dropout would be measured with the rest, its experts run one after another, and its
    attention on a kernel that is told by a mask what each token sees.

    Raises:
        InputError: a run in another thread has it.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    with _to_one_thread(model), evaluating(model), in_turn(model), _masked(model), _with_its_blocks(model):
        yield


@contextmanager
def _to_one_thread(model: PreTrainedModel) -> Iterator[None]:
    """Let no other thread have the model: a run takes its blocks out, and another one would find them gone."""
    own = threading.get_ident()
    with _GUARD:
        holder = _LENT.get(model, own)
        nested = model in _LENT
        if holder != own:
            raise InputError("the model is at work in another thread: wait for that, or give a copy (copy.deepcopy)")
        _LENT[model] = own
    try:
        yield
    finally:
        if not nested:
            with _GUARD:
                del _LENT[model]


@contextmanager
def _masked(model: PreTrainedModel) -> Iterator[None]:
    """Let attention run on SDPA or eagerly: flash kernels know a window by themselves, flex has masks of its own."""
    before = model.config._attn_implementation
    if before is None or before in ("eager", "sdpa"):
        yield
        return
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _with_its_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Put the blocks back at the end: a generator that is interrupted, and kept by its traceback, does not."""
    lists = [(module, list(module)) for module in model.modules() if isinstance(module, nn.ModuleList)]
    try:
        yield
    finally:
        for modules, own in lists:
            for index, module in enumerate(own):
                modules[index] = module
