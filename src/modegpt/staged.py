"""One block of a run: its moments are taken and its modules compressed, in one stage or in two."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Architecture
from .blocks import Calibration, run_block
from .config import CompressionConfig
from .distributed import Team
from .moments import BlockMoments, record_moments
from .preparation import Source
from .report import Stopwatch
from .surgery import BlockOutcome, compress_block, needed_moments, stages


def measure_and_compress(
    block: nn.Module,
    index: int,
    calibration: Calibration,
    ranks: dict[str, int],
    source: Source,
    config: CompressionConfig,
    device: torch.device,
    team: Team,
    watch: Stopwatch,
    dense: Calibration | None = None,
) -> BlockOutcome:
    """Compress a dense block in place, on the hidden states that the blocks before it produce.

    The paper's solvers read the dense block. A solver that is `late` reads the MLP's moments from the block whose
    attention is already compressed, so that the refit makes up for what attention lost. With `dense`, the hidden
    states of the dense model after this block, it makes up for a share of what all blocks before lost, too.
    """
    outcome = None
    parts = stages(ranks, source.architecture, source.dims, config) or [()]
    for modules in parts:
        needed = needed_moments(modules, block, source.architecture, source.dims, config)
        # What an MLP adds behind a norm or a factor is not in the space of the drift.
        if dense is not None and "mlp" in modules and source.architecture.plain_mlp:
            needed = (*needed, "mlp_drift")
        moments = BlockMoments.zeros(source.dims, needed, device)
        with watch.stage("moments"):
            _measure(block, index, calibration, modules, source, moments, device, dense)
        team.sum_moments(moments)
        moments.check_finite(index)
        with watch.stage("decompose"):
            outcome = compress_block(
                block, source.architecture, source.dims, moments, ranks, config, source.config, index, modules, outcome
            )
        del moments
    assert outcome is not None
    return outcome


def _measure(
    block: nn.Module,
    index: int,
    calibration: Calibration,
    modules: Sequence[str],
    source: Source,
    moments: BlockMoments,
    device: torch.device,
    dense: Calibration | None,
) -> None:
    if not modules:
        return
    targets = iter(dense.hidden) if dense is not None and "mlp_drift" in moments.sums else None
    with ExitStack() as stack:
        stack.enter_context(record_moments(block, source.architecture, source.dims, moments))
        if "mlp" not in modules:
            stack.enter_context(mlp_at_rest(block, source.architecture))
        for output in run_block(block, index, calibration, device):
            if targets is not None:
                moments.update_drift(next(targets).to(device) - output)


@contextmanager
def mlp_at_rest(block: nn.Module, architecture: Architecture) -> Iterator[None]:
    """While the context is open, the block's MLP computes zeros: for passes that only read the attention."""
    names = [*architecture.up, architecture.down] if architecture.down else []
    modules: list[Any] = list(dict.fromkeys(block.get_submodule(name) for name in names))

    def zeros(width: int, leaves: bool) -> Any:
        def forward(x: Tensor) -> Tensor:
            if leaves:  # some blocks add to it in place
                return x.new_zeros(*x.shape[:-1], width)
            return x.new_zeros(()).expand(*x.shape[:-1], width)

        return forward

    for module in modules:
        module.forward = zeros(module.nf if hasattr(module, "nf") else module.out_features, module is modules[-1])
    try:
        yield
    finally:
        for module in modules:
            del module.forward
