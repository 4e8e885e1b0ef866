"""One model at several sparsities: compressed, measured, tabled and drawn, on scores that are computed once.

Layout of the folder: `points/dense.json`, `points/0.3.json`, ... (what was measured, each written at once when it is
done), `scores.json`, `models/0.3/` (the checkpoints, only while they are measured, or for good), and at the end
`sweep.json` and the plots `perplexity.svg`, `accuracy.svg` and `throughput.svg`, each where there are figures for it.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..benchmark import BenchSettings, benchmark, check_settings
from ..checkpoint import REPORT_NAME, read_json, write_json
from ..compress import prepare
from ..config import DTYPES, CompressionConfig
from ..errors import InputError
from ..inspection import describe
from ..loading.models import compute_dtype, open_model, resolve_device
from ..pages import plots
from ..pages.sweep_plots import draw
from ..progress import Progress
from ..report import Stopwatch, machine, mixed_dtypes, protocol
from ..running.fingerprint import run_fingerprint
from ..running.partial import IDENTITY, PartialCheckpoint, finished_report
from ..running.run import Run
from ..running.source import dense_config_of
from ..running.text import Text, open_text
from .in_turn import seen_text
from .measures import Measures, Quality
from .rows import Rows, check_call, shown

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
SPEED = BenchSettings(batch_sizes=(1,), lengths=(128,), new_tokens=32)
"""What is timed: one prompt is read and continued, by the compressed and the dense model in turn."""
DENSE = "dense"


def sweep(
    model: str | Path,
    calibration: str | Path,
    out: str | Path,
    sparsities: Sequence[float] = SPARSITIES,
    config: CompressionConfig | None = None,
    measures: Measures | None = None,
    *,
    keep_models: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compress a model at each sparsity and measure every point, and the dense model; draw both curves.

    The dense model is loaded once, and blocks are scored once. A point is compressed exactly as `compress` would, and
    measured as its checkpoint opens. Points that an earlier, equal call finished are not measured again.

    Args:
        model: hub name, folder or `.gguf` file.
        calibration: a known data set or a text file.
        out: folder for everything; it may hold an earlier sweep.
        sparsities: each above 0 and below 1; the dense model is always measured.
        config: the settings; its `sparsity` is not used.
        measures: what to measure.
        keep_models: whether the checkpoints stay, under `models/`.
        overwrite: measure everything anew, whatever the folder holds.
        progress: called with the point and its stage, the steps done and the steps in all.

    Returns:
        `model`, `calibration`, `config`, `measures`, `points`, `warnings` and `protocol`, as in `sweep.json`; the keys
        are in docs/json-output.md.

    Raises:
        InputError: the call is wrong, or the folder holds points of another model, data or setting, or another run.
        MissingExtraError: matplotlib is not installed.
    """
    plots.require_matplotlib("a sweep")
    out, config, measures = Path(out), config or CompressionConfig(), measures or Measures()
    check_call(config, out, ("points", "models"), "sweep", (model, calibration, *measures.data, *measures.tasks))
    configs = _configs(config, sparsities)
    with Rows(out / "points", out / "sweep.json", overwrite) as kept:
        work = _Sweep(str(model), calibration, out, config, measures, keep_models, overwrite, kept, progress)
        known = {name: work.finished(name, own) for name, own in ((DENSE, None), *configs.items())}
        work.begin([own for name, own in configs.items() if known[name] is None])
        points = [known[DENSE] or work.measure_dense()]
        points += [known[name] or work.measure_point(name, own) for name, own in configs.items()]
        table = {
            "model": str(model),
            "calibration": work.text.about,
            "config": {key: value for key, value in config.as_dict().items() if key != "sparsity"},
            "measures": work.about,
            "points": [shown(point) for point in points],
            "warnings": [*seen_text(str(calibration), measures.data), *work.notes, *mixed_dtypes(work.dtypes)],
            **protocol(),
        }
        write_json(table, out / "sweep.json")
        draw(table, out)
    return table


