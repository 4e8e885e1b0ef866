"""Several processes on one calibration text: each takes its share of the sequences, and moments are summed.

Started by `torchrun`, which sets the environment this reads. Gloo joins CPUs, NCCL joins GPUs.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, ModegptError, first_line
from ..moments import BlockMoments

PATIENCE = timedelta(days=7)
"""How long processes wait for one another: the main one alone writes the checkpoint, and that may take hours. A process
that died is noticed at once, as its connections close."""
STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` sets in the environment."""


class LostRankError(ModegptError):
    """Another process of the run has died. Exit code 1."""


@dataclass(frozen=True)
class Team:
    """The processes of a run; one process is a team of its own."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def share(self, windows: Tensor) -> Tensor:
        """Return this process's part of the `(samples, seq_len)` windows.

        Raises:
            InputError: there are fewer windows than processes.
        """
        if len(windows) < self.size:
            raise InputError(f"{len(windows)} calibration sequences cannot be split over {self.size} processes")
        return windows[self.rank :: self.size]

    def sum_moments(self, moments: BlockMoments, layer: int) -> None:
        """Add the moments of all processes, in place: afterwards every process decomposes the same sums.

        Raises:
            NumericalError: a sum is not finite; names the layer and the matrix.
            LostRankError: one of the processes is gone.
        """
        if self.size > 1 and moments.sums:
            for total in moments.sums.values():
                self.sum_(total)
            device = next(iter(moments.sums.values())).device  # NCCL sums what is on its GPU
            moments.n_tokens = self.sum_(torch.tensor([moments.n_tokens], dtype=torch.float64, device=device)).item()
        moments.check_finite(layer)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all processes, in place.

        Raises:
            LostRankError: one of them is gone.
        """
        if self.size > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as problem:
                raise LostRankError(self._lost(problem)) from problem
        return tensor

    def agree(self, value: Any) -> Any:
        """Return the main process's value on every process."""
        if self.size == 1:
            return value
        box = [value]
        try:
            dist.broadcast_object_list(box)
        except RuntimeError as problem:
            raise LostRankError(self._lost(problem)) from problem
        return box[0]

    def _lost(self, problem: RuntimeError) -> str:
        dead = f"process {self.rank}: another process of this run has died ({first_line(problem)})"
        return f"{dead}; start all of them again with --resume"


def started_together() -> bool:
    """Tell whether this is one of several processes of one run: a part of what `torchrun` sets alone says nothing."""
    return all(os.environ.get(name) for name in STARTED) and int(os.environ["WORLD_SIZE"]) > 1


def join_team(device: torch.device) -> Team:
    """Join the processes that `torchrun` started; without it, return a team of one.

    Args:
        device: `cuda` selects NCCL and this process's GPU by `LOCAL_RANK`.
    """
    if not started_together():
        return Team()
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # NCCL knows what is on a GPU alone, and scores and finished layers are on the host.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    return Team(dist.get_rank(), dist.get_world_size())


def leave_team() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
