import ast
from pathlib import Path

import pytest

import modegpt.decompose

FILES = sorted(Path(modegpt.decompose.__path__[0]).rglob("*.py"))
ALLOWED = {"torch", "typing", "collections", "dataclasses", "math", "functools", "itertools"}


def imported(tree: ast.AST) -> set[str]:
    """What a module imports: absolute names by their first part, relative ones with their dots."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level if node.level else (node.module or "").partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in {"__import__", "importlib"}:
            names.add(node.id)
    return names


def test_the_files_are_found():
    assert {"__init__.py", "psd.py", "nystrom.py", "cr.py", "svd.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_decompose_imports_only_itself_and_torch(path):
    # One dot is this package; two would be modegpt.
    assert imported(ast.parse(path.read_text(encoding="utf-8"))) <= ALLOWED | {"."}


@pytest.mark.parametrize(
    "line",
    ["from ..errors import InputError", "import modegpt.errors", "from modegpt import errors", "from .. import errors"],
)
def test_an_import_of_another_part_would_be_seen(line):
    assert not imported(ast.parse(f"def inner():\n    {line}")) <= ALLOWED | {"."}
