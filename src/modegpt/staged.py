"""One block of a run: its moments are taken and its modules compressed, in one stage or in two."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from .at_rest import at_rest
from .blocks import Calibration, advance, run_block
from .config import CompressionConfig
from .distributed import Team
from .moments import BlockMoments, record_moments
from .preparation import Source, output_dtype
from .report import Stopwatch
from .surgery import BlockOutcome, compress_block, needed_moments, round_weights, stages


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
) -> tuple[BlockOutcome, bool]:
    """Compress a dense block in place, on the hidden states that the blocks before it produce.

    The paper's solvers read the dense block. A solver that is `late` reads the MLP's moments from the block whose
    attention is already compressed, so that the refit makes up for what attention lost. With `dense`, the hidden
    states of the dense model before this block, it makes up for a share of what all blocks before lost, too. They are
    advanced here, and where the MLP has a stage of its own, attention's moments are taken in that same pass.

    Returns:
        What was done, and whether `calibration` now holds the hidden states behind the compressed attention: the pass
        that read the MLP's moments has left them there, and the block's second half is all that is still to run.
    """
    outcome, halfway = None, False
    parts = stages(ranks, source.architecture, source.dims, config) or [()]
    for modules in parts:
        halfway = outcome is not None and bool(source.architecture.plain_mlp)
        if halfway:
            # All but the MLP is final: what follows it must be what the written weights give.
            mlp = (*source.architecture.up, source.architecture.down)
            round_weights(block, output_dtype(config, source), besides=mlp)
        needed = needed_moments(modules, block, source.architecture, source.dims, config)
        # What an MLP adds behind a norm or a factor is not in the space of the drift.
        if dense is not None and "mlp" in modules and source.architecture.plain_mlp:
            needed = (*needed, "mlp_target")
        moments = BlockMoments.zeros(source.dims, needed, device)
        # The dense model's states pass while the block is still the dense one.
        stream = dense if outcome is None else None
        with watch.stage("moments"):
            if stream is not None and "mlp" not in modules:
                with record_moments(block, source.architecture, source.dims, moments, stream.weights):
                    advance(block, index, stream, device)
            else:
                if stream is not None:
                    advance(block, index, stream, device)
                _measure(block, index, calibration, modules, source, moments, device, dense, halfway)
        team.sum_moments(moments)
        moments.check_finite(index)
        with watch.stage("decompose"):
            outcome = compress_block(
                block, source.architecture, source.dims, moments, ranks, config, source.config, index, modules, outcome
            )
        del moments
    assert outcome is not None
    return outcome, halfway


def _measure(
    block: nn.Module,
    index: int,
    calibration: Calibration,
    modules: Sequence[str],
    source: Source,
    moments: BlockMoments,
    device: torch.device,
    dense: Calibration | None,
    to_middle: bool,
) -> None:
    """Add to the moments of some modules; `to_middle` replaces the calibration by what follows the attention."""
    if not modules:
        return
    architecture = source.architecture
    targets = iter(dense.hidden) if dense is not None and "mlp_target" in moments.sums else None
    idle = [architecture.down] if architecture.down else []
    if "mlp" not in modules:
        idle += [*architecture.up, f"{architecture.attention}.{architecture.output}"]
    with ExitStack() as stack:
        stack.enter_context(record_moments(block, architecture, source.dims, moments, calibration.weights))
        # What these would give is read by nothing; without it, a block with a plain MLP gives its middle.
        stack.enter_context(at_rest(block, idle))
        for batch, output in enumerate(run_block(block, index, calibration, device)):
            if targets is not None:
                moments.update_target(next(targets).to(device) - output)
            if to_middle:
                calibration.hidden[batch] = output