def _configs(config: CompressionConfig, sparsities: Sequence[float]) -> dict[str, CompressionConfig]:
    """Return the settings of each point, by its name."""
    if not sparsities:
        raise InputError("sparsity is empty: give some shares such as 0.1,0.2,0.3")
    configs = {f"{sparsity:.12g}": replace(config, sparsity=sparsity) for sparsity in sorted(sparsities)}
    if len(configs) < len(sparsities):
        raise InputError(f"sparsity {', '.join(f'{s:.12g}' for s in sparsities)} names a point twice; give each once")
    if min(sparsities) == 0:
        raise InputError("sparsity 0 is the dense model, which is measured anyway; leave it out")
    return configs


class _Sweep:
    """What all points share: the texts, the dense model, the opened run, the scores."""

    def __init__(
        self,
        model: str,
        calibration: str | Path,
        out: Path,
        config: CompressionConfig,
        measures: Measures,
        keep_models: bool,
        overwrite: bool,
        rows: Rows,
        progress: Progress | None,
    ) -> None:
        """Check everything, then open the texts, then the model."""
        self.out, self.measures, self.keep_models, self.progress = out, measures, keep_models, progress
        self.overwrite, self.rows = overwrite, rows
        self.device = resolve_device(config.device)
        dense_config, self.notes = dense_config_of(model)
        self.speed = replace(SPEED, repeats=measures.rounds) if measures.rounds else None
        if self.speed is not None:
            check_settings(self.speed, [dense_config], "with --rounds 0 nothing is timed")
        self.text: Text = open_text(calibration, config, model, None)
        self.quality = Quality(measures, dense_config, self.text.tokenizer)
        self.dtype = _stored_dtype(config, dense_config)
        self.dense = open_model(model, "auto", self.device)
        self.run: Run = prepare(self.dense, self.text.windows, replace(config, dtype=self.dtype), None, None)
        self.run.text, self.run.source.name = self.text, model

    @property
    def about(self) -> dict[str, Any]:
        """What is measured of a point, as JSON values."""
        speed = self.speed and {"batch_size": 1, "prompt_tokens": SPEED.lengths[0], "new_tokens": SPEED.new_tokens}
        told = {**asdict(self.measures), "seq_len": self.quality.window, "speed": speed}
        return {**told, "dtype": str(self.dense.dtype).removeprefix("torch.")}

    @property
    def dtypes(self) -> dict[str, str]:
        """What the dense model and the points are computed in: each in its own on a GPU."""
        own = compute_dtype(self.device, self.run.out_dtype)
        return {name: str(dtype).removeprefix("torch.") for name, dtype in ((DENSE, self.dense.dtype), ("points", own))}

    def finished(self, name: str, config: CompressionConfig | None) -> dict[str, Any] | None:
        """Return a point that an equal call has measured; refuse one of another call."""
        point = self.rows.finished(name, self._fingerprint(config))
        # A checkpoint that is wanted now and was not kept then takes the whole point again.
        missing = config is not None and self.keep_models and not (self.out / "models" / name).is_dir()
        return None if missing else point

    def begin(self, configs: Sequence[CompressionConfig]) -> None:
        """Refuse a sparsity that the settings cannot reach; only then make room for what is to be measured."""
        for config in configs:
            self._run(config, "").check()  # before the scores, which nothing has kept yet
        scores = self.scores if configs else None
        self.rows.begin()
        if self.overwrite:
            for folder in (self.out / "models").glob("*"):
                if any((folder / name).is_file() for name in (REPORT_NAME, IDENTITY)):  # ours, finished or not
                    shutil.rmtree(folder)
            self._scores_file.unlink(missing_ok=True)
        if scores is not None:
            write_json({"fingerprint": self._scores_identity(), "scores": scores.tolist()}, self._scores_file)

    def measure_dense(self) -> dict[str, Any]:
        """Measure the dense model."""
        n_parameters = sum(parameter.numel() for parameter in self.dense.parameters())
        measured = {
            "name": DENSE,
            "sparsity": {"requested": 0.0, "blocks": 0.0, "total": 0.0},
            "parameters": n_parameters,
            **self.quality.measure(self.dense, self._say(DENSE)),
            "speed": None,
        }
        return self.rows.keep(DENSE, measured, self._fingerprint(None))

    def measure_point(self, name: str, config: CompressionConfig) -> dict[str, Any]:
        """Compress as `modegpt compress` would, open what it wrote, and measure it."""
        start, folder = time.perf_counter(), self.out / "models" / name
        report = self._compress(name, config, folder)
        compressed, found = open_model(str(folder), "auto", self.device), describe(folder)
        seconds = {"compress": report["seconds"]["total"]}
        measured = {
            "name": name,
            "sparsity": report["sparsity"],
            "parameters": report["parameters"]["compressed"],
            "kv_bytes_per_token": found["kv_bytes_per_token"],
            "file_bytes": found["file_bytes"],
            "layers": [layer["ranks"] for layer in report["layers"]],
            "warnings": report["warnings"],
            **self.quality.measure(compressed, self._say(name)),
            "speed": self._speed(name, compressed),
            "seconds": {**seconds, "total": round(time.perf_counter() - start, 3)},
        }
        del compressed
        if not self.keep_models:
            _remove(folder)
        return self.rows.keep(name, measured, self._fingerprint(config))

    def _compress(self, name: str, config: CompressionConfig, folder: Path) -> dict[str, Any]:
        run = self._run(config, name)
        identity = self._identity(run)
        if (report := finished_report(folder, identity, overwrite=True)) is not None:
            return report  # killed between the last rename and the measurement
        folder.parent.mkdir(exist_ok=True)
        partial = PartialCheckpoint(folder, identity, resume=True, overwrite=True)
        if self.scores is not None:
            partial.write_tensor("scores", self.scores)
        return run.to_folder(partial)

    @cached_property
    def scores(self) -> Tensor | None:
        """Scores of the dense blocks, or those of an earlier, equal call; None for a rule without scores."""
        kept = read_json(self._scores_file) if self._scores_file.is_file() and not self.overwrite else {}
        if kept.get("fingerprint") == self._scores_identity():
            return torch.tensor(kept["scores"], dtype=torch.float64)
        return self._run(replace(self.run.config, sparsity=0.0), "").scores()

    @property
    def _scores_file(self) -> Path:
        return self.out / "scores.json"

    def _scores_identity(self) -> dict[str, Any]:
        return self._identity(self._run(replace(self.run.config, sparsity=0.0), ""))

    def _speed(self, name: str, compressed: PreTrainedModel) -> dict[str, Any] | None:
        if self.speed is None:
            return None
        _, (row,) = benchmark({"compressed": compressed, DENSE: self.dense}, self.speed, self._say(name))
        rates = {
            f"{task}_tokens_per_second": {
                model: row["models"][model][f"{task}_tokens_per_second"] for model in ("compressed", DENSE)
            }
            for task in ("prefill", "decode")
        }
        return {"speedup": row["speedups"][DENSE], **rates}

    def _run(self, config: CompressionConfig, name: str) -> Run:
        config = replace(config, dtype=self.dtype)
        return replace(self.run, config=config, watch=Stopwatch(self.device), progress=self._say(name))

    def _identity(self, run: Run) -> dict[str, Any]:
        return run_fingerprint(run.source, self.text, run.config, run.out_dtype, self.device)

    def _fingerprint(self, config: CompressionConfig | None) -> dict[str, Any]:
        """Return everything that decides a point, by field; the dense one does not depend on the compression."""
        identity = self._identity(self.run if config is None else self._run(config, ""))
        if config is None:
            shared = ("model", "model config", "device type", "versions")
            identity = {name: value for name, value in identity.items() if name in shared}
        timed = (
            {} if config is None else {"--rounds": self.measures.rounds, "machine": machine() if self.speed else None}
        )
        return {**identity, **self.quality.identity(), **timed}

    def _say(self, name: str) -> Progress | None:
        told = self.progress
        return told and (lambda stage, done, total: told(f"{name} {stage}".strip(), done, total))


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its report first: without that, what a kill leaves is not taken for a finished one."""
    (folder / REPORT_NAME).unlink()
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _stored_dtype(config: CompressionConfig, dense_config: Any) -> str:
    """Return the dtype that `compress` would write, which the model in memory no longer shows."""
    stored = str(getattr(dense_config, "dtype", None)).removeprefix("torch.")
    return stored if config.dtype == "auto" and stored in DTYPES else config.dtype
