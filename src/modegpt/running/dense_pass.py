"""The dense model's pass over a block that is compressed beside it: it measures what chooses, and gives the target."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

from ..blocks import Calibration, advance
from ..config import CompressionConfig
from ..hidden_states import HiddenStates
from ..moments import BlockMoments, record_moments
from ..observing.normed_outputs import NormedOutputs
from ..report import Stopwatch, room_bytes
from .distributed import Team
from .fisher import FisherProbe
from .source import Source
from .surgery import blank_moments, cut_modules

EVERY = 3
"""Of the dense model's tokens, every third decides what neurons tell of each other: a third of the work for their
moment. How much each is used is told by all. In the first block, which costs most, all decide both (docs/log.md)."""
AHEAD_BYTES = 2**31
"""What may be held of the last blocks, which are measured together where that fits: else they run twice."""
AHEAD_PART = 4
"""Of a GPU's free memory a quarter is for that, where it is more: four blocks of a 7B model take 25 GB."""


@dataclass
class DenseSide:
    """What the dense model tells of one block."""

    attention: BlockMoments
    """By which query-key and value-output are compressed."""
    neurons: BlockMoments
    """By which the MLP's neurons are chosen."""
    normed: NormedOutputs | None = None
    """What the MLP puts out, where a norm follows and it is to be compressed."""


def room_ahead(device: torch.device) -> int:
    """Return how many bytes may be held of the last blocks on a device."""
    return room_bytes(device, AHEAD_BYTES, AHEAD_PART)


def held_bytes(source: Source, moments: int, n_tokens: int, every: int, itemsize: int) -> int:
    """Return what is held of a block that is measured before it is asked for.

    Its moments and hidden states, what a norm behind its MLP reads, and what waits for the gradients of the logits.

    Args:
        source: of the model.
        moments: their bytes.
        n_tokens: of this process's windows.
        every: so manieth token is probed.
        itemsize: bytes of a number where blocks run.
    """
    dims, n_outputs = source.block_dims(source.dims.n_layers - 1), bool(source.architecture.mlp_norm)
    states = (1 + n_outputs) * n_tokens * dims.d_model * itemsize
    probed = -(-n_tokens // every) * (dims.d_int + n_outputs * dims.d_model) * 4
    return moments + states + probed + dims.d_int * dims.d_model * itemsize


@dataclass(frozen=True)
class DensePass:
    """Takes the dense model's hidden states through blocks, one after another, and measures them.

    The neurons of the last blocks are chosen by what the logits feel, too, which is known when the dense model has
    run to its end (`FisherProbe`). So where there is room for it, these blocks are measured on the way there.
    """

    source: Source
    config: CompressionConfig
    device: torch.device
    team: Team
    watch: Stopwatch
    probe: FisherProbe | None = None
    ranks: Sequence[dict[str, int]] = ()
    """Of all layers, to measure those to come; without them each is measured when it is asked for."""
    ahead: dict[int, tuple[DenseSide, HiddenStates]] = field(default_factory=dict)
    """By layer, what was measured before it was asked for, and the hidden states behind it."""

    def over(self, block: nn.Module, index: int, dense: Calibration, ranks: dict[str, int], drifted: bool) -> DenseSide:
        """Return the moments of a dense block on the dense model's states, which become those behind it.

        Args:
            block: dense block `index`.
            index: its layer number.
            dense: the dense model's hidden states before it.
            ranks: of its modules.
            drifted: whether a block before it was compressed.

        Raises:
            NumericalError: a moment is not finite, or the logits are not.
        """
        with self.watch.stage("moments"):
            if index not in self.ahead:
                side = self._reach(block, index, dense, ranks, drifted)
            else:
                side, dense.hidden = self.ahead.pop(index)
        for moments in (side.attention, side.neurons):
            self.team.sum_moments(moments, index)
        return side

    def _reach(
        self, block: nn.Module, index: int, dense: Calibration, ranks: dict[str, int], drifted: bool
    ) -> DenseSide:
        """Measure a block, and with it all that follow where that is to be done, and fits."""
        side = self._blank(block, index, ranks, drifted)
        if self.probe is not None and "fisher" in side.neurons.sums and not self.probe.ready:
            to_come = range(index + 1, self.source.dims.n_layers)
            # All processes do the same: they sum their moments together.
            if self.ranks and self.team.agree(self._fit(1 + len(to_come), side, block, dense)):
                self._measure(side, block, index, dense)
                self._measure_all(dense, to_come, drifted)
                return side
            self.probe.take(block, index, dense)
        self._measure(side, block, index, dense)
        return side

    def _fit(self, n_blocks: int, side: DenseSide, block: nn.Module, dense: Calibration) -> bool:
        """Tell whether so many blocks may be measured together: not where memory is short."""
        assert self.probe is not None
        sums = (*side.attention.sums.values(), *side.neurons.sums.values())
        itemsize = self.source.architecture.projection(block, "down").weight.element_size()
        each = held_bytes(
            self.source, sum(total.nbytes for total in sums), dense.hidden.n_tokens, self.probe.every, itemsize
        )
        return self.config.host_to_spare and n_blocks * each <= room_ahead(self.device)

    def _measure_all(self, dense: Calibration, to_come: range, drifted: bool) -> None:
        """Measure all further blocks of the model, and differentiate the logits; `dense` stays as it is before them."""
        assert self.probe is not None
        present = dense
        for layer in to_come:
            present = present.copy()
            drifted |= bool(cut_modules(self.ranks[layer - 1], self.source.block_dims(layer - 1)))
            block = self.probe.peek(layer)
            coming = self._blank(block, layer, self.ranks[layer], drifted)
            self._measure(coming, block, layer, present)
            self.ahead[layer] = coming, present.hidden
        self.probe.differentiate(present.hidden)

    def _blank(self, block: nn.Module, index: int, ranks: dict[str, int], drifted: bool) -> DenseSide:
        """Return what is to be measured of a block, of no tokens yet."""
        architecture, modules = self.source.architecture, cut_modules(ranks, self.source.block_dims(index))
        more, every = [], 1
        if "mlp" in modules and not architecture.experts:
            if drifted:
                more, every = ["mlp_energy"], EVERY
            if len(architecture.up) == 2:
                more.append("gate")
            if self.probe is not None and self.probe.reaches(index):
                more.append("fisher")

        def blank(of: Sequence[str], more: Sequence[str] = (), every: int = 1) -> BlockMoments:
            return blank_moments(of, block, architecture, self.source.dims, self.config, self.device, more, every)

        attention = blank([module for module in modules if module != "mlp"])
        return DenseSide(attention, blank([module for module in modules if module == "mlp"], more, every))

    def _measure(self, side: DenseSide, block: nn.Module, index: int, dense: Calibration) -> None:
        """Add the dense model's states, which become those behind the block."""
        architecture = self.source.architecture
        with ExitStack() as stack:
            if self.probe is not None and "fisher" in side.neurons.sums:
                stack.enter_context(self.probe.record(block, architecture, dense, side.neurons.sums["fisher"]))
            norm = architecture.output_norm(block)
            if side.neurons.sums and norm is not None:
                side.normed = NormedOutputs(dense.hidden.another())
                stack.enter_context(side.normed.record(norm))
            rms = None if side.normed is None else side.normed.rms
            for moments in (side.attention, side.neurons):
                if moments.sums:
                    by_norm = moments is side.neurons
                    recorder = record_moments(
                        block, architecture, self.source.dims, moments, dense.weights, by_norm, dense.offsets, rms
                    )
                    stack.enter_context(recorder)
            advance(block, index, dense, self.device)
