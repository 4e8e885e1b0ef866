"""Several methods on one model, text and sparsity: each measured alike, row by row.

Layout of the folder: `rows/dense.json`, `rows/flap-0.3.json`, ... (what was measured, each written at once when it is
done) and at the end `compare.json`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..architectures import Architecture, architecture_of
from ..baselines import BASELINES, Reduced, require
from ..baselines.walk import layer_parameters
from ..checkpoint import write_json
from ..compress import compress
from ..config import ALLOCATIONS, PRESETS, CompressionConfig
from ..errors import InputError, NumericalError
from ..loading.models import open_model, own_dtype, resolve_device
from ..progress import Progress
from ..ranks.whole import ALIGNED, aligned
from ..report import protocol
from ..running.fingerprint import run_fingerprint
from ..running.lending import lent
from ..running.sizes import layer_sizes
from ..running.source import Source, dense_config_of, open_source
from ..running.text import check_ids, open_text
from ..sums.full_float32 import full_float32
from .in_turn import seen_text
from .measures import Measures, Quality
from .rows import Rows, check_call, shown
from .scored import Ranked, Scored

METHODS = ("best", "paper", *BASELINES)
"""What is compared where nothing else is asked for."""
DENSE = "dense"
FOR_ALL = ("samples", "seq_len", "sampling", "seed", "dtype", "device", "batch_size", "max_host_memory")
"""The settings that other methods heed, too, or that change no figure."""
FOR_BEST = ("coverage", "rarity", "feedback", "mlp_solver", "qk_solver", "vo_solver")
"""Those that `best` alone heeds: `paper` is what its name says, whatever is asked of `best`."""
BY_ROW = ("sparsity", "solver")
"""Those that each row sets."""
APART = 0.05
"""Share of the blocks by which what methods removed may differ: one of twenty, as some leave layers out whole."""


class Wanted(NamedTuple):
    """A row that is asked for."""

    method: str
    sparsity: float

    @property
    def solver(self) -> str:
        """The method without its rule."""
        return self.method.partition(":")[0]

    @property
    def name(self) -> str:
        """What it is called while it is made."""
        return self.method if self.method == DENSE else f"{self.method}-{self.sparsity:.12g}"

    @property
    def file(self) -> str:
        """The same as a file name, without its ending."""
        return self.name.replace(":", "-")


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
            model, data or setting, or another run.
    """
    out, config, measures = Path(out), config or CompressionConfig(), measures or Measures(rounds=0)
    check_call(config, out, ("rows",), "comparison", (model, calibration, *measures.data, *measures.tasks))
    _check(methods, sparsities)
    wanted = [Wanted(DENSE, 0.0), *(Wanted(method, share) for share in sorted(sparsities) for method in methods)]
    with Rows(out / "rows", out / "compare.json", overwrite) as kept:
        work = _Comparison(str(model), calibration, methods, config, measures, kept, progress)
        found = {row: work.finished(row) for row in wanted}
        work.begin([row for row in wanted if found[row] is None])
        rows = [found[row] or work.measure(row) for row in wanted]
        told = {key: value for key, value in asdict(measures).items() if key != "rounds"}
        table = {
            "model": str(model),
            "calibration": work.text.about,
            "config": {key: value for key, value in config.as_dict().items() if key not in BY_ROW},
            "measures": {**told, "seq_len": work.quality.window, "dtype": str(work.dense.dtype).removeprefix("torch.")},
            "rows": [shown(row) for row in rows],
            "warnings": [
                *seen_text(str(calibration), measures.data),
                *work.notes,
                *_unheeded(methods, config),
                *_apart(rows),
            ],
            **protocol(),
        }
        write_json(table, out / "compare.json")
    return table


