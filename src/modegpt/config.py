"""What a compression run is asked to do, checked before anything is loaded."""

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from .errors import InputError

NAMES = {"mlp": "MLP", "qk": "query-key", "vo": "value-output"}
"""What a reader is told of the modules of a block."""
NO_RANK = "-"
"""What a reader is told of a module that has no rank in a block."""
MODULES = tuple(NAMES)
SAMPLINGS = ("random", "sequential")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PRESETS = {
    "paper": {"mlp": "leverage", "qk": "cr", "vo": "svd"},
    "best": {"mlp": "saliency", "qk": "logits", "vo": "context"},
}
"""What each value of `solver` stands for, by module."""
SOLVERS = {"mlp": ("leverage", "energy", "saliency"), "qk": ("cr", "logits"), "vo": ("svd", "context")}
"""The solvers of each module."""
COVERAGE = 0.1875
"""Share of extra calibration windows that `best` lets the model write (`running/own_text.py`)."""
RARITY = 0.25
"""Exponent by which `best` weights tokens (`sums/token_weights.py`)."""
ALLOCATIONS = ("uniform", "influence", "influence-blocks", "owl", "error", "width", "plan")
FEEDING = ("energy", "saliency")
"""The solvers of the MLP that can be refitted to the dense model's hidden states."""

TOKEN_IDS = "token ids"
"""What a run calls its calibration text where ids were given."""
IN_MEMORY = "in memory"
"""What a run calls a model that came from no file."""


