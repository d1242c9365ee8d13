"""Threads that the system does not start, or that die before their first line."""

from __future__ import annotations

import _thread
from collections.abc import Container
from typing import Any

import pytest


def kill_threads(monkeypatch: pytest.MonkeyPatch, numbers: Container[int]) -> None:
    """Let the threads with these numbers, from 1, end at once, as for lack of memory."""
    start, calls = _thread.start_new_thread, []

    def start_dead(function: Any, arguments: Any) -> int:
        calls.append(1)
        return start((lambda *_: None) if len(calls) in numbers else function, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start_dead)


def refuse_threads(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """Let the system start no thread after the first `after`."""
    start, calls = _thread.start_new_thread, []

    def refuse(function: Any, arguments: Any) -> int:
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("can't start new thread")
        return start(function, arguments)

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
