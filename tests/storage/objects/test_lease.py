"""A lease is released by its holder alone, also when what it reads is damaged."""

from __future__ import annotations

import json

import pytest

from megtool.errors import DestinationError, StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.lease import Lease
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.protocol import ConditionError, ObjectInfo
from tests.support.errors import raises
from tests.support.stores.memory_stores import URL, CountedStore


class DamagedReads(CountedStore):
    """Every object that is read begins with another byte."""

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        data = bytearray(super().read(key, offset, num_bytes, version=version))
        data[0] ^= 1
        return memoryview(bytes(data))


class WrongHeads(CountedStore):
    """Every object is said to be missing, though a listing shows it."""

    def head(self, key: str) -> ObjectInfo | None:
        return None


@pytest.fixture
def path() -> StorePath:
    return StorePath(f"{URL}/.run.megtool/lock")


def test_a_damaged_reply_does_not_keep_the_lock(path: StorePath) -> None:
    store = DamagedReads()
    register_store(store)
    lease = Lease(path)
    lease.check()
    lease.release()
    assert store.objects() == {}


def test_a_lock_that_is_said_to_be_missing_is_removed(path: StorePath) -> None:
    store = WrongHeads()
    register_store(store)
    lease = Lease(path)
    lease.check()
    lease.release()
    assert store.objects() == {}


def test_another_holder_keeps_it(path: StorePath) -> None:
    store = CountedStore()
    register_store(store)
    lease = Lease(path)
    other = json.dumps({"token": "other", "pid": 1, "host": "elsewhere"}).encode()
    store.put(path.key, other)
    with raises(DestinationError, id="destination-locked"):
        lease.check()
    lease.release()
    assert store.objects() == {path.key: other}


class SilentStore(CountedStore):
    """Carries the next put of a version out, and does not answer."""

    is_silent = False

    def put(
        self, key: str, data: bytes | memoryview, *, create: bool = False, version: str = ""
    ) -> ObjectInfo:
        info = super().put(key, data, create=create, version=version)
        if version and self.is_silent:
            self.is_silent = False
            raise StorageError("the store did not answer", file=self.url)
        return info


def test_it_is_renewed_after_a_reply_was_lost(path: StorePath) -> None:
    store = SilentStore()
    register_store(store)
    lease = Lease(path)
    store.is_silent = True
    with raises(StorageError, "did not answer"):
        lease.renew()
    lost = store.head(path.key)
    lease.renew()
    assert store.head(path.key) != lost
    lease.release()
    assert store.objects() == {}


def test_one_that_was_taken_is_not_renewed(path: StorePath) -> None:
    store = CountedStore()
    register_store(store)
    lease = Lease(path)
    store.put(path.key, b'{"token": "other"}')
    with pytest.raises(ConditionError):
        lease.renew()
    assert store.objects() == {path.key: b'{"token": "other"}'}
    lease.release()


def test_a_holder_in_another_container_is_not_looked_for_here(
    path: StorePath,
) -> None:
    store = CountedStore()
    register_store(store)
    lease = Lease(path)
    holder = json.loads(store.objects()[path.key])
    own = holder["processes"]
    holder |= {"processes": "pid:[1]", "pid": 2**22 + 1, "token": "another"}
    lease.release()
    store.put(path.key, json.dumps(holder).encode())
    with raises(DestinationError, "is writing this destination"):
        Lease(path)
    store.put(path.key, json.dumps(holder | {"processes": own}).encode())
    Lease(path).release()
