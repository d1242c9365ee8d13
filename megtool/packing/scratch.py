"""Scratch: memory of a thread's own that is used again for every tile.

Fresh arrays of hundreds of KiB cost more than a pass over them does: the system hands out their
pages one by one, zeroed, and threads wait for one another meanwhile.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megtool.packing.parts import Index

CHUNK = 1 << 18
"""Elements that are handled at a time: their passes stay in the second cache, and are long beside
the turns that threads take in Python between them."""


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[str, NDArray[np.uint8]] = {}


_rooms = _Rooms()


def scratch(use: str, shape: Index | int, dtype: DTypeLike) -> NDArray[Any]:
    """An array of whatever lay there, which is good until this thread asks for the same `use`."""
    shape = (shape,) if isinstance(shape, int) else shape
    kind = np.dtype(dtype)
    size = kind.itemsize
    for n in shape:
        size *= n
    held = _rooms.by_use.get(use)
    if held is None or held.size < size:
        held = _rooms.by_use[use] = np.empty(size, np.uint8)
    return held[:size].view(kind).reshape(shape)


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
