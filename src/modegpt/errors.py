"""The errors a user can meet, one class for each way they are handled."""

from collections.abc import Iterator
from contextlib import contextmanager


class ModegptError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(ModegptError, ValueError):
    """The call is wrong: the message says what came, what is allowed and what to do. Exit code 2."""

    exit_code = 2


class MissingExtraError(InputError):
    """An optional dependency is absent; the message says what installs it."""

    def __init__(self, purpose: str, package: str, extra: str | None = None, *, install: str = "") -> None:
        """Say that `purpose` needs `package`, which the extra `extra` brings, or else the command `install`."""
        install = install or f"pip install 'modegpt[{extra}]'"
        super().__init__(f"{purpose} needs the package '{package}'; install it with: {install}")


class NumericalError(ModegptError, ArithmeticError):
    """NaN, infinity or an indefinite matrix; the message names the layer and the matrix. Exit code 1."""


class WriteError(ModegptError):
    """The disk refused a file; what was finished before is kept, and the message says how to go on. Exit code 1."""


@contextmanager
def refused(what: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever a reader of files or configs raises into one line.

    For a name that nothing stands behind, a missing network, a broken file or a config that contradicts itself
    transformers and safetensors raise a dozen kinds of errors with no common base. What is of a kind in `but` stays as
    it is.

    Raises:
        InputError: something was raised; says what could not be done, and the first line of why.
    """
    try:
        yield
    except (MemoryError, *but):
        raise
    except Exception as problem:
        kind = "" if isinstance(problem, (OSError, ValueError)) else f"{type(problem).__name__}: "
        raise InputError(f"{what}: {kind}{first_line(problem)}") from problem


def first_line(problem: Exception) -> str:
    """Return what an error says first, or its name if it says nothing; of a heading with what stands under it."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return type(problem).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
