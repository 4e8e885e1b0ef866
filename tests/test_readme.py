"""README and docs tell the truth: Python runs, tables are the registry and the results, links lead somewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import modegpt
from modegpt.architectures import ARCHITECTURES
from modegpt.cli import app
from modegpt.commands.demo import INSTALL

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def architecture_table() -> str:
    """The table as the README must have it: one row a family, in the order of the registry."""
    rows = [f"| `{a.model_type}` | `{a.causal_class}` | {a.notes} |" for a in ARCHITECTURES.values()]
    return "\n".join(["| `model_type` | class | covers |", "|---|---|---|", *rows])


def test_the_table_of_architectures_is_the_registry():
    section = re.search(r"<!-- architectures -->\n(.*?)\n?<!-- /architectures -->", README, re.DOTALL)
    assert section is not None
    assert section[1] == architecture_table()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_blocks_run_as_printed(code: str, tiny_llama_dir: Path, tmp_path: Path):
    shutil.copytree(tiny_llama_dir, tmp_path / "my-llama")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'requested': 0.3" in done.stdout
    assert "The list type is" in done.stdout
    assert (tmp_path / "my-llama-30" / "report.json").is_file()


def test_the_readme_has_a_python_block_of_about_ten_lines():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert [8 <= len([line for line in code.splitlines() if line]) <= 12 for code in blocks] == [True]


def test_every_command_in_the_readme_exists_and_none_is_missing():
    told = set(re.findall(r"^modegpt (\w+)", README, re.MULTILINE))
    listed = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert told == listed
    for name in told:
        assert modegpt(name, "--help").exit_code == 0


def test_the_figures_are_those_of_the_result_files():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from tables import SECTIONS  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    sections = [(file, name, write) for file, written in SECTIONS.items() for name, write in written.items()]
    assert {name for _, name, _ in sections} == {"headline", "accuracy", "figures", "best-over-paper"}
    for file, name, write in sections:
        told = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", (ROOT / file).read_text("utf-8"), re.DOTALL)
        assert told is not None
        assert told[1] == write()


def anchors(page: Path) -> set[str]:
    """What a page's headings are linked by, as GitHub makes it of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_lead_somewhere(page: str):
    path = ROOT / page
    text = re.sub(r"`[^`]*`", "", path.read_text(encoding="utf-8"))  # "K[i](x)" in code is no link
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        there = path.parent / target if target else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_a_missing_demo_model_names_the_version_that_make_installs():
    assert f"--no-deps {INSTALL.split()[-1]}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in README
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "make test"
