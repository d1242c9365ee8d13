"""Where tests and their builders live: the folders of the package, and tests/support."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "megtool"
WHOLE = {"converters", "emulated", "faults", "fidelity", "peers", "stores"}
"""Folders of tests that run the whole package and mirror none of its folders."""
OF_THE_CHECKOUT = {
    "test_benchmarks",
    "test_docstrings",
    "test_examples",
    "test_first_gpu",
    "test_floors",
    "test_packaging",
    "test_readme",
    "test_rotation",
}
OF_THE_CHECKOUT |= {"test_api", "test_docs", "test_mutation", "test_support", "test_tree"}
"""Tests of the checkout itself."""

FILES = sorted(p for p in TESTS.rglob("*.py"))
TEST_FILES = [p for p in FILES if p.name.startswith("test_")]


def relative(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def imported_modules(path: Path) -> list[str]:
    """Modules that a file imports, and `package.name` for each imported name."""
    out = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            out += [f"{node.module}.{alias.name}" for alias in node.names]
    return out


def test_files_import_only_builders() -> None:
    wrong = [
        f"{relative(path)}: {module}"
        for path in FILES
        for module in imported_modules(path)
        if module.partition(".")[0] == "tests" and not module.startswith("tests.support.")
    ]
    assert wrong == []


def test_every_file_is_a_test_a_builder_or_fixtures() -> None:
    others = [p for p in FILES if p not in TEST_FILES and p.name != "conftest.py"]
    assert [relative(p) for p in others if p.relative_to(TESTS).parts[0] != "support"] == []


def test_conftest_files_hold_fixtures() -> None:
    """A function there is a fixture or a hook of pytest."""
    functions = [
        f"{relative(path)}: {node.name}"
        for path in FILES
        if path.name == "conftest.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("pytest_")
        and not any("fixture" in ast.unparse(d) for d in node.decorator_list)
    ]
    assert functions == []


def is_mirrored(path: Path) -> bool:
    """Whether it is named test_<module>[_<aspect>].py after a module of its folder."""
    room = path.relative_to(TESTS).parent
    if room.parts and room.parts[0] in WHOLE:
        return True
    folder = PACKAGE / room
    names = {p.stem for p in folder.glob("*.py")} | {folder.name}
    stem = path.stem.removeprefix("test_")
    return any(stem == name or stem.startswith(f"{name}_") for name in names)


def test_tests_lie_where_their_module_lies() -> None:
    at_root = {p for p in TEST_FILES if p.parent == TESTS and p.stem in OF_THE_CHECKOUT}
    wrong = [relative(p) for p in TEST_FILES if p not in at_root and not is_mirrored(p)]
    assert wrong == []


def test_the_map_of_support_names_every_folder_and_file() -> None:
    page = (TESTS / "support" / "README.md").read_text()
    folders = {f"{p.parent.name}/" for p in (TESTS / "support").glob("*/*.py")}
    files = {p.name for p in (TESTS / "support").glob("*.py")}
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(.+?)`", row)} == folders | files
