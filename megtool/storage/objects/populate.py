"""Pages for memory that is about to be filled, in one call instead of a fault for each."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14 and later (linux/mman.h)."""

_SMALLEST, _SPARSEST = 64 << 10, 8

_unsupported: set[int] = set()


def populate(memory: NDArray[Any]) -> None:
    """Give the pages of an array to it, if this system can; what it holds does not change.

    Those between the elements of an array with strides get theirs, too, if they are not many.
    """
    advise = _find_madvise()
    if advise is None or memory.nbytes < _SMALLEST or _unsupported:
        return
    spans = [(n - 1) * step for n, step in zip(memory.shape, memory.strides, strict=True)]
    start = memory.ctypes.data + sum(min(n, 0) for n in spans)
    stop = memory.ctypes.data + sum(max(n, 0) for n in spans) + memory.itemsize
    if stop - start > _SPARSEST * memory.nbytes:
        return
    page = mmap.PAGESIZE
    first, end = -(-start // page) * page, stop // page * page
    has_failed = first < end and advise(first, end - first, _POPULATE_WRITE) != 0
    if has_failed and ctypes.get_errno() == errno.EINVAL:
        _unsupported.add(_POPULATE_WRITE)


@functools.cache
def _find_madvise() -> Callable[[int, int, int], int] | None:
    """The C library's `madvise`, None where there is none or another system's."""
    if sys.platform != "linux":
        return None
    try:
        advise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    function: Callable[[int, int, int], int] = advise
    return function
