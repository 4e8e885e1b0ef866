"""One block of a run: its moments are taken and its modules compressed, in one stage or in two."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..architectures.access import Layout
from ..architectures.fused import width_of
from ..blocks import Calibration, advance, run_block
from ..config import CompressionConfig
from ..decompose import NotPositiveDefiniteError
from ..errors import NumericalError
from ..moments import BlockMoments, record_moments
from ..observing.at_rest import at_rest, attention_at_rest
from ..observing.experts import Routed, told
from ..observing.inputs import inputs_of
from ..observing.normed_outputs import NormedOutputs
from ..report import Stopwatch, room_bytes
from ..sums.token_weights import bounded_astray, weighed_by_norm
from .dense_pass import DensePass
from .distributed import Team
from .expert_refit import ExpertRefit
from .source import Source, output_dtype
from .surgery import (
    BlockOutcome,
    blank_moments,
    compress_block,
    cut_modules,
    refit_down,
    round_weights,
    stages,
)

KEPT_BYTES = 2**30
"""Activations of one block's MLP that are kept from the pass that measures to the one that hands on, where they fit."""
KEPT_PART = 8
"""Of a GPU's free memory an eighth is for them, where that is more."""


@dataclass
class Middle:
    """Says that a calibration holds the residual stream behind a block's attention: the MLP is still to run."""

    activations: list[Tensor] | None = None
    """What its down projection reads, by batch; None where they were too many to keep."""
    sent: list[list[Routed]] | None = None
    """The same of experts."""


