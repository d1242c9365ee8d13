"""Packed tensors as they are stored: the codes and scales that a view needs, not decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.errors import FormatError
from megtool.number_formats.decode import ZEROS, check_finite
from megtool.number_formats.int4 import unpacked_zeros
from megtool.number_formats.packed_parts import Index, PackedPart
from megtool.tensors.box import Boxes
from megtool.tensors.placement import Placement
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.strided import Buffers
from megtool.transport.tile import TileIO

_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBox:
    """The box `lo:hi` of a packed tensor, which has parts."""

    packing: str
    parts: tuple[PackedPart, ...]
    lo: Index
    hi: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWindows(PackedBox):
    """A window of each part of a box by role, in `DType.view`.

    Zero points have an element each.
    """

    windows: Mapping[str, NDArray[Any]]


def find_box(placement: Placement, shape: Index) -> tuple[Index, Index]:
    """The box of a stored tensor of `shape` that a view needs.

    Views that take every other row of the same rows, such as gates and ups, have the same box.
    """
    lo, hi = list(placement.base), [x + 1 for x in placement.base]
    step = [1] * len(shape)
    for n, d, m in zip(placement.shape, placement.dims, placement.mults, strict=True):
        hi[d] += (n - 1) * m
        step[d] = m if n > 1 else step[d]
    lo = [x // m * m for x, m in zip(lo, step, strict=True)]
    hi = [min(-(-x // m) * m, n) for x, m, n in zip(hi, step, shape, strict=True)]
    return tuple(lo), tuple(hi)


def read_windows(reader: CheckpointReader, stored: str, lo: Index, hi: Index) -> PackedWindows:
    """Read the parts of a packed tensor for one box.

    Raises:
        FormatError: a scale or zero point is NaN or infinite.
        StorageError: a file cannot be read.
    """
    catalogue, number = reader.catalogue, reader.catalogue.index[stored]
    shape = catalogue.tensors[number].shape
    whole = Boxes(np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64))
    rows = np.array([catalogue.shards.of(number).start], np.int64)
    view = reader.locator.locate(Placement.identity(stored, shape), number, rows, whole).packed
    if view is None:
        raise ValueError(f"{stored} is not packed")
    buffers = Buffers()
    scratch = buffers.take("scratch", _SCRATCH_BYTES)
    windows: dict[str, NDArray[Any]] = {}
    parts: list[PackedPart] = []
    for part, file_view in zip(view.parts, view.file_views, strict=True):
        first, end = part.window(lo, hi)
        kind = dtype(part.dtype)
        size = tuple(b - a for a, b in zip(first, end, strict=True))
        raw = np.empty(size, f"<u{kind.itemsize}")
        with TileIO(file_view, reader.files, reader.open_files, scratch, buffers, sieve=True) as io:
            io.read(first, raw)
        values = raw.view(kind.view)
        if part.role == ZEROS and part.dtype == "int32":
            values, part = unpacked_zeros(values, part, lo, hi)
        windows[part.role] = values
        parts.append(replace(part))
    try:
        check_finite(parts, windows)
    except FormatError as e:
        e.file, e.tensor = str(view.file_views[0].paths[0]), stored
        raise
    return PackedWindows(packing=view.packing, parts=tuple(parts), windows=windows, lo=lo, hi=hi)
