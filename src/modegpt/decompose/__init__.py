"""The mathematics of MoDeGPT: tensors in, tensors out.

Type I (`nystrom`), Type II (`cr`) and Type III (`svd`) of Lin et al., ICLR 2025. Nothing here knows of models,
and nothing here imports another part of `modegpt`.
"""

from .cr import CRResult, cr
from .nystrom import NystromResult, nystrom, ridge_leverage_scores
from .psd import NotPositiveDefiniteError
from .svd import SVDResult, joint_svd, value_eigenvectors

__all__ = [
    "CRResult",
    "NotPositiveDefiniteError",
    "NystromResult",
    "SVDResult",
    "cr",
    "joint_svd",
    "nystrom",
    "ridge_leverage_scores",
    "value_eigenvectors",
]
