"""Large libraries are not imported into a process that has too little memory for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megtool.cli import import_guard
from megtool.cli.import_guard import ImportGuard, find_free_bytes, guard_imports
from megtool.errors import OutOfMemoryError
from tests.support.errors import raises
from tests.support.limits import run_limited
from tests.support.models import tiny_llama

MIB = 1 << 20


def test_there_is_one_guard_before_all_finders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f) is not ImportGuard])
    for _ in range(2):
        guard_imports()
    assert [type(f) for f in sys.meta_path].count(ImportGuard) == 1
    assert isinstance(sys.meta_path[0], ImportGuard)


@pytest.mark.parametrize("name", ["numpy", "torch", "matplotlib"])
def test_a_library_that_does_not_fit_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_guard, "find_free_bytes", lambda: 100 * MIB)
    with raises(OutOfMemoryError, f"{name} needs", "leaves 100 MiB", hint="ulimit -v"):
        ImportGuard().find_spec(name)
    assert ImportGuard().find_spec("json") is None
    assert ImportGuard().find_spec(f"{name}.core") is None


@pytest.mark.parametrize(
    ("before", "free", "expected"),
    [
        ({}, None, {"OPENBLAS_NUM_THREADS": "1"}),
        ({"OPENBLAS_NUM_THREADS": "3"}, None, {"OPENBLAS_NUM_THREADS": "3"}),
        ({}, 200 * MIB, {"OPENBLAS_NUM_THREADS": "1"}),
    ],
)
def test_numpy_gets_one_thread(
    before: dict[str, str],
    free: int | None,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(import_guard, "find_free_bytes", lambda: free)
    monkeypatch.setattr("os.environ", dict(before))
    guard = ImportGuard()
    guard.find_spec("numpy")
    assert import_guard.os.environ == expected
    monkeypatch.setattr(import_guard, "find_free_bytes", lambda: None)
    guard.find_spec("torch")
    assert import_guard.os.environ == before


@pytest.mark.parametrize(
    ("free", "cores", "expected"),
    [(None, 64, None), (960 * MIB, 64, "1"), (3 << 30, 64, "12"), (3 << 30, 4, None)],
)
def test_torch_gets_the_threads_that_fit(
    free: int | None, cores: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_guard, "find_free_bytes", lambda: free)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    ImportGuard().find_spec("torch")
    assert import_guard.os.environ.get("OMP_NUM_THREADS") == expected


def test_tokenizers_get_the_threads_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_guard, "find_free_bytes", lambda: 500 * MIB)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    ImportGuard().find_spec("tokenizers")
    assert import_guard.os.environ == {"RAYON_NUM_THREADS": "2"}


def test_free_bytes_are_those_of_the_limit() -> None:
    assert find_free_bytes() is None or sys.platform != "linux"
    code = "from megtool.cli.import_guard import find_free_bytes; print(find_free_bytes())"
    done = run_limited(["-c", code], address_bytes=300 * MIB)
    assert 200 * MIB < int(done.out) < 300 * MIB


def test_a_verb_without_memory_is_one_error(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf", num_hidden_layers=1, vocab_size=5)
    arguments = ["-m", "megtool", "inspect", source, "--json"]
    done = run_limited(arguments, address_bytes=130 * MIB)
    assert done.status == 2
    assert json.loads(done.out)["error"]["id"] == "out-of-memory"
    assert done.err.startswith("error: numpy needs ")
    assert run_limited(["-m", "megtool", "--version"], address_bytes=130 * MIB).status == 0


def test_a_plot_that_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that has trained and saved does not end for lack of a picture."""
    pytest.importorskip("torch")
    from megtool.commands import finetune

    monkeypatch.setattr(import_guard, "find_free_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(sys, "meta_path", [ImportGuard(), *sys.meta_path])
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert finetune._plot(tmp_path, [(1, 2.0)], []) is None
    assert "matplotlib needs 128 MiB" in caplog.text
    assert list(tmp_path.iterdir()) == []
