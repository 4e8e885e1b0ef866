"""What every command shares: one line for an error, one place for JSON, the checks before the work."""

import errno
import os
import re
import signal
import sys
from _thread import interrupt_main
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..errors import InputError, ModegptError, WriteError, first_line

MODEL = typer.Argument(..., metavar="MODEL", help="Hub name, local folder or .gguf file.")
DEVICE = typer.Option("auto", "--device", help="auto, cpu, cuda or cuda:N.")
JSON = typer.Option(None, "--json", metavar="FILE", help="Write the result as JSON; - for standard output.")

PIPED_WIDTH = 200
"""Columns of a table that goes into a file or a pipe, where nothing says how wide it may be."""
MODEL_FILES = (
    "config.json",
    "*_config.json",
    "*.index.json",
    "tokenizer*",
    "vocab*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "tekken.json",
    "report.json",
    "*.safetensors",
    "*.bin",
    "*.py",
)
"""What a model's folder holds of the model, and not of results about it."""
INTERRUPTED = 130
"""What shells return for a program that Ctrl-C ended."""
RAISED_AGAIN = 0.05
"""Seconds after which an interrupt that was lost is raised again."""


class OneLineErrors(TyperGroup):
    """A command group that answers every failure a user can cause with one line on standard error."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command and leave with its exit code: 0 done, 1 failed, 2 wrong call, 130 interrupted."""
        with _noted_interrupts() as interrupted:
            try:
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
            except Exception as problem:
                if not interrupted.is_set():
                    _fail_for(problem)
                code = INTERRUPTED
        if code == INTERRUPTED:
            fail(
                "interrupted; compress --resume goes on where it stopped, sweep and compare with the same call",
                INTERRUPTED,
            )
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _noted_interrupts() -> Iterator[Event]:
    """While the context is open, Ctrl-C also sets the event that is given.

    Libraries in C may swallow the interrupt that Python raises inside them, and then fail with an error of their own.
    Where it is raised as an object is let go of, Python itself swallows it: then it is raised again, a moment later.
    """
    noted, before, tell = Event(), signal.getsignal(signal.SIGINT), sys.unraisablehook

    def note(number: int, frame: Any) -> None:
        noted.set()
        signal.default_int_handler(number, frame)

    def lost(about: Any) -> None:
        if issubclass(about.exc_type, KeyboardInterrupt):
            Timer(RAISED_AGAIN, _interrupt).start()  # not from here, where it would be lost once more
        else:
            tell(about)

    # Where whoever called ignores it, or heeds it otherwise, it stays so; and only the main thread may change it.
    own = before is signal.default_int_handler and current_thread() is main_thread()
    if own:
        signal.signal(signal.SIGINT, note)
        sys.unraisablehook = lost
    try:
        yield noted
    finally:
        if own:
            signal.signal(signal.SIGINT, before)
            sys.unraisablehook = tell


def _interrupt() -> None:
    """Interrupt the main thread, also one that waits in C."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)
    else:  # on Windows
        interrupt_main()


def _fail_for(problem: Exception) -> NoReturn:
    """Leave with one line for what a user can cause; raise anything else."""
    if isinstance(problem, ModegptError):
        fail(str(problem), problem.exit_code)
    if isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG:
        fail(f"the name '{problem.filename}' is longer than the file system allows: give a shorter one", 2)
    if isinstance(problem, (OSError, MemoryError)):
        fail(f"{type(problem).__name__}: {problem}", 1)
    if _out_of_memory(problem):
        less = "a smaller --batch-size, where there is one, needs less (of compress it is a run of its own)"
        kept = f"{less}; the same call of compress goes on with --resume"
        fail(f"out of memory: {first_line(problem)}; {kept}", 1)
    # The parser's own complaints: their base class has moved between typer's versions, the method has not.
    if not hasattr(problem, "format_message"):
        raise problem
    said = problem.format_message().rstrip(".")  # pyright: ignore
    fail(f"{said or 'no command was given'}; see --help", 2)


def _out_of_memory(problem: Exception) -> bool:
    """Tell whether torch found no memory: on a GPU it raises an error of its own, on the host a plain RuntimeError."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(problem, torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and "can't allocate memory" in str(problem)


def fail(message: str, code: int) -> NoReturn:
    """Print one line on standard error and leave with `code`."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def names(text: str) -> tuple[str, ...]:
    """Split a list with commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(name: str, text: str) -> list[float]:
    """Read a list of numbers with commas."""
    try:
        return [float(number) for number in names(text)]
    except ValueError:
        raise InputError(f"{name} '{text}' is no list of numbers; give shares such as 0.1,0.2,0.3") from None


