"""Sums over the elements of a tensor that one pass computes, at about the speed of reading.

Everything is added up in any order from pieces: counts by the bits of elements, the sum of squares,
which rows have an element that is not zero, and a sketch. A sketch is a linear map of the tensor to
a small grid: element (i, j) of the rows and columns is added, with a sign of its row's block and
one of its column, to the cell (i mod K, j mod K). The squared size of a sketch estimates the
tensor's, and that of the difference of two sketches that of the difference of the tensors
(a count sketch, Charikar, Chen and Farach-Colton 2002, in two dimensions), to about sqrt(2/K) of it
in the worst case. Sketches of numbers that are never negative are made without signs: each cell is
then the sum of a fixed part of the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.transport.cast import numeric_values
from megtool.transport.strided import Array

Floats = NDArray[np.float64]

CHUNK_ELEMENTS = 1 << 18
"""About so many elements are summed at once: threads wait for each other less than with fewer, and
most copies stay in the cache."""

MAX_CHUNK_ELEMENTS = 1 << 20
"""And at most so many, but for a row that is longer."""

_PRIME = 0x9E3779B97F4A7C15
_COLUMNS = 1 << 40  # the signs of columns are others than those of rows
_BITS = {  # integer view, all but the sign, infinity, the smallest normal number
    "bfloat16": ("<u2", 0x7FFF, 0x7F80, 0x0080),
    "float16": ("<u2", 0x7FFF, 0x7C00, 0x0400),
    "float32": ("<u4", 0x7FFFFFFF, 0x7F800000, 0x00800000),
    "float64": ("<u8", 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, 0x0010000000000000),
}


@dataclass(slots=True)
class ElementSums:
    """The sums of some elements of a tensor.

    `denormals` are numbers below the smallest normal one of the dtype. `largest` is the largest
    magnitude of finite elements. `sketch` is float64 `[K, K]`, empty where none is made.
    """

    count: int = 0
    zeros: int = 0
    denormals: int = 0
    nan: int = 0
    inf: int = 0
    negative: int = 0
    largest: float = 0.0
    squares: float = 0.0
    sketch: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def norm(self) -> float:
        """The square root of the sum of squares of the finite elements."""
        return math.sqrt(self.squares)

    @property
    def rms(self) -> float:
        """The norm over the square root of the number of elements."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def merge(self, sums: ElementSums) -> None:
        """Add the sums of other elements."""
        for name in ("count", "zeros", "denormals", "nan", "inf", "negative", "squares"):
            setattr(self, name, getattr(self, name) + getattr(sums, name))
        self.largest = max(self.largest, sums.largest)
        if sums.sketch.size:
            self.sketch = self.sketch + sums.sketch if self.sketch.size else sums.sketch


