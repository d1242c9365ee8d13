"""Low-rank updates of weights (LoRA): what they add to a box of a weight, with bits of their own.

What an update adds is defined without an order of sums, so that it depends neither on how a weight
is cut into boxes nor on a library of linear algebra. Each row of `up` and each column of `down` is
a power of two, above its largest element, times two integers of 22 bits, high and low, and what is
below both is rounded off. The products high x high and high x low + low x high are then sums of
integers below 2^53, which float64 holds exactly in any order. Their sum, of 44 bits relative to
the largest elements, is multiplied by the scale and added to the weight in float64, rounded to the
weight's dtype of sums (`reduce.sum_dtype`), and cast once. Several updates of a weight are summed
in float64 first, in the order of their digests, whatever the order they are given in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megtool.console import several
from megtool.dtypes import DType, dtype
from megtool.errors import FormatError, MappingError
from megtool.transport.strided import Array

if TYPE_CHECKING:
    import torch

BITS = 22
"""Of each of the two integers of an element. A term of the second product is below 2^43, and there
are two for each index of `down`'s rows: 2^53 holds those of `RANKS`."""

RANKS = 512
"""Rows of `down` of which the products are exact; more are summed in blocks of so many."""

ROWS, COLUMNS = 64, 512
"""Of the cells in which an update is computed, which stay in a core's L2 cache."""

UPDATE_CACHE_BYTES = 16 << 20
"""Of the integers of cells that are kept for the next box."""

_READ_ELEMENTS = 1 << 20


