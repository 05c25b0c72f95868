"""The rules of the house: what keeps the code readable is tested like everything else."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS = 400, 60, 8
LONGEST_STRATEGY, LONGEST_WORKER = 150, 40


PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def imports(path: Path, *, typing_too: bool = True) -> set[str]:
    """Full names of the modules that a file imports."""
    found: set[str] = set()
    tree = tree_of(path)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing_too:
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    assert "utils" not in path.name
    for function in functions(path):
        parameters = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        named = [parameter for parameter in parameters if parameter.arg not in ("self", "cls")]
        # A command's options are its user interface: their number is no sign of a confused function.
        most = 24 if path.name == "cli.py" else MOST_PARAMETERS
        assert len(named) <= most, f"{function.name} has {len(named)} parameters"
        assert length(function) <= LONGEST_FUNCTION, f"{function.name} has {length(function)} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "no module docstring"


@pytest.mark.parametrize("path", sorted((SOURCE / "strategies").glob("*.py")), ids=lambda path: path.name)
def test_a_strategy_is_short_and_asks_only_its_node(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_STRATEGY
    for function in functions(path):
        if function.name == "worker":
            assert length(function) <= LONGEST_WORKER
    for name in imports(path, typing_too=False):
        forbidden = ("torch", "time", "random", "threading", "os", "socket", "asyncio")
        assert name.split(".")[0] not in forbidden, f"a strategy asks only its node, not {name}"
        if name.startswith("paceline."):
            beside = ("paceline.strategies", "paceline.serving", "paceline.options")
            allowed = ("paceline.node", "paceline.rules", "paceline.errors", *beside)
            assert name.startswith(allowed), f"nothing below the waist is imported by a strategy: {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "serving").glob("*.py")), ids=lambda path: path.name)
def test_servers_and_their_workers_ask_only_their_node(path: Path) -> None:
    for name in imports(path, typing_too=False):
        assert name.split(".")[0] not in ("time", "random", "threading", "os", "socket", "asyncio"), name
        if name.startswith("paceline."):
            assert name.startswith(("paceline.node", "paceline.rules", "paceline.serving", "paceline.errors")), name


@pytest.mark.parametrize("path", sorted((SOURCE / "rules").glob("*.py")), ids=lambda path: path.name)
def test_rules_are_pure(path: Path) -> None:
    for name in imports(path, typing_too=False):
        assert name.split(".")[0] not in ("time", "random", "threading", "os", "socket"), name
        assert not name.startswith("paceline.") or name.startswith(("paceline.rules", "paceline.errors")), name


@pytest.mark.parametrize("path", sorted((SOURCE / "simulator").glob("*.py")), ids=lambda path: path.name)
def test_the_simulator_knows_nothing_of_learning(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] != "torch", name
        assert not name.startswith(("paceline.strategies", "paceline.backends", "paceline.run")), name


def test_no_code_asks_whether_it_is_simulated() -> None:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.If):
                assert "simulating" not in ast.unparse(node.test), path


def test_the_public_surface_is_what_it_was() -> None:
    assert sorted(paceline.__all__) == ["PacelineError", "Run", "Strategy", "__version__"]
    for name in paceline.__all__:
        assert getattr(paceline, name)


@pytest.mark.parametrize("module", ["paceline.cli", "paceline.control.__main__"])
def test_what_must_start_at_once_imports_nothing_large(module: str) -> None:
    """The command, and the control plane: when that has died, ranks may wait until it is there again."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.js")), ids=lambda path: path.name)
def test_scripts_are_small_or_not_ours(path: Path) -> None:
    if (
        path.name == "uplot.min.js"
    ):  # as its author published it: whoever changes a file here must not forget its origin
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("19c8d4c6ad88929a")
        return
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ") and len(lines) <= LONGEST_FILE and max(map(len, lines)) <= 120


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_files_hold_no_path_of_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name in listed:
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".toml", ".txt", "")
            and path.is_file()
            and name != "tests/test_house_rules.py"
        ):
            text = path.read_text(errors="ignore")
            for trace in ("/root/", "/home/", "/work/"):
                assert trace not in text, f"{name} holds {trace}"
