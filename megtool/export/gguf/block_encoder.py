"""Elements of a GGUF file that are computed: encoded as blocks, or changed, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.errors import FormatError, MappingError
from megtool.export.gguf.header import PLAIN
from megtool.number_formats.gguf import encode
from megtool.number_formats.small_floats import single
from megtool.plan.work_units import UNIT_BYTES
from megtool.tensors.box import numel, strides
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import RegionReader, TargetRegion, count_region_bytes
from megtool.transport.constant_feed import digest_facts, round_to_dtype, to_bits
from megtool.transport.strided import Array
from megtool.transport.tile import Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of the numbers x of a tensor: `factor * x + shift`, or -exp(x) (`is_decay`)."""

    factor: float = 1.0
    shift: float = 0.0
    is_decay: bool = False

    def apply(self, values: Array) -> Array:
        """The changed numbers, in float32."""
        if self.is_decay:
            return -np.exp(values)
        if self.factor != 1:
            values = values * np.float32(self.factor)
        return values + np.float32(self.shift) if self.shift else values


DECAY = Change(is_decay=True)
UNCHANGED = Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class GrainOrder:
    """How the elements of a weight follow each other where they are stored.

    The weight is cut into grains of equal size, in order. Each is, seen as a grid of `sizes` with
    its axes in `order`, a box of the shape `box` of the stored tensor; the first lies at `base`.
    The others lie along `axis` as `outer` says: grains are counted by indices of these sizes, each
    of which moves them by so many elements.
    """

    base: tuple[int, ...]
    box: tuple[int, ...]
    axis: int
    outer: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of a grain."""
        return math.prod(self.box)

    @property
    def is_one_run(self) -> bool:
        """Whether grains lie side by side, in order."""
        return is_one_run(self.outer, self.box[self.axis])

    def region(self, first: int, end: int) -> tuple[Index, Index]:
        """The box of grains `first:end`: its first index, and the one behind its last."""
        lo = list(self.base)
        hi = [b + n for b, n in zip(self.base, self.box, strict=True)]
        lo[self.axis] += self._offset(first)
        hi[self.axis] += self._offset(end - 1)
        return tuple(lo), tuple(hi)

    def _offset(self, grain: int) -> int:
        offset = 0
        for size, step in reversed(self.outer):
            grain, index = divmod(grain, size)
            offset += index * step
        return offset

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """Grains `first:end` in runs whose regions they fill."""
        return [(first, end)] if self.is_one_run else [(i, i + 1) for i in range(first, end)]

    def sort(self, values: Array) -> Array:
        """The elements of whole grains in the order of the stored tensor."""
        if self.order == tuple(range(len(self.order))):
            return values
        grid = values.reshape(-1, *self.sizes)
        return np.ascontiguousarray(grid.transpose((0, *(a + 1 for a in self.order))))


def is_one_run(outer: Sequence[tuple[int, int]], size: int) -> bool:
    """Whether boxes of this size, moved by these indices, lie side by side."""
    steps = [step * size for step in strides([n for n, _ in outer])]
    return [m for _, m in outer] == steps


def find_grain_order(to: Placement, tensor: GlobalTensor) -> GrainOrder:
    """The grains of a weight by where it lies in a stored tensor.

    Raises:
        MappingError: they are no boxes of whole rows.
    """
    last = len(tensor.shape) - 1
    axes = [(n, d, m) for n, d, m in zip(to.shape, to.dims, to.mults, strict=True) if n > 1]
    axis = min((d for _, d, _ in axes), default=0)
    most = next((i for i, a in enumerate(axes) if a[1] != axis), len(axes)) if axis < last else 0
    orders = [(n, _find_box(axes[n:], last + 1)) for n in range(most, -1, -1)]
    whole = [
        GrainOrder(
            base=to.base,
            box=box,
            axis=axis,
            outer=tuple((n, m) for n, _, m in axes[:count]),
            sizes=tuple(n for n, _, _ in axes[count:]),
            order=order,
        )
        for count, (order, box) in orders
        if box and box[last] == tensor.shape[last]
    ]
    if not whole:
        raise MappingError(
            f"{to.canonical!r} is in no boxes of whole rows of the tensor it is stored in",
            tensor=to.stored,
        )
    # The smallest grains that lie side by side; else the largest that are no more than a unit.
    side_by_side = (grains for grains in whole if grains.outer and grains.is_one_run)
    small = (g for g in reversed(whole) if g.num_elements <= UNIT_BYTES // 4)
    return next(side_by_side, next(small, whole[0]))


def _find_box(
    axes: Sequence[tuple[int, int, int]], ndim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of axes (size, dimension, step) in the stored tensor, and the box they fill.

    The box is empty where they leave gaps.
    """
    order = tuple(sorted(range(len(axes)), key=lambda a: (axes[a][1], -axes[a][2])))
    box = []
    for dim in range(ndim):
        along = [axes[a] for a in order if axes[a][1] == dim]
        if not is_one_run([(n, m) for n, _, m in along], 1):
            return order, ()
        box.append(math.prod(n for n, _, _ in along))
    return order, tuple(box)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrainFeed:
    """Fills grains `first:end` of what is stored as `tensor`: of a plain type, or uint8, rows of
    blocks. Grains are of elements, or of bytes of blocks.
    """

    tensor: GlobalTensor
    grains: GrainOrder
    first: int
    end: int

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The boxes of the grains, with rows in bytes where they are blocks."""
        regions = (self.grains.region(a, b) for a, b in self.grains.runs(self.first, self.end))
        width = self.tensor.shape[-1]
        return tuple(
            TargetRegion(stored=self.tensor.name, lo=lo, hi=(*hi[:-1], width)) for lo, hi in regions
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the regions."""
        return sum(count_region_bytes(r, self.tensor.dtype.itemsize) for r in self.writes)

    def iter_steps(self, step: int) -> Iterator[tuple[int, int, int, Index, Index]]:
        """At most `step` grains at once: the number of their region, the first and the end of them,
        where their box begins in the region, and its shape."""
        for number, (first, end) in enumerate(self.grains.runs(self.first, self.end)):
            origin = self.grains.region(first, end)[0]
            for begin in range(first, end, step):
                stop = min(begin + step, end)
                lo, hi = self.grains.region(begin, stop)
                offset = tuple(a - b for a, b in zip(lo, origin, strict=True))
                yield number, begin, stop, offset, tuple(b - a for a, b in zip(lo, hi, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedGrains(GrainFeed):
    """Grains of a weight as elements or blocks of the type `kind`.

    `placement` is where it lies in the source, `dtype` as what its elements are taken.
    `importance` are the weights of columns, which the fingerprint has by the digest of the whole
    matrix.
    """

    placement: Placement
    dtype: DType
    kind: str
    change: Change
    importance: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def reads(self) -> tuple[Placement, ...]:
        return (self.placement,)

    @property
    def identity(self) -> bytes:
        """The type, the grains, their order and what changes."""
        return digest_facts(
            self.kind, self.dtype.name, self.first, self.end, self.grains, self.change
        )

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        grains, size = self.grains, self.grains.num_elements
        step = max(1, reader.tile_bytes // (size * 4))
        with reader.open(self.placement, self.dtype) as run:
            for number, begin, stop, offset, shape in self.iter_steps(step):
                bits = run.read(begin * size, stop * size)
                values = self.change.apply(single(bits, self.dtype.name))
                out = self._encode(grains.sort(values).reshape(-1, shape[-1]))
                yield number, offset, out.reshape(*shape[:-1], out.shape[-1])

    def _encode(self, rows: Array) -> Array:
        """Rows of numbers as what is stored."""
        if self.kind in PLAIN:
            return to_bits(round_to_dtype(rows, self.tensor.dtype), self.tensor.dtype)
        try:
            return encode(rows, self.kind, self.importance)
        except FormatError as e:
            raise FormatError(
                e.message, tensor=self.placement.canonical, hint=e.hint, error_id=e.error_id
            ) from e


def plan_encoding(
    placement: Placement,
    dtype: DType,
    to: Placement,
    tensor: GlobalTensor,
    kind: str,
    target: GlobalTensor,
    change: Change = UNCHANGED,
    importance: NDArray[np.float32] | None = None,
) -> list[EncodedGrains]:
    """The feeds of one weight, each of about a unit of work.

    `placement` is where it lies in the source, `dtype` as what its elements are taken. `to` places
    it in `tensor`, of elements; `target` is what is stored: of a plain type, or blocks in bytes.
    `importance` float32 `[cols]` weighs the errors of its columns, in the order of the source.

    Raises:
        MappingError: see `find_grain_order`.
    """
    grains = find_grain_order(to, tensor)
    columns = None if importance is None else _sort_columns(importance, grains)
    count = numel(to.shape) // grains.num_elements
    step = max(1, UNIT_BYTES // (grains.num_elements * dtype.itemsize))
    return [
        EncodedGrains(
            placement=placement,
            dtype=dtype,
            tensor=target,
            kind=kind,
            grains=grains,
            change=change,
            first=first,
            end=min(first + step, count),
            importance=columns,
        )
        for first in range(0, count, step)
    ]


def _sort_columns(values: Array, grains: GrainOrder) -> Array | None:
    """Numbers of columns in the order in which they are stored; None where rows are cut."""
    last = len(grains.sizes) - 1
    if grains.order[last:] == (last,) and grains.sizes[last] == len(values):
        return values
    if grains.num_elements % len(values):
        return None
    rows = grains.sort(np.tile(values, grains.num_elements // len(values)))
    rows = rows.reshape(-1, grains.box[-1])
    return rows[0].copy() if (rows == rows[0]).all() else None