def number_or_auto(name: str, text: str) -> float | str:
    """Read a number, or `auto`."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{name} '{text}' is neither a number nor 'auto'") from None


def check_positive(name: str, value: int | None) -> None:
    """Refuse a count below 1."""
    if value is not None and value < 1:
        raise InputError(f"{name} {value} is not a positive whole number")


def check_json(file: str | None, *read: str | Path | None, out: Path | None = None, kept: Sequence[Path] = ()) -> None:
    """Refuse, before the work, a `--json` target that could not be written after it, or that is read or written.

    Args:
        file: the target.
        read: models, texts, tasks and results that the command reads; what is no file or folder is passed over.
        out: what the command writes beside it: a checkpoint's folder, or a file.
        kept: files, and folders with all in them, that the command goes on from when it is called again.
    """
    if file is None or file == "-":
        return
    check_file("--json", file, "; give a file name, or - for standard output")
    for path in read if Path(file).is_file() else ():
        if path is not None and _is_of(file, path):
            raise InputError(f"--json '{file}' would replace what is read: give another file name")
    inside = any(Path(file).resolve().is_relative_to(path.resolve()) for path in kept)
    if inside or (out is not None and _is_of(file, out)):
        raise InputError(f"--json '{file}' would replace what is written: give another file name")


def _is_of(file: str, what: str | Path) -> bool:
    """Whether a file is one that was named, or holds a part of the model in a folder that was."""
    target, path = Path(file).resolve(), Path(what).resolve()
    return path == target or (target.parent == path and any(target.match(pattern) for pattern in MODEL_FILES))


def check_file(option: str, file: str | Path, hint: str = "; give a file name") -> None:
    """Refuse, before the work, a file that could not be written after it."""
    path = Path(file)
    if path.is_dir():
        raise InputError(f"{option} '{file}' is a folder{hint}")
    if path.exists() and not path.is_file():
        return  # a pipe or a device
    folder = path.resolve().parent
    if not folder.is_dir():
        raise InputError(f"{option} '{file}': the folder '{folder}' does not exist; create it first")
    from ..disk import check_writable

    check_writable(folder, f"{option} '{file}'")


def check_used(data: Sequence[str], tasks: Sequence[str], limit: int | None, windows: dict[str, int | None]) -> None:
    """Refuse bounds on what is not measured.

    Args:
        data: texts.
        tasks: zero-shot tasks.
        limit: `--limit`.
        windows: by option, what is asked of the windows of texts.
    """
    if limit is not None and not tasks:
        raise InputError("--limit is for the samples of --tasks, and none were given; --max-windows is for --data")
    if not data and any(value is not None for value in windows.values()):
        hint = "; --limit is for --tasks" if tasks else ""
        raise InputError(f"{' and '.join(windows)} are for --data, and none was given{hint}")


def check_plot(file: Path, endings: tuple[str, ...]) -> None:
    """Refuse, before the work, a `--plot` target that could not be written after it."""
    check_file("--plot", file)
    if file.suffix.lower() not in endings:
        raise InputError(f"--plot '{file}': give a file name that ends in {', '.join(endings)}")


def emit(data: dict[str, Any], file: str | None) -> None:
    """Write JSON where `--json` says, if it says so.

    Raises:
        WriteError: the file cannot be written; the JSON is on standard output then, so that no result is lost.
    """
    if file is None:
        return
    from ..checkpoint import json_text, write_json

    if file == "-":
        print(json_text(data))
        return
    try:
        write_json(data, file)
    except OSError as problem:
        print(json_text(data))
        raise WriteError(
            f"--json '{file}' could not be written ({problem.strerror or problem}): it is on standard output"
        ) from problem


def gathered(warnings: Sequence[str]) -> list[str]:
    """Return warnings for a person: of those that differ in numbers alone, as of layers, the first and their count."""
    alike: dict[str, list[str]] = {}
    for warning in warnings:
        alike.setdefault(re.sub(r"\d+", "0", warning), []).append(warning)
    return [
        same[0] if len(same) == 1 else f"{same[0]} ({len(same) - 1} more like it, in report.json)"
        for same in alike.values()
    ]


def console(json_file: str | None) -> Console:
    """Where a person reads: standard output, unless JSON goes there. What is not a terminal cuts no line short."""
    made = Console(stderr=json_file == "-", highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED_WIDTH
    return made


def begin() -> None:
    """Bring in transformers, which then knows the compressed classes and keeps its notes off standard error.

    There this program's one line and its bar stand. A command calls this when its arguments have been checked.
    """
    from transformers.utils import logging

    from ..registration import register

    register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def dtype_name(model: Any) -> str:
    """Return the dtype of a model as users write it."""
    return str(model.dtype).removeprefix("torch.")
