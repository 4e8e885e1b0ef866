"""Several methods on one model, text and sparsity: each measured alike, row by row.

Layout of the folder: `rows/dense.json`, `rows/flap-0.3.json`, ... (what was measured, each written at once when it is
done) and at the end `compare.json`.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .architectures import architecture_of
from .baselines import BASELINES, Reduced
from .checkpoint import read_json, write_json
from .compress import compress, lent, prepare
from .config import ALLOCATIONS, PRESETS, CompressionConfig
from .errors import InputError
from .measures import Measures, Quality
from .measuring import seen_text
from .models import open_model, outer_config, resolve_device
from .packed import plain
from .partial import check_fingerprint
from .preparation import open_source, open_text, run_fingerprint
from .report import protocol
from .run import Progress
from .text_part import about_text_part, text_part

METHODS = ("best", "paper", *BASELINES)
"""What is compared where nothing else is asked for."""
DENSE = "dense"


def compare(
    model: str | Path,
    calibration: str | Path,
    out: str | Path,
    methods: Sequence[str] = METHODS,
    sparsities: Sequence[float] = (0.2,),
    config: CompressionConfig | None = None,
    measures: Measures | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a model smaller by several methods, each on the same calibration windows, and measure all alike.

    `best` and `paper` are this package's solvers, in memory; with `:RULE` behind it, by another rule for the ranks than
    that of the settings. The others are `BASELINES`. Rows that an earlier, equal call finished are not made again.
    The dense model and one other are in memory at a time.

    Args:
        model: hub name, folder or `.gguf` file.
        calibration: a known data set or a text file.
        out: folder for everything; it may hold an earlier comparison.
        methods: names, as in `METHODS`.
        sparsities: each above 0 and below 1; the dense model is always measured.
        config: the settings; text, seed and device for all methods, the rest for `best` and `paper`.
        measures: what to measure.
        overwrite: make everything anew, whatever the folder holds.
        progress: called with the row and its stage, the steps done and the steps in all.

    Returns:
        `model`, `calibration`, `config`, `measures`, `rows`, `warnings` and `protocol`, as in `compare.json`; the keys
        are in docs/json-output.md.

    Raises:
        InputError: the call is wrong, a method does not know the model's family, or the folder holds rows of another
            model, data or setting.
    """
    out, config, measures = Path(out), config or CompressionConfig(), measures or Measures(rounds=0)
    _check(methods, sparsities, config, out)
    work = _Comparison(str(model), calibration, out, methods, config, measures, progress)
    if overwrite:
        shutil.rmtree(out / "rows", ignore_errors=True)
    (out / "rows").mkdir(parents=True, exist_ok=True)
    rows = [work.row(DENSE, 0.0)]
    rows += [work.row(method, sparsity) for sparsity in sorted(sparsities) for method in methods]
    shown = {key: value for key, value in asdict(measures).items() if key != "rounds"}
    table = {
        "model": str(model),
        "calibration": work.text.about,
        "config": {key: value for key, value in config.as_dict().items() if key not in ("sparsity", "solver")},
        "measures": {**shown, "seq_len": work.quality.window, "dtype": str(work.dense.dtype).removeprefix("torch.")},
        "rows": [{key: value for key, value in row.items() if key != "fingerprint"} for row in rows],
        "warnings": [*seen_text(str(calibration), measures.data), *work.notes],
        **protocol(),
    }
    write_json(table, out / "compare.json")
    return table


def _check(methods: Sequence[str], sparsities: Sequence[float], config: CompressionConfig, out: Path) -> None:
    """Refuse what can be seen to be wrong without opening anything."""
    if not methods:
        raise InputError(f"methods is empty: give some of {', '.join(METHODS)}")
    for method in methods:
        name, _, rule = method.partition(":")
        if name not in METHODS:
            raise InputError(f"method '{method}' is not known; give some of {', '.join(METHODS)}")
        rules = [known for known in ALLOCATIONS if known != "plan"]
        if rule and name not in PRESETS:
            raise InputError(f"method '{method}': {name} has no other rule for ranks than its own; give '{name}'")
        if ":" in method and rule not in rules:
            raise InputError(f"method '{method}': the rule '{rule}' is none of {', '.join(rules)}")
    if config.allocation == "plan":
        raise InputError("a plan fixes the ranks and with them one sparsity; give the comparison another allocation")
    for what, given in (("method", list(methods)), ("sparsity", [f"{share:g}" for share in sparsities])):
        twice = next((name for index, name in enumerate(given) if name in given[:index]), None)
        if twice is not None:
            raise InputError(f"{what} {twice} is there twice; give each once")
    if not sparsities or not all(0 < share < 1 for share in sparsities):
        raise InputError(f"sparsity '{', '.join(f'{s:g}' for s in sparsities)}': give shares above 0 and below 1")
    if out.is_file():
        raise InputError(f"output '{out}' is a file; give a folder name")
    if out.is_dir() and any(out.iterdir()) and not (out / "rows").is_dir():
        raise InputError(f"output folder '{out}' holds something that is no comparison; choose another")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("a comparison runs in one process; start it without torchrun")


