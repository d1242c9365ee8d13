"""Blocks of objects: requested once, bounded in memory, and found again."""

from __future__ import annotations

import random
import threading

import pytest

from megtool.storage.objects.cache import BLOCK_BYTES, WINDOW_BYTES, ObjectCache

SIZE = 8 * BLOCK_BYTES + 12345
DATA = random.Random(0).randbytes(SIZE)


class Source:
    """Bytes, and what was requested of them."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.requests: list[tuple[int, int]] = []

    def read(self, offset: int, num_bytes: int) -> memoryview:
        self.requests.append((offset, num_bytes))
        return memoryview(self.data)[offset : offset + num_bytes]


def test_small_reads_near_each_other_are_one_request() -> None:
    cache, source = ObjectCache(), Source()
    for offset in (0, 8, 5000, WINDOW_BYTES - 10):
        assert cache.read_window("a", SIZE, offset, 10, source.read) == DATA[offset : offset + 10]
    assert source.requests == [(0, WINDOW_BYTES)]


def test_the_end_is_one_request_with_what_is_before_it() -> None:
    cache, source = ObjectCache(), Source()
    for offset in (SIZE - 22, SIZE - 1024, SIZE - 5000):
        cache.read_window("a", SIZE, offset, 22, source.read)
    assert source.requests == [(SIZE - WINDOW_BYTES, WINDOW_BYTES)]


def test_a_small_object_is_one_request() -> None:
    cache, source = ObjectCache(), Source(DATA[:200_000])
    for offset in (0, 199_990, 100_000):
        cache.read_window("a", 200_000, offset, 10, source.read)
    assert source.requests == [(0, 200_000)]


def test_reading_on_asks_for_more() -> None:
    cache, source = ObjectCache(), Source()
    for offset in range(0, 1 << 20, 1 << 10):
        expected = DATA[offset : offset + 1024]
        assert cache.read_window("a", SIZE, offset, 1024, source.read) == expected
    assert len(source.requests) <= 6


def test_objects_and_versions_are_kept_apart() -> None:
    cache, source = ObjectCache(), Source()
    other = Source(DATA[::-1])
    cache.read_window(("a", "1"), SIZE, 0, 10, source.read)
    assert cache.read_window(("a", "2"), SIZE, 0, 10, other.read) == DATA[::-1][:10]


def test_prefetched_ranges_are_found() -> None:
    cache, source = ObjectCache(), Source()
    ranges = [(n * 100_000, n * 100_000 + 500) for n in range(50)]
    cache.prefetch(("a", r, source.read) for r in ranges)
    source.requests.clear()
    cache.prefetch(("a", r, source.read) for r in ranges)
    for begin, _ in ranges:
        assert (
            cache.read_window("a", SIZE, begin + 7, 400, source.read)
            == (DATA[begin + 7 : begin + 407])
        )
    assert source.requests == []


def runs(step: int, start: int, length: int) -> list[tuple[int, memoryview]]:
    count = (SIZE - start - length) // step
    return [(start + n * step, memoryview(bytearray(length))) for n in range(count)]


@pytest.mark.parametrize("cache_bytes", [3 * BLOCK_BYTES, 64 << 20])
def test_columns_read_each_block_once(cache_bytes: int) -> None:
    """Also with too little memory for all blocks: then from the temporary file."""
    cache, source = ObjectCache(cache_bytes=cache_bytes), Source()
    for column in range(0, 4096, 512):
        wanted = runs(4096, column, 512)
        cache.read_runs("a", (0, SIZE), wanted, source.read)
        assert all(memory == DATA[at : at + 512] for at, memory in wanted)
    assert sorted(source.requests) == [
        (start, min(BLOCK_BYTES, SIZE - start)) for start in range(0, SIZE, BLOCK_BYTES)
    ]
    assert cache.peak_bytes <= cache_bytes
    cache.clear()


def test_memory_is_bounded_with_many_threads() -> None:
    cache, source = ObjectCache(cache_bytes=4 * BLOCK_BYTES), Source()
    wrong = list[int]()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(200):
            offset = draw.randrange(SIZE - 5000)
            if (
                cache.read_window(seed % 3, SIZE, offset, 5000, source.read)
                != (DATA[offset : offset + 5000])
            ):
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.peak_bytes <= 4 * BLOCK_BYTES


def test_threads_that_need_one_block_send_one_request() -> None:
    begin, requests = threading.Barrier(6, timeout=60), list[int]()
    release = threading.Event()

    def read(offset: int, num_bytes: int) -> memoryview:
        requests.append(offset)
        release.wait(0.2)
        return memoryview(DATA)[offset : offset + num_bytes]

    cache = ObjectCache()

    def work() -> None:
        begin.wait()
        cache.read_window("a", SIZE, 0, 100, read)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(requests) == 1


def test_a_failed_request_is_sent_again() -> None:
    cache, source = ObjectCache(), Source()

    def fail(offset: int, num_bytes: int) -> memoryview:
        raise OSError("down")

    with pytest.raises(OSError, match="down"):
        cache.read_window("a", SIZE, 0, 10, fail)
    assert cache.read_window("a", SIZE, 0, 10, source.read) == DATA[:10]


def test_a_full_disk_costs_only_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megtool.storage.objects.cache.os.pwrite", full)
    cache, source = ObjectCache(cache_bytes=2 * BLOCK_BYTES), Source()
    for column in (0, 512):
        wanted = runs(4096, column, 512)
        cache.read_runs("a", (0, SIZE), wanted, source.read)
        assert all(memory == DATA[at : at + 512] for at, memory in wanted)