class Factor(Protocol):
    """A matrix of floats: a tensor of torch, an array of numpy, or one that is read when indexed.

    Threads index it at the same time, with two slices.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""

    @property
    def dtype(self) -> Any:
        """The type of its elements, by torch's or numpy's name."""

    def __getitem__(self, index: Any, /) -> Any:
        """A part of it, as a tensor of torch or an array of numpy."""


FactorT = TypeVar("FactorT", bound=Factor, covariant=True)


@dataclass(frozen=True, eq=False)
class LowRankProduct(Generic[FactorT]):
    """The product `scale * up @ down` of two matrices; `tensor` is a stored name for errors."""

    down: FactorT
    up: FactorT
    scale: float
    tensor: str | None = None

    @property
    def rank(self) -> int:
        """Rows of `down`, columns of `up`."""
        return int(self.down.shape[-2])


@dataclass(frozen=True, eq=False)
class WeightUpdate(LowRankProduct[Factor]):
    """What is added to a weight `[out, in]`.

    `down` is `[rank, in]` and `up` is `[out, rank]`, of any float dtypes. `file` says in errors
    where the update comes from.

    Raises:
        FormatError: the factors are no matrices of floats of one rank, or the scale is not finite.
    """

    file: Path | str | None = None

    def __post_init__(self) -> None:
        down, up = tuple(self.down.shape), tuple(self.up.shape)
        if len(down) != 2 or len(up) != 2 or not down[0] or down[0] != up[1]:
            raise self._damaged(
                f"factors of shapes {list(up)} and {list(down)} have no product of one rank"
            )
        for factor in (self.down, self.up):
            if not dtype(str(factor.dtype)).is_float:
                raise self._damaged(f"a factor is of {factor.dtype}, which is no float")
        if not math.isfinite(self.scale):
            raise self._damaged(f"the scale is {self.scale}")

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return int(self.up.shape[0]), int(self.down.shape[1])

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse an update of a weight that has another shape.

        Raises:
            MappingError: it has.
        """
        if shape != self.shape:
            raise MappingError(
                f"the update of {name!r} is of shape {list(self.shape)}, and the weight of "
                f"{list(shape)}",
                file=self.file,
                tensor=self.tensor or name,
                hint="the adapter is of another model",
                error_id="foreign-adapter",
            )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of everything that determines what is added; both factors are read once for it.

        Raises:
            FormatError: an element is NaN or Inf.
        """
        h = hashlib.sha256(repr((self.shape, self.rank, float(self.scale))).encode())
        for part in self._finite_parts():
            h.update(np.ascontiguousarray(part).data)
        return h.digest()

    def check_finite(self) -> None:
        """Read both factors.

        Raises:
            FormatError: an element is NaN or Inf.
        """
        for _ in self._finite_parts():
            pass

    def _finite_parts(self) -> Iterator[NDArray[np.float64]]:
        """Rows of `up`, then of `down`."""
        for factor, kind in ((self.up, "up"), (self.down, "down")):
            rows = max(1, _READ_ELEMENTS // factor.shape[1])
            for first in range(0, factor.shape[0], rows):
                part = _as_float64(factor[first : first + rows, :])
                if not np.isfinite(part).all():
                    raise self._diverged(f"the factor {kind!r} holds NaN or Inf")
                yield part

    def overflow(self, count: int, kind: DType) -> FormatError:
        """The error that the sums of `count` elements are not finite in the dtype of sums."""
        return self._diverged(f"with the update, {several(count, 'element')} exceed {kind}")

    def _diverged(self, message: str) -> FormatError:
        return FormatError(
            message,
            file=self.file,
            tensor=self.tensor,
            hint="an adapter of a run that diverged; take an earlier save",
            error_id="nan-weights",
        )

    def _damaged(self, message: str) -> FormatError:
        return FormatError(message, file=self.file, tensor=self.tensor)


class UpdateAdder:
    """Adds the updates of a weight to its elements, range by range. For one thread.

    `updates` are one or more of one shape, in any order. `num_bytes` is the most memory that it
    takes.
    """

    def __init__(
        self, updates: Sequence[WeightUpdate], *, cache_bytes: int = UPDATE_CACHE_BYTES
    ) -> None:
        if len(updates) > 1:
            updates = sorted(updates, key=lambda update: update.digest)
        self._updates = updates
        self._terms = [_Term(update, cache_bytes // len(updates)) for update in updates]

    @staticmethod
    def num_bytes(updates: Sequence[WeightUpdate], cache_bytes: int = UPDATE_CACHE_BYTES) -> int:
        """Memory of an adder: products, and the integers of cells."""
        total = 0
        for update in updates:
            out, width = update.shape
            whole = (out + width) * update.rank * 16
            largest = COLUMNS * min(update.rank, RANKS) * 16
            total += 2 * 8 * ROWS * COLUMNS
            total += min(whole, cache_bytes // len(updates) + 2 * largest)
        return total

    def add(self, values: Array, first: int) -> None:
        """Add to `values`, float32 or float64 `[n]`: the weight's row-major elements from `first`.

        The sum is computed in float64 and rounded to the dtype of `values`.
        """
        width = self._updates[0].shape[1]
        for row, column, end_row, end_column in _boxes(first, first + values.size, width):
            start = row * width + column - first
            shape = end_row - row, end_column - column
            box = values[start : start + shape[0] * shape[1]].reshape(shape)
            self.add_box(box, row, column)

    def overflow(self, count: int, kind: DType) -> FormatError:
        """See `WeightUpdate.overflow`."""
        return self._updates[0].overflow(count, kind)

    def add_box(self, box: Array, row: int, column: int) -> None:
        """Add to `box`, float32 or float64 `[rows, columns]` of the weight from `row`, `column` on.

        As `add` does.
        """
        end_row, end_column = row + box.shape[0], column + box.shape[1]
        for c in range(column // COLUMNS * COLUMNS, end_column, COLUMNS):
            columns = slice(max(c, column), min(c + COLUMNS, end_column))
            for r in range(row // ROWS * ROWS, end_row, ROWS):
                rows = slice(max(r, row), min(r + ROWS, end_row))
                part = box[
                    rows.start - row : rows.stop - row,
                    columns.start - column : columns.stop - column,
                ]
                delta = self._terms[0].delta(rows, columns)
                for term in self._terms[1:]:
                    delta += term.delta(rows, columns)
                # numpy adds in float64, and rounds each sum as it is stored
                np.add(part, delta, out=part, casting="same_kind")


class _Term:
    """What one update adds."""

    def __init__(self, update: WeightUpdate, cache_bytes: int) -> None:
        self._update, self._cache_bytes = update, cache_bytes
        self._cells: dict[tuple[str, int, int], _Integers] = {}
        self._products = np.empty((2, ROWS * COLUMNS))

    def delta(self, rows: slice, columns: slice) -> NDArray[np.float64]:
        """What is added to a part of one cell, in memory that the next call reuses."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        high, low = (p[: shape[0] * shape[1]].reshape(shape) for p in self._products)
        total: NDArray[np.float64] | None = None
        for block in range(0, self._update.rank, RANKS):
            up, down = self._cell("up", rows, block), self._cell("down", columns, block)
            i = slice(rows.start % ROWS, rows.start % ROWS + shape[0])
            j = slice(columns.start % COLUMNS, columns.start % COLUMNS + shape[1])
            _multiply(up.high[i], down.high[j], high)
            _multiply(up.pair[i], down.pair[j], low)
            np.add(high, low, out=high)
            np.multiply(high, self._update.scale, out=high)
            if total is None and block + RANKS >= self._update.rank:
                return high
            total = high.copy() if total is None else total + high
        return high if total is None else total

    def _cell(self, kind: str, span: slice, block: int) -> _Integers:
        """The integers of the cell's rows of `up`, or columns of `down`, that has `span`."""
        step = ROWS if kind == "up" else COLUMNS
        start = span.start // step * step
        key = kind, start, block
        if key not in self._cells:
            ranks, lines = slice(block, block + RANKS), slice(start, start + step)
            update = self._update
            part = (
                _as_float64(update.up[lines, ranks])
                if kind == "up"
                else np.ascontiguousarray(_as_float64(update.down[ranks, lines]).T)
            )
            if sum(c.pair.nbytes for c in self._cells.values()) > self._cache_bytes:
                self._cells.clear()
            self._cells[key] = _Integers(part, is_turned=kind == "down")
        return self._cells[key]


