"""The solvers by module: thin adapters between a block's weights and the mathematics in `decompose`."""

from .decision import Decision, Solver
from .mlp import ENERGY, LEVERAGE, SALIENCY
from .query_key import CR, LOGITS, split_rank
from .value_output import CONTEXT, SVD

SOLVERS: dict[str, dict[str, Solver]] = {
    "mlp": {"leverage": LEVERAGE, "energy": ENERGY, "saliency": SALIENCY},
    "qk": {"cr": CR, "logits": LOGITS},
    "vo": {"svd": SVD, "context": CONTEXT},
}
"""By module and name; `config.SOLVERS` lists the same names, and what `paper` and `best` stand for."""

__all__ = ["SOLVERS", "Decision", "Solver", "split_rank"]
