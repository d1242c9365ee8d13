"""Work in the background of training: errors come when they are asked for, and nothing waits."""

from __future__ import annotations

import threading

import pytest

from megtool.errors import StorageError
from megtool.train.checkpointing.background_task import BackgroundTask
from tests.support.errors import raises
from tests.support.threads import kill_threads, refuse_threads


def test_a_copy_then_work() -> None:
    task, go, done = BackgroundTask(), threading.Event(), []
    task.start(lambda: done.append("copy"), lambda: done.append("work") if go.wait(20) else None)
    task.wait_for_copy()
    assert done == ["copy"]
    assert task.is_busy
    task.check()
    task.join(0.01)
    assert task.is_busy
    go.set()
    task.join()
    assert done == ["copy", "work"]
    assert not task.is_busy


@pytest.mark.parametrize("where", ["copy", "work"])
def test_an_error_is_raised_once(where: str) -> None:
    task = BackgroundTask()

    def fail() -> None:
        raise StorageError("no space")

    task.start(fail if where == "copy" else None, fail)
    task.wait_for_copy()
    with raises(StorageError, "no space"):
        task.join()
    task.check()
    task.join()


def test_a_thread_that_dies_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task = BackgroundTask()
    kill_threads(monkeypatch, {1})
    task.start(lambda: None, lambda: None)
    task.wait_for_copy()
    with pytest.raises(MemoryError):
        task.join()
    assert not task.is_busy


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    task = BackgroundTask()
    refuse_threads(monkeypatch)
    with raises(StorageError, "thread", hint="ulimit -u"):
        task.start(lambda: None, lambda: None)
    task.wait_for_copy()
    task.join()