@dataclass(frozen=True)
class BlockCompressor:
    """Measures and compresses blocks, one after another."""

    source: Source
    config: CompressionConfig
    device: torch.device
    team: Team
    watch: Stopwatch
    dense_pass: DensePass | None = None
    """Where the dense model goes beside."""

    def compress(
        self,
        block: nn.Module,
        index: int,
        calibration: Calibration,
        ranks: dict[str, int],
        dense: Calibration | None = None,
        drifted: bool = True,
    ) -> tuple[BlockOutcome, Middle | None]:
        """Compress a dense block in place, on the hidden states that the blocks before it produce.

        The paper's solvers read the dense block. One that is `late` reads the MLP's moments from the block whose
        attention is already compressed, so that the refit makes up for what attention lost. With `dense`, the hidden
        states of the dense model before this block, it makes up for what all blocks before lost, too: these states
        are advanced here, all that is chosen is chosen by what they give, and the MLP is refitted to what they become.
        `drifted` says whether a block before this one was compressed.

        Returns:
            What was done, and whether `calibration` now holds the hidden states behind the compressed attention: then
            the block's second half is all that is still to run (`hand_on`).
        """
        if dense is not None:
            return self._beside(block, index, calibration, ranks, dense, drifted)
        outcome, middle = None, None
        architecture, dims = self.source.architecture, self.source.block_dims(index)
        for modules in stages(ranks, architecture, dims, self.config) or [()]:
            if outcome is not None:
                # All but the MLP is final: what follows it must be what the written weights give.
                mlp = (*architecture.up, architecture.down, architecture.experts)
                round_weights(block, architecture, output_dtype(self.config, self.source), besides=mlp)
                middle = Middle() if architecture.adds_mlp else None
            moments = blank_moments(modules, block, architecture, dims, self.config, self.device)
            with self.watch.stage("moments"):
                self._measure(block, index, calibration, modules, moments, middle)
            self.team.sum_moments(moments, index)
            outcome = self._decide(block, index, ranks, modules, moments, outcome)
            del moments
        assert outcome is not None
        return outcome, middle

    def hand_on(self, block: nn.Module, index: int, calibration: Calibration, middle: Middle | None) -> None:
        """Replace the hidden states by what the compressed block makes of them."""
        architecture = self.source.architecture
        if middle is None:
            advance(block, index, calibration, self.device)
        elif middle.activations is None:
            with ExitStack() as stack:
                stack.enter_context(attention_at_rest(block, architecture))
                if middle.sent is not None:
                    stack.enter_context(told(architecture.mixture(block), iter(middle.sent)))
                advance(block, index, calibration, self.device)
        else:
            down = architecture.projection(block, "down")
            for batch, states in enumerate(calibration.hidden):
                states = states.to(self.device)
                arguments = calibration.arguments.of(batch, states, index)
                with torch.no_grad():  # a family may run its MLP on all tokens in one row
                    output = down(middle.activations[batch]).view_as(states)
                    calibration.hidden[batch] = architecture.put_out(block, states, output, arguments)

    def _beside(
        self,
        block: nn.Module,
        index: int,
        calibration: Calibration,
        ranks: dict[str, int],
        dense: Calibration,
        drifted: bool,
    ) -> tuple[BlockOutcome, Middle | None]:
        source, dims = self.source, self.source.block_dims(index)
        assert self.dense_pass is not None
        modules, side = cut_modules(ranks, dims), self.dense_pass.over(block, index, dense, ranks, drifted)
        outcome, normed = self._decide(block, index, ranks, modules, side.attention, None, side.neurons), side.normed
        del side
        if "mlp" not in modules:
            return outcome, None
        if source.architecture.experts:
            return self._refit_experts(block, index, calibration, dense, outcome, normed)

        down = source.architecture.down
        # All but the down projection is final: what it reads must be what the written weights give.
        round_weights(block, source.architecture, output_dtype(self.config, source), besides=(down,))
        needed = ["mlp", "mlp_target", "target_energy"]
        if source.architecture.projection(block, "down").bias is not None:
            needed += ["mlp_sum", "target_sum"]
        moments = BlockMoments.zeros(replace(dims, d_int=ranks["mlp"]), needed, self.device)
        middle = None if source.architecture.parallel else Middle()
        with self.watch.stage("moments"):
            self._measure(block, index, calibration, ("mlp",), moments, middle, dense, normed)
        self.team.sum_moments(moments, index)
        with self.watch.stage("decompose"):
            outcome = refit_down(block, Layout.dense(source.architecture, dims), moments, index, outcome, drifted)
        return outcome, middle

    def _refit_experts(
        self,
        block: nn.Module,
        index: int,
        calibration: Calibration,
        dense: Calibration,
        outcome: BlockOutcome,
        normed: NormedOutputs | None,
    ) -> tuple[BlockOutcome, Middle | None]:
        """Refit the experts of a block that is compressed to the dense model's states behind it.

        Where a norm follows them, to what the dense model gives it (`normed`). The calibration is replaced by what
        follows the attention, unless that is beside them.
        """
        architecture, dtype = self.source.architecture, output_dtype(self.config, self.source)
        round_weights(block, architecture, dtype)
        experts, per_token = architecture.mixture(block), architecture.experts_per_token
        width = width_of(experts) * getattr(self.source.config, per_token)
        refit = ExpertRefit(experts, calibration.hidden, self._fits(calibration, width, experts.down_proj.dtype))
        with self.watch.stage("moments"), ExitStack() as stack:
            stack.enter_context(refit.record())
            middles = self._middles(block, stack)
            unknown = [None] * len(dense.hidden)
            outputs, into_norm = iter(()), list[Tensor]()
            if normed is not None:
                outputs = iter(normed.states)
                into_norm = stack.enter_context(inputs_of(architecture.output_norm(block)))
            wanted = zip(dense.hidden, dense.weights or unknown, normed.rms if normed else unknown, strict=True)
            for batch, output in enumerate(run_block(block, index, calibration, self.device)):
                states, weights, rms = next(wanted)
                states = states.to(self.device)
                weights = weighed_by_norm(weights, states, rms)
                if normed is None:
                    weights = bounded_astray(weights, states, output)
                    residual = architecture.lacking(block, states.float(), output.float())
                else:
                    residual = next(outputs).to(self.device).float() - into_norm.pop().float()
                refit.lacks(residual, weights)
                if middles is not None:
                    calibration.hidden[batch] = middles.pop()
        with self.watch.stage("decompose"):
            try:
                error = refit.run(self.team, dtype)
            except NotPositiveDefiniteError as problem:
                raise NumericalError(f"layer {index}, mlp: {problem}") from problem
        outcome = replace(outcome, error={**outcome.error, "mlp": error})
        return outcome, None if middles is None else Middle(sent=refit.sent)

    def _decide(
        self,
        block: nn.Module,
        index: int,
        ranks: dict[str, int],
        modules: Sequence[str],
        moments: BlockMoments,
        before: BlockOutcome | None,
        ahead: BlockMoments | None = None,
    ) -> BlockOutcome:
        source = self.source
        with self.watch.stage("decompose"):
            return compress_block(
                block, source.architecture, source.dims, moments, ranks, self.config, source.config, index, modules,
                before, ahead,
            )  # fmt: skip

    def _measure(
        self,
        block: nn.Module,
        index: int,
        calibration: Calibration,
        modules: Sequence[str],
        moments: BlockMoments,
        middle: Middle | None,
        dense: Calibration | None = None,
        normed: NormedOutputs | None = None,
    ) -> None:
        """Add to the moments of some modules.

        With a `middle`, the calibration is replaced by what follows the attention. With `dense`, the dense model's
        states behind this block, the target of the MLP, whose neurons are chosen, is what the output lacks of them; or,
        where its output is normed, what the dense one puts out (`normed`). Tokens then count by their norms.
        """
        if not modules:
            return
        architecture = self.source.architecture
        weights = calibration.weights
        wanted: deque[Tensor] = deque()  # what the dense model gives for the batch that runs
        if dense is not None:
            unknown = [None] * len(dense.hidden)
            known = zip(weights or unknown, self._moved(dense, wanted), normed.rms if normed else unknown, strict=True)
            weights = (weighed_by_norm(*each) for each in known)
        outputs = iter(()) if normed is None else iter(normed.states)
        idle = architecture.mlp_outputs(block)
        if "mlp" not in modules:
            idle += [*architecture.up, f"{architecture.attention}.{architecture.output}"]
        with ExitStack() as stack:
            stack.enter_context(
                record_moments(block, architecture, self.source.dims, moments, weights, offsets=calibration.offsets)
            )
            if middle is not None and dense is not None:
                down = architecture.projection(block, "down")
                width = down.weight.numel() // self.source.dims.d_model
                if self._fits(calibration, width, down.weight.dtype):
                    kept = middle.activations = []
                    stack.callback(down.register_forward_pre_hook(lambda _m, inputs: kept.append(inputs[0])).remove)
            middles = None if middle is None else self._middles(block, stack)
            # What these would give is read by nothing; where attention is beside them, a block gives its stream then.
            stack.enter_context(at_rest(block, idle))
            for batch, output in enumerate(run_block(block, index, calibration, self.device)):
                stream = output if middles is None else middles.pop().view_as(output)
                if wanted:
                    states = wanted.popleft()
                    if normed is None:
                        moments.update_target(architecture.lacking(block, states, stream))
                    else:
                        moments.update_target(next(outputs).to(self.device))
                if middle is not None:
                    calibration.hidden[batch] = stream

    def _middles(self, block: nn.Module, stack: ExitStack) -> list[Tensor] | None:
        """Return where every forward of a block adds the residual stream behind its attention, as long as the stack is.

        None where the MLP is beside the attention.
        """
        architecture = self.source.architecture
        if architecture.parallel:
            return None
        return stack.enter_context(inputs_of(architecture.middle_module(block)))

    def _moved(self, dense: Calibration, onto: deque[Tensor]) -> Iterator[Tensor]:
        """Yield the hidden states of a calibration on the device, and put them aside, too: each is moved once."""
        for states in dense.hidden:
            onto.append(states.to(self.device))
            yield onto[-1]

    def _fits(self, calibration: Calibration, width: int, dtype: torch.dtype) -> bool:
        """Tell whether activations of a width may be kept for all tokens: not where memory is short."""
        if not self.config.host_to_spare:
            return False
        needed = calibration.hidden.n_tokens * width * dtype.itemsize
        return needed <= room_bytes(self.device, KEPT_BYTES, KEPT_PART)
