"""The errors a user can meet, one class for each way they are handled."""


class ModegptError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(ModegptError, ValueError):
    """The call is wrong: the message says what came, what is allowed and what to do. Exit code 2."""

    exit_code = 2


class MissingExtraError(InputError):
    """An optional dependency is absent; the message names the extra that brings it."""

    def __init__(self, purpose: str, package: str, extra: str) -> None:
        """Say that `purpose` needs `package`, which the extra `extra` installs."""
        super().__init__(f"{purpose} needs the package '{package}'; install it with: pip install 'modegpt[{extra}]'")


class NumericalError(ModegptError, ArithmeticError):
    """NaN, infinity or an indefinite matrix; the message names the layer and the matrix. Exit code 1."""


class WriteError(ModegptError):
    """The disk refused a file; what was finished before is kept, and the message says how to go on. Exit code 1."""
