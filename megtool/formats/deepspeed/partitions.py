"""ZeRO partitions: the elements of parameters in a rank's flat tensors.

Stages 1 and 2 concatenate a group's parameters, pad the end, and give each rank an equal run.
Stage 3 splits every parameter into runs of `ceil(numel / ranks)` and concatenates a rank's runs.
Source: deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType
from megtool.errors import FormatError
from megtool.formats.deepspeed.files import DeepSpeedTensor, OptimizerStates
from megtool.tensors.box import from_flat, numel
from megtool.tensors.catalogue import Catalogue, Extents, ShardOffsets, StoredFile
from megtool.tensors.sharded import GlobalTensor, Shards, widest

_HINT = "the files belong to different saves, or the world changed: copy the whole folder"
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Elements `[start, stop)` of a parameter, at element `offset` of a stored tensor."""

    name: str
    start: int
    stop: int
    tensor: DeepSpeedTensor
    offset: int


def split_group(
    shapes: dict[str, Shape], parts: Sequence[DeepSpeedTensor], *, root: Path
) -> Iterator[FlatRun]:
    """Stages 1 and 2: the runs of a group's parameters in the ranks' parts.

    Padding is at the end, and the last parts may lack it.

    Raises:
        FormatError: the parts are too few or too short for the parameters.
    """
    size = max((p.numel for p in parts), default=0)
    begin = 0
    for name, shape in shapes.items():
        total, position = numel(shape), 0
        while position < total:
            rank, offset = divmod(begin + position, size) if size else (len(parts), 0)
            count = min(total - position, parts[rank].numel - offset) if rank < len(parts) else 0
            if count <= 0:
                raise FormatError(
                    f"{len(parts)} parts of {size} elements end before element {position} "
                    f"of {total}",
                    file=root,
                    tensor=name,
                    hint=_HINT,
                )
            yield FlatRun(name, position, position + count, parts[rank], offset)
            position += count
        begin += total


