"""Per-thread scratch buffers, reused for every tile.

Fresh arrays of hundreds of KiB cost more than a pass over them does: the system hands out their
pages one by one, zeroed, and threads wait for one another meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megtool.number_formats.packed_parts import Index

CHUNK = 1 << 20
"""Elements that are handled at a time: their passes are long beside the turns that threads take in
Python between them, which cost two threads more than it does that passes leave the second cache."""

_LINE, _PAGE = 64, 4096
_STAGGER = 9 * _LINE


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[str, NDArray[np.uint8]] = {}


_rooms = _Rooms()


def scratch(use: str, shape: Index | int, dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialized array, valid until this thread asks for the same `use` again."""
    shape = (shape,) if isinstance(shape, int) else shape
    kind = np.dtype(dtype)
    size = kind.itemsize
    for n in shape:
        size *= n
    buffer = _rooms.by_use.get(use)
    if buffer is None or buffer.size < size:
        buffer = _rooms.by_use[use] = _allocate_offset(size, len(_rooms.by_use))
    return buffer[:size].view(kind).reshape(shape)


def _allocate_offset(size: int, number: int) -> NDArray[np.uint8]:
    """Memory that begins on a line of the cache, and at a line of its page that is no other's.

    As arrays come, all large ones begin at the same place of a page and beside a line: then every
    wide load takes two lines, and one from an array is taken for what was just stored to another.
    """
    raw = np.empty(size + _PAGE + _LINE, np.uint8)
    first = -raw.ctypes.data % _LINE
    first += (number * _STAGGER - raw.ctypes.data - first) % _PAGE
    return raw[first : first + size]


_INDICES = 1 << 16  # as `take` wants them, of eight bytes each


def look_up(table: NDArray[np.uint8], bits: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Put `table[bits]` (matrices) to `out`, some rows at a time."""
    rows, columns = bits.shape
    step = max(1, _INDICES // max(1, columns))
    for r in range(0, rows, step):
        some, into = bits[r : r + step], out[r : r + step]
        index = scratch("index", some.shape, np.intp)
        np.copyto(index, some)
        if into.flags.c_contiguous:
            np.take(table, index, out=into, mode="clip")
        else:
            np.copyto(into, np.take(table, index, mode="clip"))
