"""The pause of garbage collection, which ends with the last of several."""

from __future__ import annotations

import gc
import threading

import pytest

from megtool.process.gc_pause import paused_collection


def test_collection_is_on_again_after_the_last_pause() -> None:
    with paused_collection():
        assert not gc.isenabled()
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="once"), paused_collection():
        raise ValueError("once")
    assert gc.isenabled()


def test_pauses_of_threads_may_end_in_any_order() -> None:
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with paused_collection():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=pause)
    with paused_collection():
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
