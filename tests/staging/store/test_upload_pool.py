"""Threads that upload parts: beside the caller, bounded in bytes, with one error for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from megtool.errors import StorageError
from megtool.staging.store.upload_pool import UploadPool
from megtool.storage.location.path import StorePath
from megtool.storage.objects.part_buffers import PartBuffers
from megtool.storage.objects.part_layout import CopyRun, Coverage, PartLayout
from megtool.storage.objects.writer import ObjectWriter
from megtool.storage.stores.protocol import ObjectInfo, UploadedPart


@pytest.fixture
def pool() -> Iterator[UploadPool]:
    made = UploadPool(3, 100)
    yield made
    made.close()


def test_one_thread_does_the_work_itself() -> None:
    pool, ran = UploadPool(1, 0), list[int]()
    pool.run(10, lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert not pool.wait_for_one()
    pool.settle()
    pool.close()


def test_the_caller_goes_on_meanwhile(pool: UploadPool) -> None:
    may_end, ran = threading.Event(), list[int]()

    def job() -> None:
        may_end.wait()
        ran.append(threading.get_ident())

    for _ in range(3):
        pool.run(10, job)
    assert not ran
    may_end.set()
    pool.settle()
    assert len(ran) == 3
    assert threading.get_ident() not in ran


def test_bytes_under_way_are_bounded(pool: UploadPool) -> None:
    lock, under_way, most = threading.Lock(), [0], [0]
    begun: list[int] = []

    def job() -> None:
        with lock:
            under_way[0] -= 40

    for number in range(50):
        with lock:
            under_way[0] += 40  # before the pool has accepted it: one more than that may be
            most[0] = max(most[0], under_way[0])
        pool.run(40, job)
        begun.append(number)
    pool.settle()
    assert most[0] <= 100 + 40
    assert under_way == [0]


def test_a_job_that_is_larger_than_the_limit_is_alone(pool: UploadPool) -> None:
    ran: list[int] = []
    for number in range(3):
        pool.run(1000, lambda number=number: ran.append(number))  # type: ignore[misc]
    pool.settle()
    assert ran == [0, 1, 2]


def test_the_first_error_ends_all(pool: UploadPool) -> None:
    failed, ran = threading.Event(), list[int]()

    def fail() -> None:
        failed.set()
        raise StorageError("the store refused")

    pool.run(10, fail)
    failed.wait()
    with pytest.raises(StorageError, match="refused"):
        pool.settle()
    with pytest.raises(StorageError, match="refused"):
        pool.run(10, lambda: ran.append(1))
    with pytest.raises(StorageError, match="refused"):
        pool.wait_for_one()
    pool.close()
    assert not ran


def test_closing_drops_what_waits() -> None:
    pool, may_end, begun, ran = UploadPool(2, 100), threading.Event(), threading.Barrier(3), [0]

    def block() -> None:
        begun.wait()
        may_end.wait()

    for _ in range(2):
        pool.run(10, block)
    begun.wait()
    pool.run(10, lambda: ran.append(1))
    closing = threading.Thread(target=pool.close)
    closing.start()
    may_end.set()
    closing.join()
    assert ran == [0] or ran == [0, 1]  # it may begin before the pool is closed
    pool.close()


class _Target:
    """Takes parts slowly, and remembers them."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}

    def touch(self, writer: ObjectWriter, part: int) -> None:
        pass

    def upload(self, writer: ObjectWriter, part: int, data: memoryview) -> UploadedPart:
        time.sleep(0.002)
        self.parts[part] = bytes(data)
        return UploadedPart(number=part + 1, size=data.nbytes, tag="")

    def copy(self, writer: ObjectWriter, part: int, run: CopyRun) -> None:
        raise NotImplementedError

    def uploaded(self, writer: ObjectWriter, part: int) -> None:
        assert writer.is_uploaded(part)

    def complete(self, writer: ObjectWriter) -> ObjectInfo:
        raise NotImplementedError


def test_parts_wait_for_memory_rather_than_for_the_disk() -> None:
    pool, target, buffers = UploadPool(2, 10_000), _Target(), PartBuffers(3000)
    expected = Coverage()
    expected.add(0, 39_000)
    expected.add(39_500, 40_000)
    layout = PartLayout([1000 * n for n in range(1, 41)])
    path = StorePath("memory://pool/object")
    writer = ObjectWriter(path, layout, target, buffers, expected, transfers=pool)
    data = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8).tobytes()
    for start in range(0, 39_000, 500):
        writer.write(data[start : start + 500], start)
    writer.write(data[39_500:], 39_500)
    pool.settle()
    pool.close()
    assert b"".join(target.parts[n] for n in range(40)) == (
        data[:39_000] + bytes(500) + data[39_500:]
    )
    assert writer.num_uploaded == 40
    assert 1000 < buffers.peak_bytes <= 3000
    assert buffers.spilled_bytes == 0
    buffers.close()


def test_without_uploads_under_way_parts_go_to_the_disk() -> None:
    pool, target, buffers = UploadPool(2, 10_000), _Target(), PartBuffers(2000)
    expected = Coverage()
    expected.add(0, 5000)
    layout = PartLayout([1000 * n for n in range(1, 6)])
    path = StorePath("memory://pool/object")
    writer = ObjectWriter(path, layout, target, buffers, expected, transfers=pool)
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    for start in (*range(0, 5000, 1000), *range(500, 5000, 1000)):
        writer.write(data[start : start + 500], start)
    pool.settle()
    pool.close()
    assert b"".join(target.parts[n] for n in range(5)) == data
    assert buffers.spilled_bytes == 3000
    buffers.close()
