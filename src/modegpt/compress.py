"""Compressing a model: into memory, or into a folder as it goes. What happens to the blocks stands in `running/`."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from .checkpoint import build, check_apart, check_output
from .config import CompressionConfig
from .default_device import on_the_cpu
from .errors import InputError
from .loading.models import resolve_device
from .loading.shards import ShardBlocks
from .progress import Progress
from .report import Stopwatch
from .running.distributed import join_team
from .running.fingerprint import run_fingerprint
from .running.lending import lent
from .running.partial import PartialCheckpoint, clear_leftovers, finished_report
from .running.run import Run
from .running.sizes import layer_sizes
from .running.source import check_generation, open_source, require_model
from .running.text import check_ids, open_text


@on_the_cpu()
def compress(
    model: PreTrainedModel | str | Path,
    calibration: str | Path | Tensor,
    config: CompressionConfig | None = None,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Compress a causal language model without training.

    Args:
        model: a dense model in memory (left as it is), or a hub name, folder or `.gguf` file.
        calibration: a known data set, a text file, `python-docs`, or `(samples, seq_len)` token ids.
        config: the settings; by default the paper's protocol with the best solvers.
        tokenizer: needed when `model` is in memory and `calibration` is text; saved in `out`.
        out: folder to write the checkpoint and `report.json` to; None to write nothing.
        overwrite: whether an existing `out` is replaced.
        resume: whether to continue a run that was interrupted.
        progress: called as each stage begins, and after each block.

    Returns:
        The compressed model, on the CPU, in evaluation mode, with the run's report as `modegpt_report`.

    Raises:
        InputError: the call is wrong; nothing was loaded or written.
        NumericalError: NaN, infinity or an indefinite moment; names the layer and the matrix.
    """
    if out is not None:
        report = compress_to_folder(
            model, calibration, out, config, tokenizer=tokenizer, overwrite=overwrite, resume=resume, progress=progress
        )
        compressed = AutoModelForCausalLM.from_pretrained(out)
    else:
        run = prepare(model, calibration, config or CompressionConfig(), tokenizer, progress)
        with lent(model):
            state, report = run.in_memory()
        compressed = build(run.compressed_config([layer["shape"] for layer in report["layers"]]), state)
        if run.source.generation_config is not None:
            compressed.generation_config = copy.deepcopy(run.source.generation_config)
    compressed.modegpt_report = report  # pyright: ignore[reportArgumentType] - a plain attribute
    return compressed


@on_the_cpu()
def compress_to_folder(
    model: PreTrainedModel | str | Path,
    calibration: str | Path | Tensor,
    out: str | Path,
    config: CompressionConfig | None = None,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compress into a folder without ever holding the result: memory for one block, its moments, the hidden states.

    Every finished layer is on disk at once; a run that was interrupted goes on with `resume`, to the same bytes.
    Arguments and errors as for `compress`.

    Returns:
        The run's report, as in `report.json`.
    """
    # Of a model in memory, the folder that it came from.
    source = model if isinstance(model, str | Path) else getattr(model, "name_or_path", None) or None
    text = calibration if isinstance(calibration, str | Path) else None
    check_output(out, overwrite or resume, source, text)
    out = Path(out).resolve()  # of a link its target is replaced, and the link stays
    run = prepare(model, calibration, config or CompressionConfig(), tokenizer, progress)
    identity = run_fingerprint(run.source, run.text, run.config, run.out_dtype, run.device)
    if resume and (finished := finished_report(out, identity, overwrite)) is not None:
        if run.team.is_main:
            clear_leftovers(out, identity)  # the run may have been killed between its last rename and this
        return finished
    check_output(out, overwrite)
    check_generation(run.source)
    if isinstance(run.source.blocks, ShardBlocks):
        check_apart(out, run.source.blocks.files)
    partial, refusal = None, None
    if run.team.is_main:
        try:
            partial = PartialCheckpoint(out, identity, resume, overwrite)
        except InputError as problem:
            refusal = problem
    if (refusal := run.team.agree(refusal)) is not None:
        raise refusal
    with lent(model):
        report = run.to_folder(partial)
    run.team.agree(None)  # so that no process looks for the folder before the main one has put it there
    return report


def prepare(
    model: PreTrainedModel | str | Path,
    calibration: str | Path | Tensor,
    config: CompressionConfig,
    tokenizer: Any,
    progress: Progress | None,
) -> "Run":
    """Open the text and the model, in that order, and check them; the run itself has not begun."""
    if not isinstance(config, CompressionConfig):
        raise InputError(f"config is of type {type(config).__name__}; give a modegpt.CompressionConfig")
    device = resolve_device(config.device)
    team = join_team(device)
    watch = Stopwatch(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    require_model(model)
    model = model if isinstance(model, PreTrainedModel) else str(model)
    with watch.stage("text"):
        text = open_text(calibration, config, model, tokenizer)
    with watch.stage("load"):
        source = open_source(model, device)
    check_ids(text, source)
    sizes = [layer_sizes(block, source.architecture, source.dims) for block in source.blocks.layers]
    return Run(source, text, config, sizes, device, team, watch, progress if team.is_main else None)
