"""Tensors gathered from rows and columns of stored ones, as shards that are read whole.

What stays of a tensor when indices are left out has no affine place in a file, so it is computed,
in blocks of whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megtool.source.computed.shards import (
    BLOCK_BYTES,
    ComputedTensor,
    Corner,
    SourceTensors,
    with_computed,
)
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.strided import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTensor:
    """A tensor `name` of the elements that stay of the canonical one at `placement`.

    `shape` is the canonical tensor's, and `indices` are, by dimension, the ones that stay (None:
    all). Elements keep the stored dtype and bits.
    """

    name: str
    placement: Placement
    shape: tuple[int, ...]
    indices: tuple[NDArray[np.int64] | None, ...]

    @property
    def new_shape(self) -> tuple[int, ...]:
        """The shape of what stays."""
        return tuple(
            n if indices is None else len(indices)
            for n, indices in zip(self.shape, self.indices, strict=True)
        )


def with_gathered(
    catalogue: Catalogue, removed: frozenset[str], gathered: Sequence[GatheredTensor]
) -> Catalogue:
    """The catalogue without the stored tensors in `removed`, and with gathered ones instead."""
    computed = []
    for t in gathered:
        dtype = catalogue[t.placement.stored].dtype
        computed.append(
            ComputedTensor(
                tensor=GlobalTensor(name=t.name, shape=t.new_shape, dtype=dtype),
                of=t.placement.stored,
                blocks=_row_blocks(t, dtype.itemsize),
            )
        )
    return with_computed(catalogue, removed, computed, _GatherReader(catalogue, gathered).read)


class _GatherReader:
    """Reads what stays of tensors; any thread may."""

    def __init__(self, catalogue: Catalogue, gathered: Sequence[GatheredTensor]) -> None:
        self._source, self._gathered = SourceTensors(catalogue), gathered

    def read(self, number: int, lo: Corner, hi: Corner) -> NDArray[np.uint8]:
        """The bytes of rows `lo[0]` to `hi[0]` of what stays of a tensor."""
        tensor = self._gathered[number]
        kind = self._source.dtype(tensor.placement)
        with self._source.open(replace(tensor.placement, shift=0.0)) as elements:
            if not tensor.shape:
                return elements.read(0, 1).copy().view(np.uint8)
            inner = tensor.shape[1:]
            rows = np.arange(lo[0], hi[0])
            if tensor.indices[0] is not None:
                rows = tensor.indices[0][lo[0] : hi[0]]
            out = np.empty((len(rows), *tensor.new_shape[1:]), kind.view)
            row_size = numel(inner)
            step = max(1, BLOCK_BYTES // max(1, row_size * kind.itemsize))
            done = 0
            while done < len(rows) and row_size:
                start = int(rows[done])
                stop = min(start + step, int(rows[-1]) + 1)
                end = int(np.searchsorted(rows, stop))
                block = elements.read(start * row_size, stop * row_size)
                block = block.reshape(stop - start, *inner)
                out[done:end] = _take(block, rows[done:end] - start, tensor.indices[1:])
                done = end
        return out.reshape(-1).view(np.uint8)


def _take(
    block: Array, rows: NDArray[np.int64], indices: Sequence[NDArray[np.int64] | None]
) -> Array:
    """Rows of an array, and what stays of its further dimensions."""
    out = block[rows]
    for dim, chosen in enumerate(indices, 1):
        if chosen is not None:
            out = np.take(out, chosen, axis=dim)
    return out


def _row_blocks(tensor: GatheredTensor, itemsize: int) -> list[tuple[Corner, Corner]]:
    """The rows of what stays in blocks of about `BLOCK_BYTES`."""
    shape = tensor.new_shape
    if not shape:
        return [((), ())]
    step = max(1, BLOCK_BYTES // max(1, numel(shape[1:]) * itemsize))
    inner = (0,) * (len(shape) - 1)
    return [
        ((lo, *inner), (min(lo + step, shape[0]), *shape[1:])) for lo in range(0, shape[0], step)
    ]


def expand(indices: Sequence[int] | None, block: int) -> NDArray[np.int64] | None:
    """Indices of runs of `block` elements as indices of elements."""
    if indices is None:
        return None
    numbers = np.asarray(indices, np.int64)
    return (numbers[:, None] * block + np.arange(block, dtype=np.int64)).reshape(-1)
