"""Single faults that are planted to see whether tests notice: the drawing, and the verdicts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.mutation.faults import find_faults
from tests.support.mutation.sample import Mutant, draw, table
from tests.support.mutation.selection import TestSelection

SOURCE = '''"""Doc."""

LIMIT: int = 3


def fit(xs: list[int], is_open: bool = True) -> int:
    if not xs or max(xs) > LIMIT:
        raise ValueError("é", 1)
    total = 0
    for x in xs:
        total += x
        print(x, total)
    return total if is_open else total // 2
'''
ROOT = Path(__file__).resolve().parent.parent


def test_every_kind_of_fault_is_found_and_compiles() -> None:
    found = find_faults(SOURCE)
    for fault in found:
        changed = ast.unparse(ast.parse(fault.plant(SOURCE)))
        assert changed != ast.unparse(ast.parse(SOURCE)), fault
    said = {(f.kind, f.before, f.after) for f in found}
    assert said >= {
        ("constant", "3", "(4)"),
        ("constant", "True", "(False)"),
        ("drop a not", "not xs", "(xs)"),
        ("any/all, min/max", "max(xs)", "(min(xs))"),
        ("compare", "max(xs) > LIMIT", "(max(xs) >= LIMIT)"),
        ("arithmetic", "total += x", "total -= x"),
        ("swap arguments", "print(x, total)", "(print(total, x))"),
        ("delete a call", "print(x, total)", "pass"),
        ("swap branches", "total if is_open else total // 2", "(total // 2 if is_open else total)"),
    }
    kinds = {f.kind for f in found}
    assert kinds >= {"and/or", "never: not xs or max(xs) > LIMIT", "break after the first"}
    assert "always: not xs or max(xs) > LIMIT" not in kinds  # a refusal of everything
    assert not any("é" in f.before for f in found if f.kind == "constant")


def test_a_seed_draws_the_same_faults() -> None:
    first = draw(ROOT, "spec", 5, seed=1)
    assert first == draw(ROOT, "spec", 5, seed=1) != draw(ROOT, "spec", 5, seed=2)
    assert {m.file.parts[:2] for m in first} == {("megtool", "spec")}


@pytest.fixture(scope="module")
def selection() -> TestSelection:
    return TestSelection(ROOT)


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("megtool/optim/muon.py", "tests/optim/test_muon.py"),
        ("megtool/convert/gguf.py", "tests/convert/test_gguf.py"),
        ("converters/cwm.py", "tests/converters/test_missing_keys.py"),
    ],
)
def test_the_closest_tests_come_first(selection: TestSelection, file: str, first: str) -> None:
    found = selection.find(ROOT / file, 6)
    assert found[0] == ROOT / first
    assert len(found) <= 6


def test_the_table_counts_by_package() -> None:
    fault = find_faults("x = 1\n")[0]
    a, b = (Mutant(package=name, file=Path(f"{name}.py"), fault=fault) for name in "ab")
    said = table([(a, "killed by test_x"), (a, "survived 3 files of tests"), (b, "undecided")])
    assert "| a | 2 | 1 | 1 | 0 | 50% |" in said
    assert "| b | 1 | 0 | 0 | 1 |  |" in said
    assert "| **all** | 3 | 1 | 1 | 1 | 50% |" in said
    assert "- survived 3 files of tests: a.py:1: constant: `1` to `(2)`" in said
