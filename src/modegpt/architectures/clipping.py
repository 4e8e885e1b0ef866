"""Models that clip queries, keys and values."""

from ..errors import InputError


def refuse_clipping(limit: float | None, instead: str) -> None:
    """Raise `InputError` if a model clips them; `instead` says which one does not."""
    if limit is not None:
        raise InputError(
            f"the model clips its queries, keys and values at {limit} (clip_qkv), coordinate by coordinate, which no "
            f"narrower head can repeat; give {instead}"
        )
