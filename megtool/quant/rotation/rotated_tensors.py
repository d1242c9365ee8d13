"""Rotated tensors, computed in blocks when they are read.

A weight W that reads the hidden state becomes W diag(g) Q, with the weights g of the norm before
it; one that writes it becomes Q^T W. Products are computed in float64 and rounded to the stored
dtype. What depends on whole columns is computed in panels of columns, which are kept for a while.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType, dtype
from megtool.errors import FormatError
from megtool.quant.rotation.orthogonal import OrthogonalMatrix
from megtool.source.computed.shards import (
    BLOCK_BYTES,
    ComputedTensor,
    Corner,
    SourceTensors,
    with_computed,
)
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement, narrow
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.cast import cast

PANEL_CACHE_BYTES = 1 << 30
"""Panels of columns in memory at once, if one of them is not larger."""

NUM_PANELS = 16
"""The panels of a matrix: a rank that has some of its columns computes few others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedTensor:
    """The tensor `name`: the canonical one at `placement`, of `shape`, multiplied by rotations.

    `norm` is the norm whose weights its columns are multiplied by first; zero-centered ones are of
    1 + w. `columns` is the rotation of its last dimension, `rows` that of its first. With `value`
    all elements are that number.
    """

    name: str
    placement: Placement
    shape: tuple[int, ...]
    norm: Placement | None = None
    norm_offset: float = 0.0
    columns: OrthogonalMatrix | None = None
    rows: OrthogonalMatrix | None = None
    value: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether an element depends on all rows of its column."""
        return self.rows is not None and self.rows.size == self.shape[0]

    @property
    def width(self) -> int:
        """The columns of a row."""
        return numel(self.shape[1:])

    def panel_width(self) -> int:
        """The columns that are computed at once."""
        if not self.is_whole:
            return max(1, self.width)
        step = self.columns.size if self.columns is not None else 1
        return min(self.width, step * max(1, -(-self.width // NUM_PANELS // step)))

    def blocks(self, itemsize: int) -> list[tuple[Corner, Corner]]:
        """The blocks that the tensor is computed in: rows of a panel."""
        if not self.shape:
            return [((), ())]
        if len(self.shape) > 2:  # only copied
            rows = self._row_step(self.width * itemsize)
            inner = (0,) * (len(self.shape) - 1)
            return [
                ((r, *inner), (min(r + rows, self.shape[0]), *self.shape[1:]))
                for r in range(0, self.shape[0], rows)
            ]
        panel = self.panel_width()
        rows = self._row_step(panel * itemsize)
        out: list[tuple[Corner, Corner]] = []
        for r in range(0, self.shape[0], rows):
            end = min(r + rows, self.shape[0])
            if len(self.shape) == 1:
                out.append(((r,), (end,)))
                continue
            for c in range(0, self.width, panel):
                out.append(((r, c), (end, min(c + panel, self.width))))
        return out

    def _row_step(self, row_bytes: int) -> int:
        step = 1 if self.rows is None or self.is_whole else self.rows.size
        return step * max(1, BLOCK_BYTES // max(1, row_bytes) // step)


def with_rotated(
    catalogue: Catalogue, removed: frozenset[str], rotated: Sequence[RotatedTensor]
) -> Catalogue:
    """The catalogue without the stored tensors in `removed`, and with rotated ones instead."""
    computed = []
    for t in rotated:
        kind = catalogue[t.placement.stored].dtype
        computed.append(
            ComputedTensor(
                tensor=GlobalTensor(name=t.name, shape=t.shape, dtype=kind),
                of=t.placement.stored,
                blocks=t.blocks(kind.itemsize),
            )
        )
    return with_computed(catalogue, removed, computed, _RotatedReader(catalogue, rotated).read)


class _RotatedReader:
    """Computes blocks of rotated tensors; any thread may."""

    def __init__(self, catalogue: Catalogue, rotated: Sequence[RotatedTensor]) -> None:
        self._source, self._rotated = SourceTensors(catalogue), rotated
        self._lock = threading.Lock()
        self._norms: dict[str, NDArray[np.float64]] = {}
        self._panels: OrderedDict[tuple[int, int], _Panel] = OrderedDict()

    def read(self, number: int, lo: Corner, hi: Corner) -> NDArray[np.uint8]:
        """The bytes of the block `lo:hi` of a tensor."""
        t = self._rotated[number]
        kind = self._source.dtype(t.placement)
        if t.value is not None:
            return self._encode(np.full(_extent(lo, hi), t.value), kind, t.name)
        if t.is_whole and t.shape:
            panel = self._panel(number, lo[1] if len(lo) > 1 else 0)
            block = np.ascontiguousarray(panel[lo[0] : hi[0]])
            return block.reshape(-1).view(np.uint8)
        if not t.shape or (t.norm is None and t.columns is None and t.rows is None):
            placement, first, end = self._rows_of(t, lo, hi)
            with self._source.open(placement, kind) as elements:
                bits: NDArray[np.uint8] = elements.read(first, end).copy().view(np.uint8)
            return bits
        x = self._read_rows(t, lo, hi)
        return self._encode(self._multiply(t, x), kind, t.name)

    def _panel(self, number: int, first: int) -> NDArray[Any]:
        """All rows of the panel that begins at a column, in the stored dtype."""
        key = (number, first)
        with self._lock:
            panel = self._panels.pop(key, None) or _Panel()
            self._panels[key] = panel
        with panel.lock:
            if panel.rows is None:
                panel.rows = self._compute_panel(self._rotated[number], first)
        with self._lock:
            total = sum(p.rows.nbytes for p in self._panels.values() if p.rows is not None)
            while total > PANEL_CACHE_BYTES and len(self._panels) > 1:
                oldest = next(k for k in self._panels if k != key)
                dropped = self._panels.pop(oldest)
                total -= 0 if dropped.rows is None else dropped.rows.nbytes
        return panel.rows

    def _compute_panel(self, t: RotatedTensor, first: int) -> NDArray[Any]:
        kind = self._source.dtype(t.placement)
        width = min(t.panel_width(), t.width - first)
        x = self._read_columns(t, first, first + width)
        values = self._multiply(t, x.reshape(t.shape[0], width))
        bits = self._encode(values, kind, t.name).view(kind.view)
        return bits.reshape(t.shape[0], width)

    def _multiply(self, t: RotatedTensor, x: NDArray[Any]) -> NDArray[np.float64]:
        out = np.asarray(x, np.float64)
        if t.norm is not None:
            out = out * (self._norm(t.norm) + t.norm_offset)
        if t.columns is not None:
            out = t.columns.multiply(out)
        if t.rows is not None:
            step = t.rows.size
            tall = out.reshape(-1, step, *out.shape[1:])
            rotated = [t.rows.multiply_rows(part.reshape(step, -1)) for part in tall]
            out = np.concatenate(rotated).reshape(out.shape)
        return out

    def _norm(self, placement: Placement) -> NDArray[np.float64]:
        if placement.canonical not in self._norms:
            kind = _precise(self._source.dtype(placement))
            with self._source.open(placement, kind) as elements:
                values = elements.read(0, numel(placement.shape)).astype(np.float64)
            self._norms[placement.canonical] = values
        return self._norms[placement.canonical]

    def _read_rows(self, t: RotatedTensor, lo: Corner, hi: Corner) -> NDArray[Any]:
        placement, first, end = self._rows_of(t, lo, hi)
        kind = _precise(self._source.dtype(t.placement))
        with self._source.open(placement, kind) as elements:
            rows: NDArray[np.float64] = elements.read(first, end).astype(np.float64)
        return rows.reshape(_extent(lo, hi))

    @staticmethod
    def _rows_of(t: RotatedTensor, lo: Corner, hi: Corner) -> tuple[Placement, int, int]:
        """The placement and the range of its elements that whole rows are."""
        if not t.shape:
            return t.placement, 0, 1
        return t.placement, lo[0] * t.width, hi[0] * t.width

    def _read_columns(self, t: RotatedTensor, first: int, end: int) -> NDArray[np.float64]:
        kind = _precise(self._source.dtype(t.placement))
        shape = t.placement.shape
        rows = next(k for k in range(len(shape) + 1) if numel(shape[:k]) == t.shape[0])
        outer, inner = shape[rows : rows + 1], numel(shape[rows + 1 :])
        if not outer:  # a bias
            with self._source.open(t.placement, kind) as elements:
                bias: NDArray[np.float64] = elements.read(0, t.shape[0]).astype(np.float64)
            return bias
        a, b = first // inner, -(-end // inner)
        tail = shape[rows + 1 :]
        lo = [*[0] * rows, a, *[0] * len(tail)]
        part = narrow(t.placement, lo, [*shape[:rows], b, *tail])
        with self._source.open(part, kind) as elements:
            x: NDArray[np.float64] = elements.read(0, numel(part.shape)).astype(np.float64)
        return x.reshape(t.shape[0], -1)[:, first - a * inner : end - a * inner]

    @staticmethod
    def _encode(values: NDArray[np.float64], kind: DType, name: str) -> NDArray[np.uint8]:
        """The bytes of values rounded once to a dtype (from float32, for those below it)."""
        if not np.isfinite(values).all():
            raise FormatError(
                "the weight has NaN or Inf, which a rotation would spread over all of it",
                tensor=name,
                hint="repair the weight, or quantize without rotation",
                error_id="nan-weights",
            )
        if kind.name == "float64":
            return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        solid = np.ascontiguousarray(values, np.float32).reshape(-1)
        out = np.empty(solid.shape, f"<u{kind.itemsize}")
        cast(solid, dtype("float32"), out, kind)
        return out.view(np.uint8)


class _Panel:
    """One panel, computed by the first thread that needs it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: NDArray[Any] | None = None


def _extent(lo: Corner, hi: Corner) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(lo, hi, strict=True))


def _precise(kind: DType) -> DType:
    """The dtype that elements are read in, which is exact for all dtypes of weights."""
    return kind if kind.name == "float64" else dtype("float32")
