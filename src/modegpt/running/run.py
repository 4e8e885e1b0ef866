"""The run: blocks in order, each decomposed on what the blocks before it, already compressed, produce.

This is the only orchestrator; it reads like the paper's algorithm (Lin et al., ICLR 2025, Algorithms 1 to 3 and
Section 3.3).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..allocation import Allocation, alike, allocate
from ..blocks import Calibration, PrefetchedBlocks, advance
from ..checkpoint import compressed_config
from ..config import CompressionConfig
from ..decompose.psd import all_finite
from ..errors import InputError, NumericalError
from ..modeling_modegpt import shrink_block
from ..progress import Progress
from ..ranks.whole import LayerSizes, aligned, told
from ..report import Stopwatch, budget, peak_gpu_memory_bytes, peak_memory_bytes, protocol
from ..sums.full_float32 import full_float32
from .damage import hold_out, measure_damages, trial_ranks
from .dense_pass import DensePass
from .distributed import Team
from .embedding import Embedding
from .fisher import FisherProbe, stride
from .own_text import Writer, beginning
from .partial import PartialCheckpoint
from .scoring import InfluenceScorer, OutlierScorer, Scorer
from .source import Source, output_dtype
from .staged import BlockCompressor
from .surgery import BlockOutcome, cut_modules, rounded_tensors
from .text import Text


@dataclass
class Run:
    """One run: what every pass over the blocks needs."""

    source: Source
    text: Text
    config: CompressionConfig
    sizes: list[LayerSizes]
    device: torch.device
    team: Team
    watch: Stopwatch
    progress: Progress | None
    made: dict[tuple[float, int], Tensor] = field(default_factory=dict)
    """Coverage windows by share and seed: the runs of a sweep make them once."""
    spill: Path | None = None
    """Where hidden states go that memory has no room for; None for the system's temporary folder."""

    @property
    def embedding(self) -> Embedding:
        """How windows enter the blocks."""
        seq_len = self.text.windows.shape[1]
        return Embedding(self.source, self.config, seq_len, self.device, self.team, self.watch, self.spill)

    @property
    def _allotted(self) -> list[LayerSizes]:
        """Sizes in the steps in which ranks are allotted, unless they are given."""
        if self.config.round_to is None and self.config.plan is None:
            return aligned(self.sizes, self.out_dtype.itemsize)
        return self.sizes

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the written weights."""
        return output_dtype(self.config, self.source)

    @full_float32()
    def in_memory(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Run, and return all tensors of the compressed model and the report."""
        state: dict[str, Tensor] = {}

        def keep(index: int, tensors: dict[str, Tensor], outcome: BlockOutcome) -> None:
            state.update(tensors)

        self.check()
        scores = self.scores()
        allocation = self.allocate(scores)
        outcomes = self.compress_blocks(allocation, self.coverage(), lambda index: None, keep)
        state |= dict(self._other_tensors())
        return state, self.report(allocation, scores, outcomes)

    @full_float32()
    def to_folder(self, partial: PartialCheckpoint | None) -> dict[str, Any]:
        """Run, writing each layer as it is done, and return the report. Only the main process has a `partial`."""
        self.spill = self.team.agree(partial.hidden if partial else None)
        try:
            return self._to_folder(partial)
        except (NumericalError, InputError) as problem:
            # A wrong call has cost nothing yet; the layers of a broken model would not mend it.
            if partial is not None and (isinstance(problem, NumericalError) or not partial.holds_work()):
                partial.discard()
            raise
        finally:
            if partial is not None:
                partial.release()

    def _to_folder(self, partial: PartialCheckpoint | None) -> dict[str, Any]:
        self.check()
        scores = self._once("scores", self.scores, partial)
        allocation = self.allocate(scores)
        coverage = self._once("coverage", self.coverage, partial)
        n_finished = self.team.agree(partial.finished_layers() if partial else 0)

        def read(index: int) -> tuple[dict[str, Tensor], BlockOutcome] | None:
            if index >= n_finished:
                return None
            return self.team.agree(partial.read_layer(index) if partial else None)

        def write(index: int, tensors: dict[str, Tensor], outcome: BlockOutcome) -> None:
            if partial is not None:
                with self.watch.stage("write"):
                    partial.write_layer(index, tensors, outcome)

        outcomes = self.compress_blocks(allocation, coverage, read, write)
        if partial is None:
            return self.report(allocation, scores, outcomes)
        with self.watch.stage("write"):
            other = dict(self._other_tensors())
        report = self.report(allocation, scores, outcomes)
        config = self.compressed_config([outcome.layer for outcome in outcomes])
        report["fingerprint"] = partial.fingerprint
        partial.finish(other, len(outcomes), config, self.source.generation_config, self.text, report)
        return report

    def check(self) -> None:
        """Refuse, before the first pass over the blocks, what would else be refused after hours.

        Raises:
            InputError: the sparsity cannot be reached, whatever the scores.
            NumericalError: a tensor outside the blocks is NaN or infinite, or too large for float16.
        """
        self.allocate(alike(self.config.allocation, self.source.dims.n_layers))
        with self.watch.stage("load"):
            for _name, _tensor in self._other_tensors():  # one after another, so that no second copy is held
                pass

    def _once(
        self, name: str, compute: Callable[[], Tensor | None], partial: PartialCheckpoint | None
    ) -> Tensor | None:
        """Return what an earlier try kept under a name; else compute it, and keep it."""
        found = self.team.agree(partial.read_tensor(name) if partial else None)
        if found is None:
            found = compute()
            if partial is not None and found is not None:
                partial.write_tensor(name, found)
        return found

    @full_float32()
    def scores(self) -> Tensor | None:
        """Scores of the dense blocks for the allocation rule, from one pass; None for a rule that needs none."""
        if self.config.allocation == "error":
            return self._damages()
        scorer = self._scorer()
        if scorer is None:
            return None
        calibration = self.embedding.embed(self.team.share(self.text.windows))
        self._tell("scores", 0)
        for index in range(self.source.dims.n_layers):
            with self.watch.stage("load"):
                block = self.source.blocks.peek(index, self.device)
            with self.watch.stage("scores"), scorer.watch(block, index) as add:
                advance(block, index, calibration, self.device, add)
            del block
            self._tell("scores", index + 1)
        return scorer.scores()

    def _scorer(self) -> Scorer | None:
        """Return what scores blocks for the allocation rule; None for a rule that needs no scores."""
        rule, source = self.config.allocation, self.source
        if rule in ("influence", "influence-blocks"):
            return InfluenceScorer(source.dims.n_layers, source.architecture, rule == "influence-blocks", self.team)
        return OutlierScorer(source.architecture, self.config.owl_threshold, self.team) if rule == "owl" else None

    def _damages(self) -> Tensor:
        """Return the damage of every module, on text and on what the model writes, neither seen by the solvers."""
        coverage = self.coverage()
        seen, held = hold_out(self.text.windows, self.team.size)
        with self.watch.stage("scores"):
            held = torch.cat((held, self._written(len(held), held.shape[1], self.config.seed + 1)))
        if coverage is not None:
            seen = torch.cat((seen, coverage))
        sizes = self._allotted
        n_streams = sum(len(trial_ranks(size, self.config)) for size in sizes) + 2  # each trial's, and these two
        calibration = self.embedding.shared(seen, n_streams, texts=2)
        trial = self.embedding.embed(held, n_streams, texts=2)
        tell = functools.partial(self._tell, "scores")
        with self.watch.stage("scores"):
            return measure_damages(self.source, sizes, self.config, self.team, self.device, calibration, trial, tell)

    def coverage(self) -> Tensor | None:
        """Return windows to calibrate on beside the text, which the model writes; None where none are asked for."""
        windows, share, seed = self.text.windows, self.config.coverage_share, self.config.seed
        if share and (share, seed) not in self.made:
            count = max(1, round(share * len(windows)))
            with self.watch.stage("coverage"):
                self.made[share, seed] = self._written(count, windows.shape[1], seed)
        return self.made.get((share, seed))

    def _written(self, count: int, seq_len: int, seed: int) -> Tensor:
        """Return windows that the dense model writes."""
        source, tell = self.source, functools.partial(self._tell, "coverage")
        start = beginning(self.text.windows, self.text.about.get("start_token"))
        into, spare = self.embedding, self.config.host_to_spare
        writer = Writer(
            source.blocks, source.dims.n_layers, into.continued, into.caches, self.team, self.device, spare, tell
        )
        return writer.windows(count, seq_len, start, source.config.vocab_size, seed)

    def allocate(self, scores: Tensor | list[list[float]] | None) -> Allocation:
        """Turn scores into ranks under the budget."""
        config = self.config
        return allocate(
            config.allocation,
            self._allotted,
            config.sparsity,
            config.modules,
            scores=scores,
            temperature=config.temperature,
            max_sparsity=config.max_sparsity,
            round_to=config.round_to or 1,
            owl_lambda=config.owl_lambda,
            plan=config.plan,
        )

    def compress_blocks(
        self,
        allocation: Allocation,
        coverage: Tensor | None,
        read: Callable[[int], tuple[dict[str, Tensor], BlockOutcome] | None],
        keep: Callable[[int, dict[str, Tensor], BlockOutcome], None],
    ) -> list[BlockOutcome]:
        """Compress every block in order and return what was done to each.

        Args:
            allocation: the ranks.
            coverage: windows to calibrate on beside the text.
            read: gives a layer that an earlier try finished, or None.
            keep: takes the tensors of a layer that is done, by their names in the model.
        """
        config = self.config
        windows = self.text.windows if coverage is None else torch.cat((self.text.windows, coverage))
        feedback = self.source.runs_beside(config)
        calibration = self.embedding.shared(windows, streams=self.source.n_streams(config))
        # The dense model's own hidden states, for the solvers that make up for the drift from them.
        dense = calibration.copy() if feedback else None
        blocks = PrefetchedBlocks(self.source.blocks, self.device, self.source.dims.n_layers)
        shared = (self.source, config, self.device, self.team, self.watch)
        dense_pass = None
        if feedback:
            dense_pass = DensePass(*shared, self._probe(windows, blocks.peek), allocation.ranks)
        compressor = BlockCompressor(*shared, dense_pass)
        drifted = False
        outcomes: list[BlockOutcome] = []
        self._tell("compress", 0)
        for index in range(self.source.dims.n_layers):
            if (finished := read(index)) is not None:
                tensors, outcome = finished
                block = self._restore(index, tensors, outcome, dense)
                middle = None
                del tensors
            else:
                with self.watch.stage("load"):
                    block = blocks.take(index)
                ranks = allocation.ranks[index]
                outcome, middle = compressor.compress(block, index, calibration, ranks, dense, drifted)
                named = rounded_tensors(block, self.source.architecture, self.out_dtype).items()
                keep(index, self._checked({self._prefix(index) + name: tensor for name, tensor in named}), outcome)
                del named
            outcomes.append(outcome)
            drifted |= bool(cut_modules(allocation.ranks[index], self.source.block_dims(index)))
            if index + 1 < self.source.dims.n_layers:  # nothing reads what the last block gives
                with self.watch.stage("forward"):
                    compressor.hand_on(block, index, calibration, middle)
            del block, finished, middle
            self._tell("compress", index + 1)
        return outcomes

    def _probe(self, windows: Tensor, peek: Callable[[int], nn.Module]) -> FisherProbe:
        """Return what tells the last blocks which neurons the logits feel."""
        source, numbers = self.source, self.team.share(torch.arange(len(windows)))
        head = source.config.vocab_size * source.dims.d_model
        every = stride(head, sum(size.total for size in self.sizes), windows.shape[1])
        return FisherProbe(source.blocks, peek, source.dims.n_layers, numbers, self.device, self.config.seed, every)

    def _restore(
        self, index: int, tensors: dict[str, Tensor], outcome: BlockOutcome, dense: Calibration | None
    ) -> nn.Module:
        """Rebuild a finished block from its tensors."""
        source = self.source
        if dense is None:
            block = source.blocks.blank(index, self.device)
        else:
            block = source.blocks.take(index, self.device)
            advance(block, index, dense, self.device)
        shrink_block(block, source.architecture.describe(), outcome.layer, source.config)
        own = {name.removeprefix(self._prefix(index)): tensor for name, tensor in tensors.items()}
        block.load_state_dict(own)
        return block

    def _prefix(self, index: int) -> str:
        return f"{self.source.blocks.prefix}.{index}."

    def _other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what stands outside the blocks as it is to be written, by name.

        Raises:
            NumericalError: a tensor is NaN or infinite, or too large for float16.
        """
        for name, tensor in self.source.blocks.other_tensors().items():
            if not tensor.is_floating_point():
                yield name, tensor.clone()
                continue
            if not all_finite(tensor):
                raise NumericalError(f"NaN or infinity in '{name}': check the model's weights")
            yield from self._checked({name: tensor.to(self.out_dtype, copy=True)}).items()

    def _checked(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors that are to be written, if float16, whose range is that of no other dtype here, holds them."""
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float16 and not all_finite(tensor):
                raise NumericalError(f"'{name}' is too large for float16: ask for bfloat16 or float32")
        return tensors

    def compressed_config(self, layers: list[dict[str, int]]) -> Any:
        """Return the config of the result."""
        config = compressed_config(self.source.config, self.source.architecture, layers)
        config.dtype = self.out_dtype
        return config

    def report(self, allocation: Allocation, scores: Tensor | None, outcomes: list[BlockOutcome]) -> dict[str, Any]:
        """Return the run's report; its keys are documented in docs/json-output.md."""
        config, source = self.config, self.source
        n_parameters = sum(parameter.numel() for parameter in source.blocks.model.parameters())
        return {
            "model": source.name,
            "architecture": source.architecture.model_type,
            "calibration": self.text.about,
            "config": config.as_dict(),
            **budget(self.sizes, allocation.ranks, n_parameters, config.asked),
            "allocation": {
                "rule": config.allocation,
                "temperature": allocation.temperature,
                "scores": None if scores is None else scores.tolist(),
            },
            "layers": [
                {
                    "sparsity": sparsity,
                    "ranks": told(ranks, size.unranked),
                    "error": outcome.error,
                    "shape": outcome.layer,
                }
                for sparsity, size, ranks, outcome in zip(
                    allocation.sparsities, self.sizes, allocation.ranks, outcomes, strict=True
                )
            ],
            "warnings": source.notes + allocation.warnings + [note for o in outcomes for note in o.repairs],
            **protocol(),
            "processes": self.team.size,
            "seconds": self.watch.seconds(),
            "peak_memory_bytes": peak_memory_bytes(),
            "peak_gpu_memory_bytes": peak_gpu_memory_bytes(self.device),
        }

    def _tell(self, stage: str, done: int, total: int | None = None) -> None:
        if self.progress is not None:
            self.progress(stage, done, total or self.source.dims.n_layers)
