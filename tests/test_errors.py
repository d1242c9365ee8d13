"""Ids of errors: one per class, finer ones that are documented and used, and JSON of errors."""

from __future__ import annotations

import ast
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megtool import errors
from megtool.cli.runner import CommandOutput, run
from megtool.console import Progress
from megtool.errors import ERROR_IDS, FormatError, MegtoolError, StorageError, UsageError
from megtool.report.sections import Report

ROOT = Path(__file__).resolve().parent.parent
CLASSES = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, MegtoolError)]
FINER = {name: kind for kind, names in ERROR_IDS.items() for name in names}


def raised() -> Iterator[tuple[str, str, str]]:
    """Every literal `error_id=` of a call: where it is, the class and the id."""
    for path in sorted((ROOT / "megtool").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            for keyword in node.keywords:
                if keyword.arg == "error_id" and isinstance(keyword.value, ast.Constant):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield where, node.func.id, keyword.value.value


def default_ids() -> Iterator[tuple[str, str, str]]:
    """Every `default_id` of a class outside `errors.py`: where it is, the class and the id."""
    for path in sorted((ROOT / "megtool").rglob("*.py")):
        if path == ROOT / "megtool" / "errors.py" or "default_id" not in path.read_text():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for line in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "default_id":
                    where = f"{path.relative_to(ROOT)}:{line.lineno}"
                    yield where, ast.unparse(node.bases[0]), ast.literal_eval(line.value)


def test_every_class_has_an_id_of_its_own_and_no_id_is_used_twice() -> None:
    assert all("default_id" in vars(kind) for kind in CLASSES)
    ids = [kind.default_id for kind in CLASSES] + [*FINER]
    assert len(set(ids)) == len(ids) == len(CLASSES) + sum(map(len, ERROR_IDS.values()))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in ids)


def test_finer_ids_are_documented_and_belong_to_the_class_that_is_raised() -> None:
    # The row of `VerificationError` has a name of its own in the reference.
    sites = [*raised(), *(site for site in default_ids() if site[2] != "verification")]
    wrong = [
        (where, kind, name)
        for where, kind, name in sites
        if name not in FINER or not issubclass(getattr(errors, kind), FINER[name])
    ]
    assert wrong == []
    used = {name for _, _, name in sites} | set(errors._STORAGE_IDS.values())
    assert FINER.keys() - used == set()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, "no-space"),
        (errno.EDQUOT, "no-space"),
        (errno.EACCES, "permission-denied"),
        (errno.EROFS, "permission-denied"),
        (errno.EIO, "storage"),
    ],
)
def test_an_error_of_the_system_is_told_by_its_code(code: int, expected: str) -> None:
    with pytest.raises(StorageError) as e:
        raise StorageError("cannot write") from OSError(code, "text")
    assert e.value.id == expected


def test_an_id_is_finer_than_its_class_where_it_is_given() -> None:
    assert FormatError("a").id == "format"
    assert FormatError("a", error_id="truncated-file").id == "truncated-file"


def fail(error: BaseException) -> Any:
    def work(progress: Progress) -> Report:
        raise error

    return work


def test_with_json_an_error_is_json_on_stdout_and_words_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = FormatError("it ends", file="a", tensor="t", hint="h", error_id="truncated-file")
    assert run(fail(error), CommandOutput(as_json=True)) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {
            "id": "truncated-file",
            "message": "it ends",
            "file": "a",
            "tensor": "t",
            "hint": "h",
            "exit_status": 3,
        }
    }
    assert err == "error: it ends [file a, tensor t]\n  hint: h\n"


@pytest.mark.parametrize("error", [UsageError("no"), KeyboardInterrupt()])
def test_errors_without_json_and_of_other_ranks_leave_stdout_empty(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fail(error), CommandOutput()) in (2, 130)
    assert run(fail(error), CommandOutput(as_json=True, reports=False)) in (2, 130)
    assert capsys.readouterr().out == ""


def test_an_interrupt_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail(KeyboardInterrupt()), CommandOutput(as_json=True)) == 130
    assert json.loads(capsys.readouterr().out)["error"]["id"] == "interrupted"
