"""What a compression run is asked to do, checked before anything is loaded."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from .errors import InputError

MODULES = ("mlp", "qk", "vo")
SAMPLINGS = ("random", "sequential")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SOLVERS = ("paper",)
ALLOCATIONS = ("uniform", "influence")


@dataclass(frozen=True)
class CompressionConfig:
    """The settings of one run; the defaults are the paper's protocol."""

    sparsity: float = 0.3
    """Share of the decoder blocks' parameters to remove, in [0, 1)."""
    samples: int = 128
    """Calibration sequences."""
    seq_len: int = 2048
    """Tokens of each."""
    sampling: str = "random"
    """`random` windows that do not overlap, or `sequential` from the start of the text."""
    seed: int = 0
    allocation: str = "uniform"
    """`uniform`, or `influence`: less from layers with a high Block Influence."""
    temperature: float = 0.1
    """ε of the influence rule, in units of the score."""
    max_sparsity: float = 0.95
    """Upper bound on one layer's sparsity under `influence`."""
    modules: tuple[str, ...] = MODULES
    """Which of `mlp`, `qk` (query-key) and `vo` (value-output) to compress."""
    solver: str = "paper"
    ridge: float = 1.0
    """λ of the MLP's leverage scores, on the unnormalised moment."""
    dtype: str = "auto"
    """Of the written weights; `auto` keeps the model's. On a CPU the arithmetic is float32 whatever this says."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU where there is one."""
    batch_size: int | None = None
    """Sequences run through a block at once; by default about 4096 tokens."""

    max_host_memory: int | None = None
    """Bytes of hidden states to keep in memory; what is above goes to disk. None for no limit."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: a field is out of range; the message says what is allowed.
        """
        if not 0 <= self.sparsity < 1:
            raise InputError(f"sparsity {self.sparsity} is outside [0, 1): give a share such as 0.3 for 30 %")
        if not 0 < self.max_sparsity <= 1:
            raise InputError(f"max_sparsity {self.max_sparsity} is outside (0, 1]")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InputError(f"temperature {self.temperature} is not a positive number")
        if not (math.isfinite(self.ridge) and self.ridge > 0):
            raise InputError(f"ridge {self.ridge} is not a positive number")
        for name in ("samples", "seq_len", "batch_size", "max_host_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} {value} is not a positive whole number")
        for name, allowed in (
            ("sampling", SAMPLINGS),
            ("allocation", ALLOCATIONS),
            ("solver", SOLVERS),
            ("dtype", DTYPES),
        ):
            check_choice(name, getattr(self, name), allowed)
        if not self.modules:
            raise InputError(f"modules is empty: name at least one of {', '.join(MODULES)}")
        for module in self.modules:
            check_choice("modules", module, MODULES)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values."""
        return {**asdict(self), "modules": list(self.modules)}


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `InputError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise InputError(f"{name} '{value}' is unknown; allowed: {', '.join(allowed)}")
