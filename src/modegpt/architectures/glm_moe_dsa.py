"""GLM 5."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InputError
from .deepseek import DEEPSEEK_V32
from .spec import Architecture


@dataclass(frozen=True)
class GlmMoeDsaArchitecture(Architecture):
    """DeepSeek V3.2's, but that some layers attend to the keys that an earlier one picked."""

    shares_picks: bool = False
    """Whether some do; `resolve` sets it."""

    def resolve(self, config: Any) -> Architecture:
        """See `Architecture.resolve`."""
        resolved = super().resolve(config)
        return replace(resolved, shares_picks="shared" in config.indexer_types)  # pyright: ignore[reportCallIssue]

    @property
    def reads_back(self) -> str:
        """See `Architecture.reads_back`."""
        return "what was picked in" if self.shares_picks else super().reads_back

    def block_arguments(self, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same with the numbers of all keys as those that were picked, which they are in short texts.

        Raises:
            InputError: there are more keys than are picked, so that it matters which these are.
        """
        if not self.shares_picks:
            return super().block_arguments(config, given)
        n_rows, _heads, n_queries, n_keys = given["attention_mask"].shape
        if n_keys > config.index_topk:
            raise InputError(
                f"windows of {n_keys:,} tokens: layers of this model attend to {config.index_topk:,} tokens that an "
                f"earlier one picked, and here every layer runs alone; give --seq-len {config.index_topk} or less"
            )
        picked = torch.arange(n_keys, dtype=torch.int32, device=given["attention_mask"].device)
        return {**given, "prev_topk_indices": picked.expand(n_rows, n_queries, n_keys)}


GLM_MOE_DSA = GlmMoeDsaArchitecture(
    **{
        **vars(DEEPSEEK_V32),
        "model_type": "glm_moe_dsa",
        "name": "GlmMoeDsa",
        "attention_outputs": 3,
        "tuple_output": True,
        "notes": "GLM 5; as `deepseek_v32`; where layers share what they pick, windows of `index_topk` tokens at most",
    }
)
