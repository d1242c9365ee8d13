"""The house rules that a parser can check: sizes, names, docstrings, converters as data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CAPS = {"megtool": 600, "converters": 300, "examples": 300, "tests": 650}
FUNCTION_CAP = 120
EMPTY_NAMES = {"utils", "helpers", "common", "base", "manager", "handler", "engine", "wrapper"}
PRINTERS = {"runner.py", "console.py"}

ROOT = Path(__file__).resolve().parent.parent


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", CAPS)
def test_no_file_outgrows_its_cap(folder: str) -> None:
    sizes = {named(path): len(path.read_text().splitlines()) for path in sources(folder)}
    assert {path: size for path, size in sizes.items() if size > CAPS[folder]} == {}


def test_no_function_outgrows_its_cap() -> None:
    sizes = {
        f"{named(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources("megtool", "examples")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {where: size for where, size in sizes.items() if size > FUNCTION_CAP} == {}


def test_every_file_begins_with_a_sentence() -> None:
    bad = []
    for path in sources(*CAPS):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if not first.endswith((".", "?", ":")):
            bad.append(f"{named(path)}: {first!r}")
    assert bad == []


def test_no_name_says_nothing() -> None:
    paths = [p for folder in CAPS for p in (ROOT / folder).rglob("*")]
    assert [named(p) for p in paths if p.stem.removeprefix("test_") in EMPTY_NAMES] == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether the handler catches everything; to clean up or tell another thread is allowed."""
    match handler.type:
        case None | ast.Name(id="Exception"):
            return True
        case ast.Name(id="BaseException"):
            raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
            return not raises and handler.name is None
    return False


def test_library_code_neither_prints_nor_asserts_nor_catches_everything() -> None:
    bad = []
    for path in sources("megtool", "converters"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{named(path)}:{getattr(node, 'lineno', 0)}"
            match node:
                case ast.Assert():
                    bad.append(f"{where}: assert")
                case ast.Call(func=ast.Name(id="print")) if path.name not in PRINTERS:
                    bad.append(f"{where}: print")
                case ast.ExceptHandler() if swallows(node):
                    bad.append(f"{where}: catches everything")
    assert bad == []


CODE = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.comprehension,
    ast.Try,
    ast.With,
)


@pytest.mark.parametrize("path", sources("converters"), ids=lambda path: path.stem)
def test_a_converter_is_data(path: Path) -> None:
    bad = []
    for node in ast.walk(ast.parse(path.read_text())):
        where = getattr(node, "lineno", 0)
        if isinstance(node, CODE):
            bad.append(f"{where}: {type(node).__name__}")
        elif isinstance(node, ast.Import):
            bad.append(f"{where}: import {node.names[0].name}")
        elif isinstance(node, ast.ImportFrom) and (
            node.level or f"{node.module}.".split(".")[:2] != ["megtool", "convert"]
        ):
            bad.append(f"{where}: from {node.module}")
    assert bad == []