def signs(numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    """A fixed sign, 1 or -1, for each number: the same in every run, without a pattern."""
    x = numbers.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = (x + np.uint64(1)) * np.uint64(_PRIME)
        x ^= x >> np.uint64(29)
        x *= np.uint64(0xBF58476D1CE4E5B9)
    return np.where(x >> np.uint64(63), np.float32(1), np.float32(-1))


def rows_at_once(width: int, size: int) -> int:
    """How many rows of a box are summed at once: whole blocks of the sketch, where they fit."""
    rows = max(CHUNK_ELEMENTS // max(width, 1), size, 1)
    if rows * width > MAX_CHUNK_ELEMENTS:
        rows = max(1, CHUNK_ELEMENTS // width)
    return rows // size * size if size and rows > size else rows


class Workspace:
    """Buffers of one thread, as large as its largest chunk: nothing is allocated for each chunk."""

    def __init__(self) -> None:
        self.fit(CHUNK_ELEMENTS)

    def fit(self, elements: int) -> None:
        """Make room for chunks of so many elements."""
        self._bits = np.empty(elements, "<u8")
        self._small = np.empty(elements, bool)
        self._wide = np.empty(elements, "<u4")
        self._other = np.empty(elements, "<u4")

    @property
    def num_elements(self) -> int:
        """The largest chunk that fits."""
        return self._small.size

    def scratch(self, elements: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Two arrays to compute in, which hold until the next call of any method."""
        if elements > self.num_elements:
            self.fit(elements)
        return self._wide[:elements], self._other[:elements]

    def magnitudes(self, bits: Array, mask: int) -> Array:
        """The bits without the sign."""
        out: Array = self._bits.view(bits.dtype)[: bits.size]
        np.bitwise_and(bits, bits.dtype.type(mask), out=out)
        return out

    def below(self, magnitudes: Array, limit: int) -> NDArray[np.bool_]:
        """Which are smaller than a limit."""
        small = self._small[: magnitudes.size]
        np.less(magnitudes, magnitudes.dtype.type(limit), out=small)
        return small

    def as_float32(self, array: Array, kind: DType) -> NDArray[np.float32]:
        """Elements as float32, exactly where the dtype is not wider; float64 is rounded."""
        wide = self._wide[: array.size]
        if kind.name == "bfloat16":
            np.copyto(wide, array)
            return np.left_shift(wide, 16, out=wide).view("<f4")
        if kind.name == "float16":  # numpy converts one at a time
            other = self._other[: array.size]
            np.copyto(wide, array.view("<u2"))
            np.bitwise_and(wide, 0x8000, out=other)
            np.left_shift(other, 16, out=other)
            np.bitwise_and(wide, 0x7FFF, out=wide)
            np.left_shift(wide, 13, out=wide)
            np.bitwise_or(wide, other, out=wide)
            values = wide.view("<f4")
            np.multiply(values, np.float32(2.0**112), out=values)
            return values
        values = numeric_values(array, kind)
        return values if values.dtype == np.dtype("<f4") else values.astype("<f4")


class SumsCollector:
    """Adds up the elements of boxes of one tensor.

    `columns` is the size of the last dimension of the tensor, `size` the K of the sketch (0 for
    none), `is_signed` false for numbers that are never negative.
    """

    def __init__(
        self,
        kind: DType,
        columns: int,
        size: int,
        workspace: Workspace,
        *,
        is_signed: bool = True,
    ) -> None:
        self._kind, self._size, self._is_signed = kind, size, is_signed
        self._columns, self._workspace = columns, workspace
        self._bits = _BITS.get(kind.name)
        self._column = self._width = 0
        self._folded = np.zeros((0, 0), np.float32)
        self.sums = ElementSums()
        if size:
            self.sums.sketch = np.zeros((size, size))

    @property
    def is_measured(self) -> bool:
        """Whether the dtype's elements are numbers that are summed up."""
        return self._bits is not None or (self._kind.is_float and self._kind.itemsize == 1)

    def open_box(self, column: int, width: int) -> None:
        """Begin a box whose rows have `width` elements from `column` on."""
        self._column, self._width = column, width
        if self._size:
            self._folded = np.zeros((self._size, width), np.float32)

    def add(self, array: Array, row: int) -> NDArray[np.bool_] | None:
        """Add whole rows of the box, flat, from `row` of the tensor on; at most a chunk.

        Returns which rows have an element that is not zero; None of 1-d tensors and other dtypes.
        """
        if not self.is_measured or not array.size:
            return None
        before = self.sums.nan + self.sums.inf
        if array.size > self._workspace.num_elements:
            self._workspace.fit(array.size)
        alive = self._count(array)
        values = self._workspace.as_float32(array, self._kind)
        squares = float(np.dot(values, values))
        if self.sums.nan + self.sums.inf > before or not math.isfinite(squares):
            is_finite = np.isfinite(numeric_values(array, self._kind)) & np.isfinite(values)
            values = np.where(is_finite, values, np.float32(0))
            wide = values.astype(np.float64)
            squares = float(np.dot(wide, wide))
        self.sums.squares += squares
        if self._size:
            self._add_to_sketch(values.reshape(-1, self._width), row)
        return alive

    def close_box(self) -> None:
        """End the box: its columns are folded into the sketch."""
        if not self._size:
            return
        size, column, width = self._size, self._column, self._width
        numbers = np.arange(column, column + width)
        folded = self._folded * self._signs(numbers // size + _COLUMNS)
        padded = np.pad(folded, ((0, 0), (column % size, -(column + width) % size)))
        self.sums.sketch += padded.reshape(size, -1, size).sum(1, dtype=np.float64)

    def _count(self, array: Array) -> NDArray[np.bool_] | None:
        sums = self.sums
        sums.count += array.size
        if self._bits is None:  # 8-bit floats
            return self._count_values(numeric_values(array, self._kind))
        view, mask, infinity, normal = self._bits
        bits = array.view(view)
        magnitudes = self._workspace.magnitudes(bits, mask)
        alive = None
        if self._columns > 1:
            rows = magnitudes.reshape(-1, self._width).max(1)
            alive, top = rows > 0, int(rows.max())
        else:
            top = int(magnitudes.max())
        if small := int(np.count_nonzero(self._workspace.below(magnitudes, normal))):
            zeros = array.size - int(np.count_nonzero(magnitudes))
            sums.zeros += zeros
            sums.denormals += small - zeros
        if not self._is_signed:
            sums.negative += int(np.count_nonzero(bits > mask + 1))  # not -0
        if top >= infinity:
            sums.nan += int(np.count_nonzero(magnitudes > infinity))
            sums.inf += int(np.count_nonzero(magnitudes == infinity))
            top = int(magnitudes[magnitudes < infinity].max(initial=0))
        largest = numeric_values(np.array([top], view).view(self._kind.view), self._kind)
        sums.largest = max(sums.largest, float(largest[0]))
        return alive

    def _count_values(self, values: Array) -> NDArray[np.bool_] | None:
        sums, magnitudes, finite = self.sums, np.abs(values), np.isfinite(values)
        sums.nan += int(np.isnan(values).sum())
        sums.inf += int(np.isinf(values).sum())
        sums.zeros += int((values == 0).sum())
        sums.largest = max(sums.largest, float(magnitudes[finite].max(initial=0)))
        if self._columns < 2:
            return None
        return np.asarray(magnitudes.reshape(-1, self._width).max(1) > 0)

    def _add_to_sketch(self, values: NDArray[np.float32], row: int) -> None:
        """Rows in blocks of K with a sign each, columns in groups of K with a sign each."""
        size, num_rows = self._size, len(values)
        first = min(-row % size, num_rows)  # rows before the first whole block
        last = first + (num_rows - first) // size * size
        for start, stop in ((0, first), (last, num_rows)):
            for k in range(start, stop, size):
                end, cell = min(stop, k + size), (row + k) % size
                sign = self._signs(np.array([(row + k) // size]))[0]
                self._folded[cell : cell + end - k] += sign * values[k:end]
        if last > first:
            blocks = values[first:last].reshape(-1, size * self._width)
            begin = (row + first) // size
            sign_of_block = self._signs(np.arange(begin, begin + len(blocks)))
            self._folded += (sign_of_block @ blocks).reshape(size, self._width)

    def _signs(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return signs(numbers) if self._is_signed else np.ones(len(numbers), np.float32)
