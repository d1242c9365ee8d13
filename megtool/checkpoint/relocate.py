"""Relocate: shards of a planned catalogue found again in the checkpoint, opened anew."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue, Located
from megtool.errors import SourceChangedError
from megtool.tensors.box import Ints

Reopen = Callable[[Path], Catalogue]


class Relocator:
    """Locates contained shards of a planned catalogue through the reopened checkpoint.

    The checkpoint is opened once, at first use; shards are recognized by the place of their
    containers (where some are cells, by their tensor and box), so the planned catalogue may be a
    selection.

    Raises:
        SourceChangedError: from both calls, when the checkpoint is not the one planned for.
    """

    def __init__(self, planned: Catalogue, reopen: Reopen) -> None:
        self._planned, self._reopen = planned, reopen
        self._lock = threading.Lock()
        self._opened: tuple[Catalogue, Ints] | None = None

    def __call__(self, shards: Ints) -> Located:
        """Where the raw bytes of planned shards lie."""
        catalogue, rows = self._found()
        return catalogue.locate(rows[shards])

    def read(self, shard: int) -> NDArray[np.uint8]:
        """The bytes of a cell."""
        catalogue, rows = self._found()
        if catalogue.cells is None:
            raise self._changed()
        return catalogue.cells.read(int(rows[shard]))

    def _found(self) -> tuple[Catalogue, Ints]:
        with self._lock:
            if self._opened is None:
                opened = self._reopen(self._planned.root)
                by = self._rows if self._planned.cells is None else self._rows_by_box
                self._opened = opened, by(opened)
        return self._opened

    def _rows_by_box(self, opened: Catalogue) -> Ints:
        """The same where cells have no place of their own: by tensor and first element."""

        def keys(c: Catalogue) -> list[tuple[str, ...]]:
            lo, n = c.shards.boxes.lo, [len(t.shape) for t in c.tensors]
            owner = c.shards.tensor.tolist()
            return [
                (c.tensors[t].name, *map(str, row[: n[t]]))
                for t, row in zip(owner, lo.tolist(), strict=True)
            ]

        self._planned.check_unchanged()
        known = {key: row for row, key in enumerate(keys(opened))}
        rows = np.array([known.get(key, -1) for key in keys(self._planned)], np.int64)
        if (rows < 0).any():
            raise self._changed()
        return rows

    def _changed(self) -> SourceChangedError:
        return SourceChangedError(
            "the source no longer holds the shards that were planned for",
            file=self._planned.root,
            hint="plan again",
        )

    def _rows(self, opened: Catalogue) -> Ints:
        """The row, in the reopened catalogue, of every shard of the planned one."""
        planned = self._planned
        self._planned.check_unchanged()
        number = {f.path: k for k, f in enumerate(planned.files)}
        file = np.array([number.get(f.path, -1) for f in opened.files], np.int64)
        theirs, ours = opened.extents, planned.extents
        offset = np.concatenate([theirs.offset, ours.offset])
        _, place = np.unique(offset, return_inverse=True)
        at = np.concatenate([file[theirs.file], ours.file]) * (len(offset) + 1)
        at += place.reshape(-1)
        order = np.argsort(at[: len(theirs)], kind="stable")
        wanted = at[len(theirs) :]
        found = np.searchsorted(at[: len(theirs)], wanted, sorter=order)
        rows = order[np.minimum(found, len(order) - 1)] if len(order) else order
        if len(wanted) and (not len(order) or (at[rows] != wanted).any()):
            raise self._changed()
        return rows
