"""Partitions of ZeRO: which elements of which parameter a rank's flat tensors hold.

Stages 1 and 2 join a group's parameters, pad the end, and give each rank an equal run of that.
Stage 3 cuts every parameter by itself into runs of `ceil(numel / ranks)` and joins a rank's runs.
Source: deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.catalogue import Catalogue, Extents, Located, StoredFile
from megtool.checkpoint.formats.deepspeed_files import Held, OptimizerStates
from megtool.dtypes import DType
from megtool.errors import FormatError
from megtool.tensors.box import from_flat, numel
from megtool.tensors.sharded import GlobalTensor, Shards, widest

_HINT = "the files belong to different saves, or the world changed: copy the whole folder"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `[start, stop)` of a parameter, at element `at` of a stored tensor."""

    name: str
    start: int
    stop: int
    held: Held
    at: int


def runs_of_group(shapes: dict[str, Shape], parts: Sequence[Held], *, root: Path) -> Iterator[Run]:
    """Stages 1 and 2: where a group's parameters lie in the ranks' parts of it.

    Padding is at the end, and the last parts may lack it.

    Raises:
        FormatError: the parts are too few or too short for the parameters.
    """
    size = max((p.numel for p in parts), default=0)
    begin = 0
    for name, shape in shapes.items():
        total, at = numel(shape), 0
        while at < total:
            rank, inside = divmod(begin + at, size) if size else (len(parts), 0)
            take = min(total - at, parts[rank].numel - inside) if rank < len(parts) else 0
            if take <= 0:
                raise FormatError(
                    f"{len(parts)} parts of {size} elements end before element {at} of {total}",
                    file=root,
                    tensor=name,
                    hint=_HINT,
                )
            yield Run(name, at, at + take, parts[rank], inside)
            at += take
        begin += total


def runs_of_parameters(
    shapes: dict[str, Shape], parts: Sequence[Sequence[Held]], *, root: Path
) -> Iterator[Run]:
    """Stage 3: where parameters lie in `parts[rank]`, the flat tensors of a rank one after another.

    Raises:
        FormatError: ranks hold more or fewer elements than their runs of the parameters.
    """
    ranks = len(parts)
    each = {name: -(-numel(shape) // ranks) for name, shape in shapes.items()}
    ends = [list(accumulate(p.numel for p in flat)) for flat in parts]
    for rank, end in enumerate(ends):
        have = end[-1] if end else 0
        if have != sum(each.values()):
            raise FormatError(
                f"rank {rank} of {ranks} holds {have} elements, its runs of the parameters "
                f"{sum(each.values())}",
                file=root,
                hint=_HINT,
            )
    begin = 0
    for name, shape in shapes.items():
        total = numel(shape)
        for rank, flat in enumerate(parts):
            start = rank * each[name]
            stop = min(start + each[name], total)
            which = int(np.searchsorted(ends[rank], begin, side="right"))
            at = begin
            while start < stop:
                inside = at - (ends[rank][which] - flat[which].numel)
                take = min(stop - start, flat[which].numel - inside)
                if take:
                    yield Run(name, start, start + take, flat[which], inside)
                start, at, which = start + take, at + take, which + 1
        begin += each[name]


def check_slices(files: Sequence[OptimizerStates], runs: Sequence[Run], group: int) -> None:
    """Compare runs of a group with what each file says of its own.

    Raises:
        FormatError: they differ.
    """
    for file in files:
        told = file.slices[group] if group < len(file.slices) else {}
        found = {r.name: (r.at, r.stop - r.start) for r in runs if r.held.stored == file.stored}
        wrong = [n for n in told if told[n] != found.get(n) and told[n][1]]
        if wrong:
            raise FormatError(
                f"the file says elements {told[wrong[0]]}, its place in the group is "
                f"{found.get(wrong[0])} (start, count)",
                file=Path(file.stored.path),
                tensor=wrong[0],
                hint=_HINT,
            )


_Row = tuple[int, list[int], list[int], int, int, int]


@dataclass(slots=True)
class Gathered:
    """Tensors as they are found, to become a catalogue."""

    files: dict[str, StoredFile] = field(default_factory=dict)
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _rows: list[_Row] = field(default_factory=list)
    _strides: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def add_whole(self, name: str, held: Held) -> None:
        """A tensor that one file holds whole."""
        number, file = self._new(name, held.shape, held.dtype), self._file(held.stored)
        span = 1 + sum((n - 1) * s for n, s in zip(held.shape, held.strides, strict=True))
        length = (span if held.numel else 0) * held.dtype.itemsize
        if not held.row_major:
            self._strides[file, held.offset] = held.strides
        self._rows.append(
            (number, [0] * len(held.shape), list(held.shape), file, held.offset, length)
        )

    def add_runs(self, name: str, shape: Shape, runs: Sequence[Run]) -> None:
        """A tensor out of flat runs."""
        number = self._new(name, shape, runs[0].held.dtype)
        for run in runs:
            file, item = self._file(run.held.stored), run.held.dtype.itemsize
            if run.held.dtype != runs[0].held.dtype:
                raise FormatError("its parts have several dtypes", tensor=name, hint=_HINT)
            boxes = from_flat(shape, run.start, run.stop)
            offset = run.held.offset + run.at * item
            for lo, hi, volume in zip(
                boxes.lo.tolist(), boxes.hi.tolist(), boxes.volume().tolist(), strict=True
            ):
                self._rows.append((number, lo, hi, file, offset, volume * item))
                offset += volume * item

    def share(self, names: Mapping[str, str]) -> None:
        """New tensors over the bytes of old ones: old names by new ones."""
        number = {name: i for i, name in enumerate(self.tensors)}
        rows: dict[int, list[_Row]] = {}
        for row in self._rows:
            rows.setdefault(row[0], []).append(row)
        for new, old in names.items():
            tensor = self.tensors[old]
            made = self._new(new, tensor.shape, tensor.dtype)
            self._rows += [(made, *row[1:]) for row in rows.get(number[old], ())]

    def _new(self, name: str, shape: Shape, dtype: DType) -> int:
        if name in self.tensors:
            raise FormatError("two tensors have this name", tensor=name, hint=_HINT)
        self.tensors[name] = GlobalTensor(name=name, shape=shape, dtype=dtype)
        return len(self.tensors) - 1

    def _file(self, stored: StoredFile) -> int:
        self.files.setdefault(stored.path, stored)
        return self._numbers.setdefault(stored.path, len(self._numbers))

    def catalogue(self, root: Path) -> Catalogue:
        """All of it, unchecked."""
        tensors = list(self.tensors.values())
        rows = sorted(self._rows, key=lambda r: r[0])
        strides = {
            k: self._strides[r[3], r[4]]
            for k, r in enumerate(rows)
            if (r[3], r[4]) in self._strides
        }
        extents = Extents(
            file=np.array([r[3] for r in rows], np.int32),
            offset=np.array([r[4] for r in rows], np.int64),
            length=np.array([r[5] for r in rows], np.int64),
            contained=bool(strides),
        )

        def locate(shards: NDArray[np.int64]) -> Located:
            found = {k: strides[row] for k, row in enumerate(shards.tolist()) if row in strides}
            return Located(offset=extents.offset[shards], strides=found)

        return Catalogue(
            format="deepspeed",
            root=root,
            files=list(self.files.values()),
            tensors=tensors,
            shards=Shards.build([r[:4] for r in rows], max(widest(tensors), 1)),
            extents=extents,
            locate_contained=locate if strides else None,
        )
