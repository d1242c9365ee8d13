"""What is said of a store after requests of the probe fail: only its answers count."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from megtool.errors import DestinationError, StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.probe import probe_store
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore
from megtool.storage.stores.protocol import ObjectInfo

URL = "memory://probed"
FOLDER = f"{URL}/.run.megtool"


class FailingStore(MemoryStore):
    """The next call of each method in `errors` raises what is there; with `is_lasting`, all."""

    def __init__(self, is_lasting: bool, **errors: StorageError) -> None:
        super().__init__(URL)
        self.errors, self.is_lasting = errors, is_lasting
        register_store(self)

    def _fail(self, name: str) -> None:
        error = self.errors.get(name) if self.is_lasting else self.errors.pop(name, None)
        if error is not None:
            raise error

    def read(self, *args: Any, **keywords: Any) -> memoryview:
        self._fail("read")
        return super().read(*args, **keywords)

    def put(self, *args: Any, version: str = "", **keywords: Any) -> ObjectInfo:
        if version:
            self._fail("replace")
        return super().put(*args, version=version, **keywords)

    def complete_upload(self, *args: Any, **keywords: Any) -> ObjectInfo:
        self._fail("complete_upload")
        return super().complete_upload(*args, **keywords)

    def begin_upload(self, key: str) -> str:
        self._fail("begin_upload")
        return super().begin_upload(key)

    def list_parts(self, *args: Any) -> Any:
        self._fail("list_parts")
        return super().list_parts(*args)


@pytest.mark.parametrize(
    "method", ["read", "replace", "begin_upload", "list_parts", "complete_upload"]
)
@pytest.mark.parametrize("error_id", ["throttled", "storage", "permission-denied"])
def test_a_failure_that_passes_is_raised_and_not_remembered(method: str, error_id: str) -> None:
    error = StorageError("the store is busy (503)", file=URL, error_id=error_id)
    store = FailingStore(False, **{method: error})
    with pytest.raises(StorageError) as caught:
        probe_store(StorePath(FOLDER))
    assert caught.value is error
    assert not store.list("", recursive=True).objects
    assert not store.list_uploads("")
    assert probe_store(StorePath(FOLDER)) == ()


@pytest.mark.parametrize(
    ("method", "error_id", "fault"),
    [
        ("read", "ranges-ignored", "does not read ranges"),
        ("replace", "not-implemented", "does not replace a known version"),
        ("begin_upload", "not-implemented", "does not take parts"),
        ("complete_upload", "not-implemented", "does not take parts"),
    ],
)
def test_a_clear_answer_is_a_fault_of_the_store(method: str, error_id: str, fault: str) -> None:
    FailingStore(True, **{method: StorageError("no", file=URL, error_id=error_id)})
    for _ in range(2):
        with pytest.raises(DestinationError, match=fault) as caught:
            probe_store(StorePath(FOLDER))
        assert caught.value.id == "unsafe-store"
    assert fault in probe_store(StorePath(FOLDER), is_unsafe=True)[0]


class CarelessStore(MemoryStore):
    """Ignores one condition of requests."""

    def __init__(self, ignored: str) -> None:
        super().__init__(URL)
        self.ignored = ignored
        register_store(self)

    def put(self, *args: Any, **conditions: Any) -> ObjectInfo:
        conditions.pop(self.ignored, None)
        return super().put(*args, **conditions)

    def complete_upload(self, *args: Any, create: bool = False) -> ObjectInfo:
        return super().complete_upload(*args, create=create and self.ignored != "completion")


@pytest.mark.parametrize(
    ("ignored", "fault"),
    [
        ("create", "the store ignores If-None-Match: it replaces"),
        ("version", "the store ignores If-Match: it replaces"),
        ("completion", "the store ignores If-None-Match where an upload is completed"),
    ],
)
def test_a_condition_that_is_ignored_is_a_fault(ignored: str, fault: str) -> None:
    store = CarelessStore(ignored)
    with pytest.raises(DestinationError, match=fault) as caught:
        probe_store(StorePath(FOLDER))
    assert caught.value.id == "unsafe-store"
    (warning,) = probe_store(StorePath(FOLDER), is_unsafe=True)
    assert fault in warning
    assert not store.list("", recursive=True).objects
    assert not store.list_uploads("")


def test_a_store_that_was_probed_is_not_kept() -> None:
    store = weakref.ref(FailingStore(False))
    assert probe_store(StorePath(FOLDER)) == ()
    FailingStore(False)  # takes its place
    gc.collect()
    assert store() is None