def _unheeded(methods: Sequence[str], config: CompressionConfig) -> list[str]:
    """Say which settings say nothing to some of the methods."""
    defaults = CompressionConfig()
    given = [
        field.name
        for field in fields(config)
        if field.name not in (*FOR_ALL, *BY_ROW) and getattr(config, field.name) != getattr(defaults, field.name)
    ]
    heeding: dict[tuple[str, ...], list[str]] = {}
    for name in given:
        who = ("best",) if name in FOR_BEST else ("best", "paper")
        if name == "ridge" and config.mlp_solver != "leverage":  # of these scores alone
            who = ("paper",)
        heeding.setdefault(who, []).append(name)
    told = []
    for who, names in heeding.items():
        others = [method for method in methods if method.partition(":")[0] not in who]
        if others:
            told.append(f"{', '.join(names)}: heeded by {' and '.join(who)}, not by {', '.join(others)}")
    return told


def _apart(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say at which sparsities the methods made models of other sizes: by whole layers, or where much stays whole."""
    removed: dict[float, list[float]] = {}
    for row in rows:
        removed.setdefault(row["sparsity"]["requested"], []).append(row["sparsity"]["blocks"])
    return [
        f"at {share:.12g} the methods removed between {min(found):.1%} and {max(found):.1%} of the blocks: which is "
        "best there says little of models of one size"
        for share, found in removed.items()
        if max(found) - min(found) > APART
    ]


def _check(methods: Sequence[str], sparsities: Sequence[float]) -> None:
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
    for what, given in (("method", list(methods)), ("sparsity", [f"{share:.12g}" for share in sparsities])):
        twice = next((name for index, name in enumerate(given) if name in given[:index]), None)
        if twice is not None:
            raise InputError(f"{what} {twice} is there twice; give each once")
    if not sparsities or not all(0 < share < 1 for share in sparsities):
        raise InputError(f"sparsity '{', '.join(f'{s:g}' for s in sparsities)}': give shares above 0 and below 1")


class _Comparison:
    """What all rows share: the texts, the dense model, and what each method found out about it."""

    def __init__(
        self,
        model: str,
        calibration: str | Path,
        methods: Sequence[str],
        config: CompressionConfig,
        measures: Measures,
        rows: Rows,
        progress: Progress | None,
    ) -> None:
        """Check everything, then open the texts, then the model."""
        self.config, self.rows, self.progress = config, rows, progress
        dense_config, self.notes = dense_config_of(model)
        self.text = open_text(calibration, config, model, None)
        _require(methods, architecture_of(dense_config))
        self.quality = Quality(measures, dense_config, self.text.tokenizer)
        self.device = resolve_device(config.device)
        self.dense = open_model(model, "auto", self.device)
        self.source = open_source(self.dense, self.device)
        check_ids(self.text, self.source)
        self.notes += _free_widths(self.source, own_dtype(dense_config), config)
        self.made_by: dict[str, tuple[Callable[[float], Reduced], float]] = {}
        """What makes the models of another method, and the seconds that finding out took."""
        self.scored = Scored(self.dense, self.text.windows)
        self._total = sum(layer_parameters(self.dense))

    def finished(self, row: Wanted) -> dict[str, Any] | None:
        """Return a row that an equal call has measured."""
        return self.rows.finished(row.file, self._fingerprint(row))

    def begin(self, missing: Sequence[Wanted]) -> None:
        """Refuse a sparsity that a method cannot reach; only then make room for what is to be measured."""
        for row in missing:
            if row.solver in PRESETS:
                self._ranked(row)
            elif row.method != DENSE:
                require(row.method, BASELINES[row.method].most(self.dense), row.sparsity, self._total)
        self.rows.begin()

    def measure(self, row: Wanted) -> dict[str, Any]:
        """Make the model of a row, and measure it.

        Raises:
            NumericalError: it has none, or its loss is NaN or infinite; names the row.
        """
        try:
            with lent(self.dense), full_float32():
                made = self._make(row)
            measured = self.quality.measure(made.pop("model"), self._say(row.name))
        except NumericalError as problem:
            hint = "" if row.method == DENSE else f"; leave {row.method} out of --methods"
            raise NumericalError(f"{row.name}: {problem}{hint}") from problem
        return self.rows.keep(row.file, {"method": row.method, **made, **measured}, self._fingerprint(row))

    def _make(self, row: Wanted) -> dict[str, Any]:
        """Return the row's model and what there is to say of it; the dense one stays as it is."""
        report, notes = {"warnings": []}, []
        start = time.perf_counter()
        if row.solver == DENSE:
            model, removed, share, scoring = self.dense, 0, 0.0, None
        elif row.solver in PRESETS:
            config, notes, scoring = self._ranked(row)
            made: Any = compress(self.dense, self.text.windows, config, progress=self._say(row.name))
            model, report = made.to(self.device), made.modegpt_report
            removed = report["parameters"]["dense"] - report["parameters"]["compressed"]
            share = report["sparsity"]["blocks"]
        else:
            if row.method not in self.made_by:
                at = BASELINES[row.method].start(self.dense, self.text.windows, self._say(row.method))
                self.made_by[row.method] = at, round(time.perf_counter() - start, 3)
                start = time.perf_counter()
            at, scoring = self.made_by[row.method]
            model, removed, share = at(row.sparsity)
        return {
            "model": model,
            "sparsity": {"requested": row.sparsity, "blocks": share},
            "removed": removed,
            "seconds": round(time.perf_counter() - start, 3),
            "scoring_seconds": scoring,
            "warnings": list(dict.fromkeys([*notes, *report["warnings"]])),
        }

    def _asked(self, row: Wanted) -> CompressionConfig:
        rule = row.method.partition(":")[2] or self.config.allocation
        config = self.config
        if row.solver == "paper":
            config = replace(config, **dict.fromkeys(FOR_BEST))
        return replace(config, solver=row.solver, sparsity=row.sparsity, allocation=rule)

    def _ranked(self, row: Wanted) -> Ranked:
        """Return the settings of one of our rows; what its rule scores is scored once for all sparsities."""
        return self.scored.plan(self._asked(row), self._say(row.method))

    def _fingerprint(self, row: Wanted) -> dict[str, Any]:
        """Return everything that decides a row, by field; the settings of our solvers decide no other method's."""
        ours = row.solver in PRESETS
        config = self._asked(row) if ours else self.config
        identity = run_fingerprint(self.source, self.text, config, self.dense.dtype, self.device)
        if not ours:
            identity = {name: value for name, value in identity.items() if not name.startswith("setting ")}
        if row.method == DENSE:
            identity.pop("calibration tokens")
        return {"method": row.method, "sparsity": row.sparsity, **identity, **self.quality.identity()}

    def _say(self, name: str) -> Progress:
        told = self.progress or (lambda _stage, _done, _total: None)
        return lambda stage, done, total: told(f"{name} {stage}", done, total)


def _free_widths(source: Source, stored: torch.dtype, config: CompressionConfig) -> list[str]:
    """Say that MLP widths are free here, as those of all methods are, where `compress` would align them."""
    computed, written = source.dtype, stored if config.dtype == "auto" else getattr(torch, config.dtype)
    sizes = [layer_sizes(block, source.architecture, source.dims) for block in source.blocks.layers]
    if config.round_to is not None or aligned(sizes, written.itemsize) == aligned(sizes, computed.itemsize):
        return []
    here, there = (str(dtype).removeprefix("torch.") for dtype in (computed, written))
    return [
        f"MLP widths are free, as all is computed in {here} here; compress keeps those of this model in multiples of "
        f"{ALIGNED} where it writes {there}"
    ]


def _require(methods: Sequence[str], architecture: Architecture) -> None:
    """Raise `InputError` if some methods cannot be tried on a family: one line for all of them."""
    reasons = {method: BASELINES[method].refuses(architecture) for method in methods if method in BASELINES}
    refused = {method: reason for method, reason in reasons.items() if reason is not None}
    if refused:
        others = ",".join(method for method in methods if method not in refused)
        raise InputError(
            f"{', '.join(refused)} cannot be compared on '{architecture.model_type}': "
            f"{', and '.join(dict.fromkeys(refused.values()))}; give --methods {others or 'best,paper,shortgpt,sleb'}"
        )