class _Comparison:
    """What all rows share: the texts, the dense model, and what each method found out about it."""

    def __init__(
        self,
        model: str,
        calibration: str | Path,
        out: Path,
        methods: Sequence[str],
        config: CompressionConfig,
        measures: Measures,
        progress: Progress | None,
    ) -> None:
        """Check everything, then open the texts, then the model."""
        self.out, self.config, self.progress = out, config, progress
        outer = outer_config(model)
        dense_config, self.notes = plain(text_part(outer)), about_text_part(outer)
        self.text = open_text(calibration, config, model, None)
        for method in methods:
            if method in BASELINES:
                BASELINES[method].require(architecture_of(dense_config), method)
        self.quality = Quality(measures, dense_config, self.text.tokenizer)
        self.device = resolve_device(config.device)
        self.dense = open_model(model, "auto", self.device)
        self.source = open_source(self.dense, self.device)
        self.started: dict[str, Callable[[float], Reduced]] = {}
        self.scores: dict[tuple[str, str], Tensor | None] = {}

    def row(self, method: str, sparsity: float) -> dict[str, Any]:
        """Return a row that an equal call has finished, or make and measure its model."""
        name = method if method == DENSE else f"{method}-{sparsity:g}"
        file, fingerprint = self.out / "rows" / f"{name.replace(':', '-')}.json", self._fingerprint(method, sparsity)
        if file.is_file():
            kept = read_json(file)
            check_fingerprint(kept["fingerprint"], fingerprint, file)
            return kept
        start = time.perf_counter()
        made = Reduced(self.dense, 0, 0.0) if method == DENSE else self._make(method, sparsity, name)
        seconds = round(time.perf_counter() - start, 3)
        measured = self.quality.measure(made.model, self._say(name))
        row = {
            "method": method,
            "sparsity": {"requested": sparsity, "blocks": made.share},
            "removed": made.removed,
            **measured,
            "seconds": seconds,
        }
        write_json({**row, "fingerprint": fingerprint}, file)
        return row

    def _make(self, method: str, sparsity: float, name: str) -> Reduced:
        """Return the model of a method at a sparsity; the dense one stays as it is."""
        with lent(self.dense):
            if method in BASELINES:
                if method not in self.started:
                    start = BASELINES[method].start
                    self.started[method] = start(self.dense, self.text.windows, self._say(method))
                return self.started[method](sparsity)
            config = self._settings(method, sparsity)
            if config.allocation != "uniform":
                config = replace(config, allocation="plan", plan=self._ranks(config, name))
            made = compress(self.dense, self.text.windows, config, progress=self._say(name))
        report: Any = made.modegpt_report
        counts = report["parameters"]
        removed = counts["dense"] - counts["compressed"]
        return Reduced(made.to(self.device), removed, report["sparsity"]["blocks"])  # pyright: ignore[reportArgumentType]

    def _settings(self, method: str, sparsity: float) -> CompressionConfig:
        solver, _, rule = method.partition(":")
        return replace(self.config, solver=solver, sparsity=sparsity, allocation=rule or self.config.allocation)

    def _ranks(self, config: CompressionConfig, name: str) -> tuple[dict[str, int], ...]:
        """Return the ranks that a rule gives; what it scores is scored once for each solver."""
        key = (config.solver, config.allocation)
        run = prepare(self.dense, self.text.windows, config, None, self._say(name))
        if key not in self.scores:
            self.scores[key] = run.scores()
        return tuple(run.allocate(self.scores[key]).ranks)

    def _fingerprint(self, method: str, sparsity: float) -> dict[str, Any]:
        """Return everything that decides a row, by field; the settings of the solvers decide no other method's."""
        ours = method.partition(":")[0] in PRESETS
        config = self._settings(method, sparsity) if ours else self.config
        identity = run_fingerprint(self.source, self.text, config, self.dense.dtype, self.device)
        if not ours:
            identity = {name: value for name, value in identity.items() if not name.startswith("setting ")}
        if method == DENSE:
            identity.pop("calibration tokens")
        return {"method": method, "sparsity": sparsity, **identity, **self.quality.identity()}

    def _say(self, name: str) -> Progress:
        told = self.progress or (lambda _stage, _done, _total: None)
        return lambda stage, done, total: told(f"{name} {stage}", done, total)
