"""Encode weights as GGUF's blocks, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from megtool.checkpoint.computed_tensors import RegionReader, TargetRegion, count_region_bytes
from megtool.checkpoint.transport.strided import Array
from megtool.checkpoint.transport.tile import Index
from megtool.checkpoint.transport.work_units import UNIT_BYTES
from megtool.dtypes import DType
from megtool.errors import FormatError, MappingError
from megtool.number_formats.gguf import encode
from megtool.number_formats.small_floats import single
from megtool.reshard.constant_feed import WholeTensorFeed, digest_facts, to_bits
from megtool.tensors.box import numel, strides
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """How the rows of a weight follow each other where they are stored.

    They are there in one run, from `base` on (the last index of it counts rows). Runs of `grain`
    rows stay together, and each, seen as a grid of `sizes`, has its axes in `order`.
    """

    base: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def grain(self) -> int:
        """Rows that cannot be written apart."""
        return math.prod(self.sizes)

    def sort(self, values: Array) -> Array:
        """Whole grains of rows `[rows, width]` as they are stored."""
        if not self.sizes:
            return values
        grid = values.reshape(-1, *self.sizes, values.shape[1])
        axes = (0, *(a + 1 for a in self.order), grid.ndim - 1)
        return grid.transpose(axes).reshape(values.shape)


def find_row_order(to: Placement, tensor: GlobalTensor) -> RowOrder:
    """The rows of a weight by where it lies in a stored tensor.

    Raises:
        MappingError: they are no run of whole rows.
    """
    last = len(tensor.shape) - 1
    wrong = MappingError(
        f"{to.canonical!r} is no run of whole rows of the tensor it is stored in", tensor=to.stored
    )
    columns = (to.dims[-1], to.mults[-1], to.shape[-1], to.base[last])
    if last < 1 or columns != (last, 1, tensor.shape[last], 0):
        raise wrong
    axes = [
        (n, m) for n, d, m in zip(to.shape[:-1], to.dims[:-1], to.mults[:-1], strict=True) if n > 1
    ]
    if any(d != last - 1 for n, d in zip(to.shape[:-1], to.dims[:-1], strict=True) if n > 1):
        raise wrong
    order = sorted(range(len(axes)), key=lambda a: -axes[a][1])
    if tuple(axes[a][1] for a in order) != strides([axes[a][0] for a in order]):
        raise wrong
    num_outer = next((i for i, a in enumerate(order) if i != a), len(order))
    inner = tuple(n for n, _ in axes[num_outer:])
    return RowOrder(
        base=to.base[:last], sizes=inner, order=tuple(a - num_outer for a in order[num_outer:])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Rows `first:end` of a weight `[rows, width]` as blocks of the type `kind`.

    `placement` is where it lies in the source, `dtype` as what its elements are taken; `tensor` is
    what holds the bytes: uint8, rows of blocks.
    """

    placement: Placement
    dtype: DType
    width: int
    tensor: GlobalTensor
    kind: str
    rows: RowOrder
    first: int
    end: int

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The weight."""
        return (self.placement,)

    @property
    def writes(self) -> tuple[TargetRegion, ...]:
        """The rows."""
        *lead, row = self.rows.base
        lo = (*lead, row + self.first, 0)
        hi = (*(i + 1 for i in lead), row + self.end, self.tensor.shape[-1])
        return (TargetRegion(stored=self.tensor.name, lo=lo, hi=hi),)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return count_region_bytes(self.writes[0], 1)

    @property
    def identity(self) -> bytes:
        """The type, the rows and their order."""
        return digest_facts(self.kind, self.dtype.name, self.first, self.end, self.rows)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """See `TensorFeed`."""
        grain, lead = self.rows.grain, (0,) * len(self.rows.base[1:])
        step = max(grain, reader.tile_bytes // (self.width * 4) // grain * grain)
        with reader.open(self.placement, self.dtype) as run:
            for begin in range(self.first, self.end, step):
                stop = min(begin + step, self.end)
                bits = run.read(begin * self.width, stop * self.width)
                values = single(bits, self.dtype.name).reshape(stop - begin, self.width)
                try:
                    blocks = encode(self.rows.sort(values), self.kind)
                except FormatError as e:
                    raise FormatError(
                        e.message, tensor=self.placement.canonical, hint=e.hint, error_id=e.error_id
                    ) from e
                shape = (*(1 for _ in lead), *blocks.shape)
                yield 0, (*lead, begin - self.first, 0), blocks.reshape(shape)


def plan_encoding(
    placement: Placement,
    dtype: DType,
    to: Placement,
    tensor: GlobalTensor,
    kind: str,
    bytes_tensor: GlobalTensor,
) -> list[EncodedRows]:
    """The feeds of one weight, each of about a unit of work.

    `tensor` is the stored tensor of elements in which `to` places the weight, `held` that of bytes.

    Raises:
        MappingError: see `rows_of`.
    """
    rows, width = find_row_order(to, tensor), tensor.shape[-1]
    count = numel(to.shape) // width
    step = max(1, UNIT_BYTES // (width * dtype.itemsize) // rows.grain) * rows.grain
    return [
        EncodedRows(
            placement=placement,
            dtype=dtype,
            width=width,
            tensor=bytes_tensor,
            kind=kind,
            rows=rows,
            first=first,
            end=min(first + step, count),
        )
        for first in range(0, count, step)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormPlusOne(WholeTensorFeed):
    """A norm's weight w as 1 + w, in float32."""

    placement: Placement
    dtype: DType
    tensor: GlobalTensor

    @property
    def reads(self) -> tuple[Placement, ...]:
        """The norm."""
        return (self.placement,)

    @property
    def identity(self) -> bytes:
        """What it is taken as."""
        return digest_facts("1 + w", self.dtype.name)

    def generate(self, reader: RegionReader) -> Generator[tuple[int, Index, Array], None, None]:
        """See `TensorFeed`."""
        with reader.open(self.placement, self.dtype) as run:
            values = single(run.read(0, numel(self.placement.shape)), self.dtype.name)
        yield 0, (0,), to_bits(values + np.float32(1), self.tensor.dtype)
