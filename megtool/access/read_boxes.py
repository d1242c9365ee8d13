"""Reads boxes of tensors, under any names, into memory: one plan for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megtool.console import Progress, silent
from megtool.convert.canonical_view import CanonicalView, TargetView
from megtool.convert.rank_tensors import IndexedTarget, LocalTensor, LocalView, local_side
from megtool.dtypes import DType
from megtool.options.execution import DigestMode
from megtool.plan import memory
from megtool.plan.copies import Fill, PlanSource, ReshardPlan
from megtool.plan.execute import execute
from megtool.plan.memory import Memory
from megtool.plan.planner import build_plan
from megtool.process.gc_pause import paused_collection
from megtool.storage.files import Files
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement
from megtool.transport.reading.parallel_scan import default_threads

_LOG = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20
"""What all buffers of all threads together hold while tensors are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRead:
    """A tensor (often a box of one: see `cut_local`) to read as `dtype`."""

    tensor: LocalTensor
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return numel(self.tensor.shape) * self.dtype.itemsize


class BoxReader:
    """Reads boxes of the tensors of `target`, which was planned from `source`. For any thread."""

    def __init__(
        self,
        catalogue: Catalogue,
        source: CanonicalView,
        target: TargetView,
        *,
        threads: int | None = None,
        memory_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.target = IndexedTarget.of(target)
        self._catalogue, self._source = catalogue, source
        self._threads = default_threads(threads, catalogue.root)
        self._memory_bytes = memory_bytes
        self._files = Files()

    @paused_collection()
    def plan(self, reads: Sequence[BoxRead]) -> PlannedReads:
        """Plan to read boxes, once for as many times as they are read.

        Raises:
            MappingError: two sides cut a tensor in ways that do not nest.
        """
        filled = [n for n, r in enumerate(reads) if r.num_bytes]
        batches = [(batch, self._plan_batch(reads, batch)) for batch in _in_batches(reads, filled)]
        return PlannedReads(self, len(reads), batches)

    def read(
        self, reads: Sequence[BoxRead], filled: Sequence[Memory], progress: Progress = silent
    ) -> None:
        """Fill memory with boxes, each in row-major order.

        Raises:
            StorageError: a read failed.
            SourceChangedError: a source file changed since it was opened.
        """
        self.plan(reads).fill(filled, progress)

    def _plan_batch(self, reads: Sequence[BoxRead], batch: Sequence[int]) -> ReshardPlan:
        side = local_side(
            [replace(reads[n].tensor, name=str(n)) for n in batch],
            self._source,
            self.target,
            dtypes={str(n): reads[n].dtype for n in batch},
        )
        placements, copies = _each_once(side)
        used = {p.stored for p in placements.values()}
        return build_plan(
            [PlanSource(catalogue=self._catalogue.pick(used), placements=placements)],
            memory.plan_memory_layout(side.tensors),
            side.target,
            fills=[_as_fill(f.placement, f.value) for f in side.fills],
            copies=copies,
        )

    def execute(
        self, plan: ReshardPlan, filled: Mapping[str, Memory], progress: Callable[[int], None]
    ) -> None:
        """Execute a plan of this reader into memory, by the names of the plan's tensors."""
        with memory.MemoryStage(filled) as stage:
            copied = execute(
                plan,
                stage,
                files=self._files,
                threads=self._threads,
                memory_bytes=self._memory_bytes,
                digest=DigestMode.NONE,
                progress=progress,
            )
        if copied.overflowed:
            _LOG.warning("%s", copied.overflows)


class PlannedReads:
    """Boxes that can be read into other memory each time."""

    def __init__(
        self, reader: BoxReader, count: int, batches: Sequence[tuple[list[int], ReshardPlan]]
    ) -> None:
        self._reader, self._count, self._batches = reader, count, batches

    @paused_collection()
    def fill(self, filled: Sequence[Memory], progress: Progress = silent) -> None:
        """Read all boxes into memory, which is in their order; see `BoxReader.read`."""
        if len(filled) != self._count:
            raise ValueError(f"{self._count} boxes were planned, and {len(filled)} are given")
        total = sum(plan.target.catalogue.num_bytes for _, plan in self._batches)
        for numbers, plan in self._batches:
            by_name = {str(n): filled[n] for n in numbers}
            self._reader.execute(plan, by_name, lambda n: progress("load", n, total))


def _in_batches(reads: Sequence[BoxRead], numbers: Sequence[int]) -> list[list[int]]:
    """Reads in as few batches as keep different boxes of one tensor apart.

    A plan reads every element once, or the same boxes several times.
    """
    batches: list[list[int]] = []
    boxes: list[dict[str, object]] = []
    for number in numbers:
        tensor = reads[number].tensor
        fits = (
            n
            for n, tensors in enumerate(boxes)
            if tensors.get(tensor.key, tensor.boxes) == tensor.boxes
        )
        chosen = next(fits, len(batches))
        if chosen == len(batches):
            batches.append([])
            boxes.append({})
        batches[chosen].append(number)
        boxes[chosen][tensor.key] = tensor.boxes
    return batches


def _each_once(side: LocalView) -> tuple[dict[str, Placement], dict[str, str]]:
    """Where parts lie in the source, each place once; the others by the name it is read under.

    A layer that was chosen twice stands in the model twice.
    """
    first: dict[object, str] = {}
    placements: dict[str, Placement] = {}
    copies: dict[str, str] = {}
    for name, p in side.source.items():
        place = p.stored, p.base, p.shape, p.dims, p.mults
        if (there := first.setdefault(place, name)) == name:
            placements[name] = p
        else:
            copies[name] = there
    return placements, copies


def _as_fill(p: Placement, value: float) -> Fill:
    """The fill of padding."""
    hi = tuple(b + n for b, n in zip(p.base, p.shape, strict=True))
    return Fill(stored=p.stored, lo=p.base, hi=hi, value=value)