class _Integers:
    """Rows of a factor, float64 `[n, rank]`, as `high + low`: integers times a power of two each.

    The power of `low` is `2^BITS` below that of `high`, the same for a whole row. `pair` has both
    side by side, with `is_turned` low and high: so one product of two pairs sums high x low and
    low x high.
    """

    def __init__(self, values: NDArray[np.float64], *, is_turned: bool) -> None:
        lines, ranks = values.shape
        _, exponent = np.frexp(np.abs(values).max(axis=1, initial=0.0))
        power = (BITS - exponent)[:, None]
        self.pair = np.empty((lines, 2 * ranks))
        first, second = self.pair[:, :ranks], self.pair[:, ranks:]
        self.high, low = (second, first) if is_turned else (first, second)
        np.ldexp(values, power, out=low)
        np.rint(low, out=self.high)
        np.subtract(low, self.high, out=low)
        np.rint(np.ldexp(low, BITS), out=low)
        np.ldexp(low, -BITS - power, out=low)
        np.ldexp(self.high, -power, out=self.high)


def _multiply(a: NDArray[np.float64], b: NDArray[np.float64], out: NDArray[np.float64]) -> None:
    """Fill `out` with `a @ b.T`, exactly, in the calling thread (see `limit_torch_threads`)."""
    import torch

    torch.mm(torch.from_numpy(a), torch.from_numpy(b).T, out=torch.from_numpy(out))


def _boxes(first: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """A range of row-major elements as boxes `row, column, end_row, end_column` of whole runs."""
    while first < end:
        row, column = divmod(first, width)
        if column or end - first < width:
            last = min(width, column + end - first)
            yield row, column, row + 1, last
            first += last - column
        else:
            rows = (end - first) // width
            yield row, 0, row + rows, width
            first += rows * width


def _as_float64(part: Any) -> NDArray[np.float64]:
    """A part of a factor, converted exactly."""
    detach = getattr(part, "detach", None)
    if detach is None:
        return np.asarray(part).astype(np.float64)
    import torch

    tensor: torch.Tensor = detach().to("cpu", torch.float64)
    return np.asarray(tensor.numpy())