def split_parameters(
    shapes: dict[str, Shape], parts: Sequence[Sequence[DeepSpeedTensor]], *, root: Path
) -> Iterator[FlatRun]:
    """Stage 3: the runs of parameters in `parts[rank]`, the flat tensors of a rank in order.

    Raises:
        FormatError: ranks hold more or fewer elements than their runs of the parameters.
    """
    ranks = len(parts)
    run_lengths = {name: -(-numel(shape) // ranks) for name, shape in shapes.items()}
    ends = [list(accumulate(p.numel for p in flat)) for flat in parts]
    for rank, end in enumerate(ends):
        available = end[-1] if end else 0
        if available != sum(run_lengths.values()):
            raise FormatError(
                f"rank {rank} of {ranks} holds {available} elements, its runs of the parameters "
                f"{sum(run_lengths.values())}",
                file=root,
                hint=_HINT,
            )
    begin = 0
    for name, shape in shapes.items():
        total = numel(shape)
        for rank, flat in enumerate(parts):
            start = rank * run_lengths[name]
            stop = min(start + run_lengths[name], total)
            part = int(np.searchsorted(ends[rank], begin, side="right"))
            position = begin
            while start < stop:
                offset = position - (ends[rank][part] - flat[part].numel)
                count = min(stop - start, flat[part].numel - offset)
                if count:
                    yield FlatRun(name, start, start + count, flat[part], offset)
                start, position, part = start + count, position + count, part + 1
        begin += run_lengths[name]


def check_slices(files: Sequence[OptimizerStates], runs: Sequence[FlatRun], group: int) -> None:
    """Compare runs of a group with the slices declared in each file.

    Raises:
        FormatError: they differ.
    """
    for file in files:
        declared = file.slices[group] if group < len(file.slices) else {}
        computed = {
            r.name: (r.offset, r.stop - r.start) for r in runs if r.tensor.stored == file.stored
        }
        wrong = [n for n in declared if declared[n] != computed.get(n) and declared[n][1]]
        if wrong:
            raise FormatError(
                f"the file says elements {declared[wrong[0]]}, its place in the group is "
                f"{computed.get(wrong[0])} (start, count)",
                file=Path(file.stored.path),
                tensor=wrong[0],
                hint=_HINT,
            )


_Row = tuple[int, list[int], list[int], int, int, int]


@dataclass(slots=True)
class ZeroTensors:
    """Collects tensors for a catalogue."""

    files: dict[str, StoredFile] = field(default_factory=dict)
    tensors: dict[str, GlobalTensor] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _rows: list[_Row] = field(default_factory=list)
    _strides: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def add_whole(self, name: str, tensor: DeepSpeedTensor) -> None:
        """Add a tensor that one file stores whole."""
        number, file = self._new(name, tensor.shape, tensor.dtype), self._file(tensor.stored)
        span = tensor.numel
        if tensor.strides is not None:
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
            self._strides[file, tensor.offset] = tensor.strides
        length = span * tensor.dtype.itemsize
        self._rows.append(
            (number, [0] * len(tensor.shape), list(tensor.shape), file, tensor.offset, length)
        )

    def add_runs(self, name: str, shape: Shape, runs: Sequence[FlatRun]) -> None:
        """Add a tensor that consists of flat runs."""
        number = self._new(name, shape, runs[0].tensor.dtype)
        for run in runs:
            file, item = self._file(run.tensor.stored), run.tensor.dtype.itemsize
            if run.tensor.dtype != runs[0].tensor.dtype:
                raise FormatError("its parts have several dtypes", tensor=name, hint=_HINT)
            boxes = from_flat(shape, run.start, run.stop)
            offset = run.tensor.offset + run.offset * item
            for lo, hi, volume in zip(
                boxes.lo.tolist(), boxes.hi.tolist(), boxes.volume().tolist(), strict=True
            ):
                self._rows.append((number, lo, hi, file, offset, volume * item))
                offset += volume * item

    def share(self, names: Mapping[str, str]) -> None:
        """Add tensors over the bytes of existing ones; `names` maps new names to existing ones."""
        number = {name: i for i, name in enumerate(self.tensors)}
        rows: dict[int, list[_Row]] = {}
        for row in self._rows:
            rows.setdefault(row[0], []).append(row)
        for new, old in names.items():
            tensor = self.tensors[old]
            new_number = self._new(new, tensor.shape, tensor.dtype)
            self._rows += [(new_number, *row[1:]) for row in rows.get(number[old], ())]

    def _new(self, name: str, shape: Shape, dtype: DType) -> int:
        if name in self.tensors:
            raise FormatError("two tensors have this name", tensor=name, hint=_HINT)
        self.tensors[name] = GlobalTensor(name=name, shape=shape, dtype=dtype)
        return len(self.tensors) - 1

    def _file(self, stored: StoredFile) -> int:
        self.files.setdefault(stored.path, stored)
        return self._numbers.setdefault(stored.path, len(self._numbers))

    def catalogue(self, root: Path) -> Catalogue:
        """The catalogue, unchecked."""
        tensors = list(self.tensors.values())
        rows = sorted(self._rows, key=lambda r: r[0])
        strides_by_row = {
            k: self._strides[r[3], r[4]]
            for k, r in enumerate(rows)
            if (r[3], r[4]) in self._strides
        }
        extents = Extents(
            file=np.array([r[3] for r in rows], np.int32),
            offset=np.array([r[4] for r in rows], np.int64),
            length=np.array([r[5] for r in rows], np.int64),
            contained=bool(strides_by_row),
        )

        def locate(shards: NDArray[np.int64]) -> ShardOffsets:
            shard_strides = {
                k: strides_by_row[row]
                for k, row in enumerate(shards.tolist())
                if row in strides_by_row
            }
            return ShardOffsets(offset=extents.offset[shards], strides=shard_strides)

        return Catalogue(
            format="deepspeed",
            root=root,
            files=list(self.files.values()),
            tensors=tensors,
            shards=Shards.build([r[:4] for r in rows], max(widest(tensors), 1)),
            extents=extents,
            locate_contained=locate if strides_by_row else None,
        )
