"""Pages given ahead: memory keeps what it holds, and writing it faults no more."""

from __future__ import annotations

import mmap
import resource
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from megtool.storage.objects import populate as module
from megtool.storage.objects.populate import populate

NUM_PAGES = 4096


def count_faults(memory: NDArray[np.uint8]) -> int:
    """Faults of this process while every page of memory is written."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[:: mmap.PAGESIZE] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's interface is Linux's")
def test_pages_are_there_before_they_are_written() -> None:
    memory = np.empty(NUM_PAGES * mmap.PAGESIZE, np.uint8)
    populate(memory)
    if module._unsupported:
        pytest.skip("before Linux 5.14")
    assert count_faults(memory) < NUM_PAGES // 8


def test_memory_of_any_shape_keeps_its_values() -> None:
    whole = np.arange(1 << 18, dtype=np.int32).reshape(512, 512)
    for part in (whole[:, ::2], whole[::-1, 3:], whole.T, whole[:0], whole[:, :1]):
        populate(part)
    assert np.array_equal(whole.ravel(), np.arange(1 << 18))
