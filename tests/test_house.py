"""What the house promises about its own source, where the linters do not look."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("gateway", "workers", "pipeline", "tiering")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
NAMES_OF_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "shared", "base"}

SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {shown(path): len(path.read_text().splitlines()) for path in SOURCES + TESTS}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = [
        f"{shown(path)}:{function.lineno} {function.name}"
        for path in SOURCES + TESTS
        for function in functions(path)
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_a_package_is_introduced_by_one_docstring_and_imports_nothing() -> None:
    for path in SOURCES:
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, shown(path)
            assert ast.get_docstring(ast.Module(body, [])), shown(path)


def test_every_folder_with_source_is_a_package() -> None:
    folders = {path.parent for path in SOURCES}
    assert [shown(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_every_module_says_what_it_is() -> None:
    silent = [shown(p) for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_no_module_is_named_for_nothing() -> None:
    assert [shown(path) for path in SOURCES if path.stem in NAMES_OF_NOTHING] == []


def test_tests_hold_no_package_that_could_shadow_a_room() -> None:
    assert [shown(path) for path in TESTS if path.name == "__init__.py"] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_other_distribution_brings_a_package_of_this_name(room: str) -> None:
    assert set(packages_distributions().get(room, [])) <= {"pointsman"}


def test_the_gateway_loads_no_torch() -> None:
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "gateway").rglob("*.py")
        if path.stem not in ("__init__", "__main__")
    )
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr or "torch was loaded"


def test_the_command_line_loads_no_torch() -> None:
    code = "import pipeline.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
