"""How the files of a planned checkpoint become parts of objects: what is copied by the server."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path

import numpy as np

from megtool.dtypes import dtype
from megtool.plan.copies import ReshardPlan
from megtool.plan.kernel_copy import plan_kernel_copies
from megtool.plan.shares import split_units
from megtool.plan.work_units import KernelUnit, Unit, plan_units
from megtool.storage.location.path import is_in_store
from megtool.storage.objects.part_layout import CopyRun, Coverage
from megtool.storage.stores.protocol import Store
from megtool.tensors.box import strides
from megtool.tensors.catalogue import Catalogue, Destination
from megtool.transport.shard_locator import ShardLocator


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParts:
    """A file of the target, by number.

    `expected` are the bytes that will be written, `runs` those that the server can copy, `headers`
    those known from the plan, by offset; `deferred` bytes at its begin are written last. At
    `borders` another worker begins to write.
    """

    number: int
    expected: Coverage
    runs: tuple[CopyRun, ...] = ()
    headers: tuple[tuple[int, bytes], ...] = ()
    deferred: int = 0
    borders: tuple[int, ...] = ()


def plan_file_parts(
    plan: ReshardPlan,
    *,
    is_file: bool,
    copies_in: Store | None = None,
    workers: int = 1,
    is_tiled: bool = True,
) -> dict[str, FileParts]:
    """The parts of every file of a plan, by path.

    With `copies_in`, the kernel's units of sources in that store are runs that it can copy. The
    header of a single file is written last, because it holds the digests of all others. Several
    `workers` share out the units of the plan, which are all tiled if `is_tiled`.
    """
    target = plan.target
    expected = _find_expected(target)
    locator = ShardLocator(target.catalogue, [Path() for _ in target.catalogue.files])
    planned: dict[bool, list[Unit]] = {}

    def units(*, tiled_only: bool) -> list[Unit]:
        if tiled_only not in planned:
            planned[tiled_only] = plan_units(plan, locator, tiled_only=tiled_only)
        return planned[tiled_only]

    borders: dict[int, set[int]] = defaultdict(set)
    if plan.share is not None:
        borders = _find_share_borders(plan, plan.share.borders)
    elif workers > 1:
        borders = _find_unit_borders(units(tiled_only=is_tiled), workers)
    runs: dict[int, list[CopyRun]] = defaultdict(list)
    if copies_in is not None and can_copy_from(copies_in, plan.sources):
        runs = _find_runs(plan, units(tiled_only=False), locator, copies_in)
    deferred = (
        max((o + len(d) for _, o, d in target.fragments if not o), default=0) if is_file else 0
    )
    headers: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for n, offset, data in target.fragments:
        if offset >= deferred:
            headers[n].append((offset, data))
    return {
        file.path: FileParts(
            number=n,
            expected=expected[n],
            runs=tuple(sorted(runs.get(n, ()), key=lambda run: run.offset)),
            headers=tuple(sorted(headers.get(n, ()))),
            deferred=deferred,
            borders=tuple(sorted(borders.get(n, ()))),
        )
        for n, file in enumerate(target.catalogue.files)
    }


def can_copy_from(store: Store, sources: Sequence[Catalogue]) -> bool:
    """Whether a store can copy bytes of some sources itself, which decides how files are cut."""
    return store.can_copy and any(is_in_store(c.root, store) for c in sources)


def _find_expected(target: Destination) -> list[Coverage]:
    """Per file, the bytes of tensors and of headers."""
    catalogue = target.catalogue
    offset, length = catalogue.extents.offset, catalogue.extents.length
    if catalogue.extents.contained and len(catalogue.shards):
        offset = ShardLocator(catalogue).offsets(np.arange(len(catalogue.shards)))
        item = np.array([t.dtype.itemsize for t in catalogue.tensors], np.int64)
        length = catalogue.shards.boxes.volume() * item[catalogue.shards.tensor]
    ranges: list[list[tuple[int, int]]] = [[] for _ in catalogue.files]
    for file, a, n in zip(
        catalogue.extents.file.tolist(), offset.tolist(), length.tolist(), strict=True
    ):
        ranges[file].append((a, a + n))
    for file, a, data in target.fragments:
        ranges[file].append((a, a + len(data)))
    for parts in catalogue.packed.values():
        for part in parts:
            size = math.prod(part.part.shape) * dtype(part.part.dtype).itemsize
            ranges[part.file].append((part.offset, part.offset + size))
    out = []
    for file_ranges in ranges:
        coverage = Coverage()
        for a, b in sorted(file_ranges):
            if a < b:
                coverage.add(a, b)
        out.append(coverage)
    return out


def _find_unit_borders(units: Sequence[Unit], workers: int) -> dict[int, set[int]]:
    """Per file, the offsets at which the share of a worker begins, where units are shared out."""
    out: dict[int, set[int]] = defaultdict(set)
    shares = split_units(units, workers)
    for cut in shares.cuts[1:-1]:
        if cut < len(units):
            unit = units[shares.order[cut]]
            out[unit.files[0]].add(unit.offset)
    return out


def _find_share_borders(
    plan: ReshardPlan, borders: Sequence[tuple[int, int]]
) -> dict[int, set[int]]:
    """The same by the `borders` of a `PlanShare`."""
    catalogue = plan.target.catalogue
    locator = ShardLocator(catalogue)
    out: dict[int, set[int]] = defaultdict(set)
    for number, before in borders:
        entry = plan.entries[number]
        tensor = catalogue.tensors[entry.target_tensor]
        first = sum(map(mul, entry.target.base, strides(tensor.shape))) * tensor.dtype.itemsize
        shards = catalogue.shards.of(entry.target_tensor)
        if first + before and shards.stop - shards.start > 1:
            continue  # in each at another place
        rows = np.arange(shards.start, shards.stop)
        for file, offset in zip(
            catalogue.extents.file[rows].tolist(), locator.offsets(rows).tolist(), strict=True
        ):
            out[file].add(offset + first + before)
    return out


def _find_runs(
    plan: ReshardPlan, units: Sequence[Unit], locator: ShardLocator, store: Store
) -> dict[int, list[CopyRun]]:
    """Per file, the runs of the kernel's units whose source is an object of a store."""
    sources = [ShardLocator(c) for c in plan.sources]
    out: dict[int, list[CopyRun]] = defaultdict(list)
    for unit in units:
        if not isinstance(unit, KernelUnit):
            continue
        table, _ = plan_kernel_copies(plan, unit, sources, locator)
        for source, file, source_offset, number, offset, num_bytes in table.rows():
            path = sources[source].path(file)
            if is_in_store(path, store):
                out[number].append(CopyRun(offset, num_bytes, path, source_offset))
    return out