@dataclass(frozen=True)
class CompressionConfig:
    """The settings of one run; the defaults are the paper's protocol with the best solvers."""

    sparsity: float = 0.3
    """Share of the decoder blocks' parameters to remove, in [0, 1)."""
    samples: int = 128
    """Calibration sequences."""
    seq_len: int = 2048
    """Tokens of each."""
    sampling: str = "random"
    """`random` windows that do not overlap, or `sequential` from the start of the text."""
    seed: int = 0
    """Of the random windows; of the text that the model writes and the noise of the Fisher information, too, so that it
    counts with `sequential` windows and token ids as well."""
    allocation: str = "uniform"
    """`uniform`; `influence` (less from layers with a high Block Influence); `influence-blocks` (attention and MLP
    scored apart); `owl` (less from layers with many outlying weights); `error` (ranks of all modules by the damage that
    the solvers themselves do); `width` (one MLP width in all layers, and the rest whole, for `modegpt export`); `plan`
    (the ranks of `plan`)."""
    temperature: float | str = "auto"
    """ε of the influence rules, in units of the score; `auto`: the smallest at which no layer exceeds 80 %."""
    max_sparsity: float = 0.95
    """Upper bound on one layer's sparsity (under `error` on each module's), before rounding to whole ranks, under every
    rule but `uniform`, `width` and `plan`."""
    round_to: int | None = None
    """Keep every query-key dim, value dim and MLP width a multiple of this (8, 16, 64 suit GPU kernels); 1 leaves them
    free. None does so, too, but for MLP widths of weights in 16 bits (`ranks.whole.aligned`)."""
    owl_threshold: float = 5.0
    """OWL's M: an entry is an outlier above this many times its layer's mean."""
    owl_lambda: float = 0.08
    """OWL's λ: layers lie in a band of 2λ around the mean sparsity."""
    plan: tuple[dict[str, int], ...] | None = None
    """Ranks by layer of `mlp`, `qk` and `vo`, for the allocation `plan`; what is left out stays whole."""
    modules: tuple[str, ...] = MODULES
    """Which of `mlp`, `qk` (query-key) and `vo` (value-output) to compress."""
    solver: str = "best"
    """`paper`, or `best`: closed-form solvers that lose less at the same size (docs/algorithms.md)."""
    mlp_solver: str | None = None
    """`leverage`, `energy` or `saliency`; None for what `solver` stands for. So are the next two."""
    qk_solver: str | None = None
    """`cr` or `logits`."""
    vo_solver: str | None = None
    """`svd` or `context`."""
    coverage: float | None = None
    """Extra calibration windows that the model writes, as a share of `samples`; None for 0.1875 with `best` and none
    with `paper`."""
    feedback: bool | None = None
    """Whether the dense model runs beside the compressed one: attention's moments are then taken from it, neurons are
    chosen by it, and each MLP is refitted to what makes up for all that its block's output lacks of the dense one; or,
    where a norm decides how much an MLP adds, to what the dense MLP gives that norm. None for yes, and no with the MLP
    solver `leverage`."""
    rarity: float | None = None
    """A token that occurs `n` times in the calibration windows counts `n^-rarity` in the moments of the MLP and of the
    contexts; None for 0.25 with `best`, and 0, all alike, with `paper`."""
    ridge: float = 1.0
    """λ of the leverage scores, on the unnormalised moment."""
    dtype: str = "auto"
    """Of the written weights; `auto` keeps the model's. On a CPU the arithmetic is float32 whatever this says."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU where there is one."""
    batch_size: int | None = None
    """Sequences run through a block at once; by default about 4096 tokens, on a GPU 16384."""

    max_host_memory: int | None = None
    """Bytes of hidden states to keep in memory; what is above goes to disk. None for no limit."""

    def __post_init__(self) -> None:
        """Check every field. Numbers of numpy become Python's, and dtypes and devices of torch their names, as in JSON.

        Raises:
            InputError: a field is out of range; the message says what is allowed.
        """
        for field in fields(self):
            object.__setattr__(self, field.name, _plain(getattr(self, field.name)))
        for name in ("dtype", "device"):
            object.__setattr__(self, name, str(getattr(self, name)).removeprefix("torch."))
        for name, kinds in _number_fields().items():
            value = getattr(self, name)
            if (value is not None or NoneType not in kinds) and (
                not isinstance(value, Integral if int in kinds else Real) or isinstance(value, bool)
            ):
                raise InputError(f"{name} {value!r} is no {'whole number' if int in kinds else 'number'}")
        if not 0 <= self.sparsity < 1:
            raise InputError(f"sparsity {self.sparsity} is outside [0, 1): give a share such as 0.3 for 30 %")
        if not 0 < self.max_sparsity <= 1:
            raise InputError(f"max_sparsity {self.max_sparsity} is outside (0, 1]")
        if self.temperature != "auto" and not _is_positive(self.temperature):
            raise InputError(f"temperature {self.temperature} is neither a positive number nor 'auto'")
        for name in ("ridge", "owl_threshold", "owl_lambda"):
            if not _is_positive(getattr(self, name)):
                raise InputError(f"{name} {getattr(self, name)} is not a positive number")
        if (self.allocation == "plan") != (self.plan is not None):
            raise InputError("a plan and the allocation 'plan' go together: give both, or neither")
        if self.plan is not None:
            object.__setattr__(self, "plan", tuple(_ranks(index, entry) for index, entry in enumerate(self.plan)))
        for name in ("samples", "seq_len", "batch_size", "max_host_memory", "round_to"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value} is not a positive whole number")
        for name, allowed in (
            ("sampling", SAMPLINGS),
            ("allocation", ALLOCATIONS),
            ("solver", tuple(PRESETS)),
            ("dtype", DTYPES),
        ):
            check_choice(name, getattr(self, name), allowed)
        for module, solvers in SOLVERS.items():
            if (chosen := getattr(self, f"{module}_solver")) is not None:
                check_choice(f"{module}_solver", chosen, solvers)
        if self.coverage is not None and not 0 <= self.coverage <= 1:
            raise InputError(f"coverage {self.coverage} is outside [0, 1]: give a share such as 0.25, or 0 for none")
        if self.rarity is not None and not 0 <= self.rarity <= 1:
            raise InputError(f"rarity {self.rarity} is outside [0, 1]: give an exponent such as 0.25, or 0 for none")
        if self.feedback and self.solver_of("mlp") not in FEEDING:
            raise InputError(
                "feedback needs the MLP solver 'saliency' or 'energy': give --mlp-solver saliency, or --no-feedback"
            )
        check_seed(self.seed)
        if not self.modules:
            raise InputError(f"modules is empty: name at least one of {', '.join(MODULES)}")
        if isinstance(self.modules, str):
            raise InputError(f"modules is the text '{self.modules}': give a sequence, such as {MODULES[:1]}")
        for module in self.modules:
            check_choice("modules", module, MODULES)
        object.__setattr__(self, "modules", tuple(module for module in MODULES if module in self.modules))
        for module, name in (*((module, f"{module}_solver") for module in MODULES), ("mlp", "feedback")):
            if getattr(self, name) and module not in self.modules:
                raise InputError(f"{name} is for {module}, which is not among the modules {','.join(self.modules)}")
        if self.allocation == "width" and "mlp" not in self.modules:
            raise InputError(
                f"the allocation 'width' cuts MLPs alone: modules '{','.join(self.modules)}' must name mlp"
            )

    def solver_of(self, module: str) -> str:
        """Return the name of the solver of a module: its own, or what the preset says."""
        return getattr(self, f"{module}_solver") or PRESETS[self.solver][module]

    @property
    def coverage_share(self) -> float:
        """Extra calibration windows, as a share of `samples`."""
        if self.coverage is not None:
            return self.coverage
        return COVERAGE if self.solver == "best" else 0.0

    @property
    def rarity_exponent(self) -> float:
        """Exponent of the tokens' weights."""
        if self.rarity is not None:
            return self.rarity
        return RARITY if self.solver == "best" else 0.0

    @property
    def feeds_back(self) -> bool:
        """Whether the MLP's refits follow the dense model; not where the MLP stays whole."""
        asked = self.feedback is None or bool(self.feedback)
        return asked and "mlp" in self.modules and self.solver_of("mlp") in FEEDING

    @property
    def host_to_spare(self) -> bool:
        """Whether the host's memory is not limited: what saves time may stay there."""
        return self.max_host_memory is None

    @property
    def asked(self) -> float | None:
        """The share of the blocks to remove; None where a plan's ranks say it."""
        return None if self.allocation == "plan" else self.sparsity

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values."""
        plan = None if self.plan is None else list(self.plan)
        return {**asdict(self), "modules": list(self.modules), "plan": plan}


@functools.cache
def _number_fields() -> dict[str, tuple[Any, ...]]:
    """Return the types of each field that holds a number, and no word in its place."""
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(CompressionConfig).items()}
    return {name: own for name, own in kinds.items() if {int, float} & {*own} and str not in own}


def _plain(value: Any) -> Any:
    """Return a number of another library, such as numpy's, as Python's own; anything else as it is."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _ranks(layer: int, entry: Any) -> dict[str, Any]:
    """Return a layer's entry in a plan with Python's numbers; whether they fit, the model decides."""
    if not isinstance(entry, Mapping):
        raise InputError("the plan is no sequence of ranks by layer: give a dict of mlp, qk and vo for each layer")
    ranks = {module: _plain(rank) for module, rank in entry.items()}
    for module, rank in ranks.items():
        if not isinstance(rank, int | float):
            raise InputError(f"plan, layer {layer}: {module} has rank {rank!r}, which is no number")
    return ranks


def _is_positive(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value) and float(value) > 0


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `InputError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise InputError(f"{name} '{value}' is unknown; allowed: {', '.join(allowed)}")


def check_seed(seed: int) -> None:
    """Raise `InputError` unless every generator of random numbers takes `seed`."""
    if not 0 <= seed < 2**32:
        raise InputError(f"seed {seed} is outside [0, 2^32): give a whole number such as 0")
