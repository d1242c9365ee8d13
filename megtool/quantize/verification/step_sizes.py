"""Step sizes of a quantized weight, aligned with its elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import dtype
from megtool.number_formats.decode import CODES, COLUMNS, DIVISOR, SCALE, SCALE_2, ZEROS
from megtool.number_formats.packed_parts import WHOLE, PackedPart, factors
from megtool.number_formats.small_floats import single
from megtool.storage.local_copy import map_file
from megtool.tensors.box import numel, strides
from megtool.tensors.catalogue import Catalogue, StoredPart
from megtool.tensors.placement import Placement

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

LARGEST: Mapping[str, float] = {
    "fp8": 448.0,
    "mxfp8": 448.0,
    "int8": 127.0,
    "int8words": 127.0,
    "int4": 7.0,
    "int4rows": 7.0,
    "mxfp4": 6.0,
    "nvfp4": 6.0,
}


def map_part(catalogue: Catalogue, stored: StoredPart) -> NDArray[Any]:
    """Map a part of a packed tensor; its bytes are read on access."""
    kind = dtype(stored.part.dtype)
    mapped = map_file(
        catalogue.path(stored.file),
        offset=stored.offset,
        num_bytes=prod(stored.part.shape) * kind.itemsize,
    )
    return mapped.view(kind.view).reshape(stored.part.shape)


@dataclass(frozen=True, slots=True)
class MatrixIndices:
    """Indices of a weight's rows and columns along each dimension of the stored tensor; along other
    dimensions its index is `base`."""

    base: tuple[int, ...]
    rows: Mapping[int, Ints]
    columns: Mapping[int, Ints]

    @classmethod
    def of(cls, place: Placement, shape: tuple[int, int]) -> MatrixIndices | None:
        """The indices; None if rows and columns share a stored dimension."""
        dim, size = len(place.shape), 1
        while dim and size < shape[1]:
            dim -= 1
            size *= place.shape[dim]
        if size != shape[1] or prod(place.shape[:dim]) != shape[0]:
            return None
        rows, columns = (
            _stored_indices(place, 0, dim),
            _stored_indices(place, dim, len(place.shape)),
        )
        return None if rows.keys() & columns.keys() else cls(place.base, rows, columns)

    def pick(
        self, mapped: NDArray[Any], part: PackedPart, first: int, end: int, *, per_element: bool
    ) -> NDArray[Any] | None:
        """Select the values of a part for rows `first:end`, `[rows or 1, columns or 1]`: one value
        per element, or without `per_element` one for each group of elements."""
        index: list[Ints] = []
        repeats = 1
        for n, s in zip(part.shape, part.spans, strict=True):
            if s.dim == WHOLE:
                if n != 1:
                    return None
                index.append(np.zeros((1, 1), np.int64))
                continue
            step = 1 if per_element else s.per
            if s.dim in self.rows:
                position = self.rows[s.dim][first:end:step][:, None]
            elif s.dim in self.columns:
                columns = self.columns[s.dim]
                if per_element and _is_run(columns, s.per):  # one value per group, repeated
                    step = repeats = s.per
                position = columns[::step][None, :]
            else:
                position = np.full((1, 1), self.base[s.dim], np.int64)
            index.append(position // s.per)
        values = np.array(mapped[tuple(index)] if index else mapped).reshape(
            np.broadcast_shapes((1, 1), *(i.shape for i in index))
        )
        return np.repeat(values, repeats, axis=1) if repeats > 1 else values


def _is_run(indices: Ints, per: int) -> bool:
    """Whether indices are complete groups of `per`, in order."""
    length = len(indices)
    return (
        length % per == 0 and indices[0] % per == 0 and int(indices[-1] - indices[0]) == length - 1
    )


def _stored_indices(place: Placement, first: int, end: int) -> dict[int, Ints]:
    """The stored indices along some dimensions of the view, flattened."""
    sizes = place.shape[first:end]
    number = np.arange(prod(sizes), dtype=np.int64)
    out: dict[int, Ints] = {}
    for j, n, step in zip(range(first, end), sizes, strides(sizes), strict=True):
        if n > 1:
            d = place.dims[j]
            out[d] = out.get(d, place.base[d]) + number // step % n * place.mults[j]
    return out


@dataclass(slots=True)
class StepSizes:
    """The scales of a packed weight as mapped arrays."""

    kind: str
    indices: MatrixIndices
    is_plain: bool
    parts: list[tuple[StoredPart, NDArray[Any]]] = field(default_factory=list)

    @classmethod
    def of(cls, place: Placement, shape: tuple[int, int], catalogue: Catalogue) -> StepSizes | None:
        """The step sizes; None if scales cannot be aligned with elements."""
        kind = (catalogue[place.stored].packing or "").partition(":")[0]
        indices = MatrixIndices.of(place, shape)
        if kind not in LARGEST or indices is None:
            return None
        is_plain = place.dims == (0, 1) and place.mults == (1, 1)
        out = cls(kind, indices, is_plain)
        for stored in catalogue.packed[place.stored]:
            if stored.part.role == ZEROS:
                return None
            if stored.part.role != CODES and numel(stored.part.shape):
                out.parts.append((stored, map_part(catalogue, stored)))
        return out

    def step(self, first: int, end: int, columns: int) -> Floats | None:
        """The step size of each element of some rows, `[rows or 1, columns or 1]`."""
        out = np.ones((1, 1), np.float32)
        for stored, mapped in self.parts:
            if stored.part.role not in (SCALE, SCALE_2, DIVISOR, COLUMNS):
                continue
            values = self._values(stored.part, mapped, first, end, columns)
            if values is None:
                return None
            with np.errstate(all="ignore"):
                out = out / values if stored.part.role == DIVISOR else out * values
        return out

    def _values(
        self, part: PackedPart, mapped: NDArray[Any], first: int, end: int, columns: int
    ) -> Floats | None:
        if not self.is_plain:
            values = self.indices.pick(mapped, part, first, end, per_element=True)
            return None if values is None else single(values, part.dtype).reshape(values.shape)
        base = self.indices.base
        lo, hi = (base[0] + first, base[1]), (base[0] + end, base[1] + columns)
        begin, stop = part.window(lo, hi)
        window = np.array(mapped[tuple(slice(*b) for b in zip(begin, stop, strict=True))])
        values, per = factors(window, part, lo, hi, (0, 1))
        return np.repeat(values, per, axis=1) if per else values
