"""Stored weights with low-rank updates added to them, computed in blocks when they are read.

They keep their names, shapes and dtypes, so that everything that reads the checkpoint reads them
without knowing of it. Bits are those that a merge writes (`transport.weight_update`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.errors import MappingError
from megtool.source.computed.shards import (
    BLOCK_BYTES,
    ComputedTensor,
    Corner,
    SourceTensors,
    with_computed,
)
from megtool.tensors.box import Boxes, numel, strides, to_flat
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, narrow, pieces
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast
from megtool.transport.reduce import sum_dtype
from megtool.transport.strided import Array
from megtool.transport.tile import Index, split_box
from megtool.transport.weight_update import UpdateAdder, WeightUpdate

Updates = Mapping[str, Sequence[WeightUpdate]]
"""What is added to canonical weights, by their names."""


def with_updates(
    catalogue: Catalogue, placements: Mapping[str, Placement], updates: Updates
) -> Catalogue:
    """The catalogue with `updates` added to the canonical weights at `placements`.

    Raises:
        MappingError: a weight is of integers, or of floats that have scales.
    """
    weights: dict[str, list[str]] = {}
    for name in updates:
        weights.setdefault(placements[name].stored, []).append(name)
    for stored, names in weights.items():
        _check_dtype(catalogue[stored], updates[names[0]][0])
    computed = []
    for stored in weights:
        tensor = replace(catalogue[stored], packing=None)
        first = (0,) * len(tensor.shape)
        blocks = list(split_box(first, tensor.shape, tensor.dtype.itemsize, BLOCK_BYTES))
        computed.append(ComputedTensor(tensor=tensor, of=stored, blocks=blocks))

    def identity() -> bytes:
        digest = hashlib.sha256()
        for name in sorted(updates):
            digest.update(repr((name, sorted(u.digest for u in updates[name]))).encode())
        return digest.digest()

    reader = _UpdateReader(
        SourceTensors(catalogue),
        [c.tensor for c in computed],
        [[placements[name] for name in names] for names in weights.values()],
        updates,
    )
    return with_computed(catalogue, frozenset(weights), computed, reader.read, identity=identity)


def _check_dtype(tensor: GlobalTensor, update: WeightUpdate) -> None:
    if tensor.packing is None and (not tensor.dtype.is_float or tensor.dtype.itemsize == 1):
        raise MappingError(
            f"{tensor.name!r} is of {tensor.dtype}, to which an update is not added",
            file=update.file,
            tensor=tensor.name,
            hint="an update is added to floats of 16 bits or more",
            error_id="foreign-adapter",
        )


class _UpdateReader:
    """Computes blocks of weights with their updates; any thread may."""

    def __init__(
        self,
        source: SourceTensors,
        tensors: Sequence[GlobalTensor],
        placements: Sequence[Sequence[Placement]],
        updates: Updates,
    ) -> None:
        self._source, self._tensors = source, tensors
        self._placements, self._updates = placements, updates

    def read(self, number: int, lo: Corner, hi: Corner) -> NDArray[np.uint8]:
        """The bytes of the block `lo:hi` of a stored tensor."""
        tensor, box = self._tensors[number], Boxes.of([(lo, hi)], len(lo))
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        out = np.empty(shape, tensor.dtype.view)
        parts = [
            (placement, tuple(map(int, a)), tuple(map(int, b)))
            for placement in self._placements[number]
            for views in [pieces(placement, box)[1]]
            for a, b in zip(views.lo, views.hi, strict=True)
        ]
        if sum(_volume(a, b) for _, a, b in parts) < out.size:
            whole = narrow(Placement.identity(tensor.name, tensor.shape), lo, hi)
            with self._source.open(whole) as elements:
                out[...] = elements.read(0, out.size).reshape(shape)
        for placement, a, b in parts:
            view = _strided(out, lo, placement, a, b)
            view[...] = self._sum(placement, a, b, tensor.dtype).reshape(view.shape)
        return out.reshape(-1).view(np.uint8)

    def _sum(self, placement: Placement, lo: Index, hi: Index, kind: DType) -> Array:
        """The box `lo:hi` of a weight's view with its updates, row-major, rounded once.

        Raises:
            FormatError: a factor has NaN or Inf, or the sum of finite elements is not finite.
        """
        updates, wide = self._updates[placement.canonical], sum_dtype(kind)
        for update in updates:
            update.digest  # noqa: B018 - reads the factors, once
        with self._source.open(narrow(placement, lo, hi), wide) as elements:
            values = elements.read(0, _volume(lo, hi)).view(wide.view)
            is_finite = np.isfinite(values)
            adder = UpdateAdder(updates)
            split = [1, *accumulate(placement.shape, mul)].index(updates[0].shape[0])
            rows, num_rows = to_flat(placement.shape[:split], lo[:split], hi[:split])
            columns, num_columns = to_flat(placement.shape[split:], lo[split:], hi[split:])
            matrix = values.reshape(len(rows) * num_rows, -1)
            with np.errstate(all="ignore"):  # weights may contain Inf and NaN
                for i, row in enumerate(rows.tolist()):
                    for j, column in enumerate(columns.tolist()):
                        run = slice(i * num_rows, (i + 1) * num_rows)
                        across = slice(j * num_columns, (j + 1) * num_columns)
                        adder.add_box(matrix[run, across], row, column)
            if lost := int(np.count_nonzero(is_finite & ~np.isfinite(values))):
                raise adder.overflow(lost, wide)
            out = np.empty(values.shape, kind.view)
            cast(values, wide, out, kind)
        return out


def _volume(lo: Index, hi: Index) -> int:
    return numel(tuple(b - a for a, b in zip(lo, hi, strict=True)))


def _strided(block: Array, first: Corner, p: Placement, lo: Index, hi: Index) -> Array:
    """The elements of a block, which begins at `first`, that are the box `lo:hi` of a view."""
    step = strides(block.shape)
    base = narrow(p, lo, hi).base
    start = sum((b - a) * s for a, b, s in zip(first, base, step, strict=True))
    return as_strided(
        block.reshape(-1)[start:],
        [b - a for a, b in zip(lo, hi, strict=True)],
        [m * step[d] * block.itemsize for d, m in zip(p.dims, p.mults, strict=True)],
    )
