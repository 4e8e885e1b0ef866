"""The hidden states between two blocks: on the GPU, on the host once they outgrow a limit, and then on disk."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from .errors import WriteError


class HiddenStates:
    """A list of `(batch, tokens, d_model)` or other tensors: the first on a GPU, the next in memory, the rest in files.

    Args:
        max_bytes: memory the tensors may take; None for no limit.
        folder: where the files go, made when it is needed; by default the system's temporary folder. They vanish with
            this object.
        device: where they are used.
        device_bytes: of its own memory the tensors may take; 0 where it has none but the host's.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        folder: Path | None = None,
        device: torch.device | None = None,
        device_bytes: int = 0,
    ) -> None:
        """Start empty."""
        self._max_bytes, self._folder = max_bytes, folder
        self._device, self._device_bytes = device or torch.device("cpu"), device_bytes
        self._spill: tempfile.TemporaryDirectory[str] | None = None
        self._taken = {"device": 0, "host": 0}
        self._items: list[Tensor | tuple[Path, torch.dtype, torch.Size]] = []

    def __len__(self) -> int:
        return len(self._items)

    def copy(self) -> "HiddenStates":
        """Return a copy of every batch, under the same limit."""
        copied = self.another()
        for states in self:
            copied.append(states)
        return copied

    def another(self, times: float = 1) -> "HiddenStates":
        """Return an empty list under the same limit, or under so many times of it."""
        host = None if self._max_bytes is None else int(times * self._max_bytes)
        return HiddenStates(host, self._folder, self._device, int(times * self._device_bytes))

    @property
    def n_tokens(self) -> int:
        """Tokens of all batches; nothing is read for it."""
        shapes = (item.shape if isinstance(item, Tensor) else item[2] for item in self._items)
        return sum(batch * tokens for batch, tokens, _width in shapes)

    @property
    def spilled(self) -> int:
        """How many batches are on disk."""
        return sum(not isinstance(item, Tensor) for item in self._items)

    def append(self, states: Tensor) -> None:
        """Add a batch, on the device or in memory if it still fits under the limit there.

        Raises:
            WriteError: it does not, and the disk refuses it.
        """
        size = states.numel() * states.element_size()
        if self._taken["device"] + size <= self._device_bytes:
            self._taken["device"] += size
            self._items.append(states.to(self._device, copy=True))
            return
        if self._max_bytes is None or self._taken["host"] + size <= self._max_bytes:
            self._taken["host"] += size
            self._items.append(states.to("cpu", copy=True))
            return
        if self._spill is None:
            with self._refusals_explained():
                if self._folder is not None:
                    self._folder.mkdir(exist_ok=True)
                self._spill = tempfile.TemporaryDirectory(prefix="modegpt-hidden-", dir=self._folder)
        self._items.append((Path(self._spill.name) / str(len(self)), states.dtype, states.shape))
        self[len(self) - 1] = states

    def __setitem__(self, index: int, states: Tensor) -> None:
        """Replace a batch by one of the same shape and dtype, where it is."""
        item = self._items[index]
        if isinstance(item, Tensor):
            item.copy_(states)
            return
        with self._refusals_explained():  # numpy's own `tofile` keeps the reason to itself
            item[0].write_bytes(states.cpu().contiguous().view(torch.uint8).numpy().data)

    def in_place(self) -> Iterator[Tensor]:
        """Yield every batch where it is used, to be changed in place: it is kept when the next is asked for."""
        for index, (item, states) in enumerate(zip(self._items, self, strict=True)):
            # One on disk is a copy: the file that it is read from is written to.
            held = states.to(self._device, copy=not isinstance(item, Tensor))
            yield held
            if held is not item:
                self[index] = held

    @contextmanager
    def _refusals_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            where, go_on = self._folder or tempfile.gettempdir(), ", then go on with --resume" if self._folder else ""
            raise WriteError(
                f"hidden states could not be written to '{where}': {problem.strerror or problem}; "
                f"make room, or let more of them stay in memory (--max-host-memory){go_on}"
            ) from problem

    def __getitem__(self, index: int) -> Tensor:
        """Return a batch; one on disk as a copy, of which no more is read than is used."""
        item = self._items[index]
        if isinstance(item, Tensor):
            return item
        path, dtype, shape = item
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).view(dtype).view(shape)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))
