"""Summary of a plan before it runs: bytes, files, memory and estimated seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megtool.console import format_bytes
from megtool.dtypes import dtype
from megtool.plan.copies import Op, ReshardPlan
from megtool.plan.worker import NUM_BUFFERS
from megtool.tensors.box import Ints, numel
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.grouping import distinct
from megtool.transport.tile import COMPUTED_BYTES
from megtool.transport.weight_update import UPDATE_CACHE_BYTES, UpdateAdder

KERNEL_RATE = 4.0e9
STRIDED_RATE = 2.5e9
CAST_RATE = 2.0e9
DECODE_RATE = 0.5e9
REDUCE_RATE = 0.7e9
MERGE_RATE = 0.3e9
FILL_RATE = 4.0e9
"""Nominal bytes per second of one thread, in the target, with files in the page cache.

Measured on a two-core virtual machine: enough to tell seconds from hours.
"""

THREAD_GAIN = 0.8
"""The gain of each thread after the first; beyond `MAX_GAIN` the storage is the limit."""

MAX_GAIN = 8.0
MIN_BUFFER_BYTES = 64 << 10
"""Each buffer may take this much even if the memory limit is lower."""

DEFAULT_BUFFER_BYTES = 1 << 20
"""Each buffer may take this much, or the size decoded at once, if memory allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpBytes:
    """Bytes of the target by operation.

    `kernel` bytes never enter the process. `strided` bytes are also unchanged, but pass through
    buffers because they come in short runs (or are digested).
    """

    kernel: int
    strided: int
    cast: int
    decode: int
    fill: int
    reduce: int = 0
    merge: int = 0

    @property
    def total(self) -> int:
        """All bytes of tensors."""
        copied = self.kernel + self.strided + self.cast + self.decode + self.fill
        return copied + self.reduce + self.merge


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A plan in numbers.

    `read_bytes` are bytes read of tensors, `header_bytes` all that is written around them. `moved`
    stored source tensors reach the target unchanged, `derived` ones are cast or decoded, and
    `dropped` ones, of `dropped_bytes`, are not in the target. `peak_buffer_bytes` bounds all
    buffers of all threads; `seconds` is an estimate at the nominal rates of this file.
    """

    source_format: str
    target_format: str
    num_bytes: OpBytes
    read_bytes: int
    header_bytes: int
    source_files: int
    target_files: int
    moved: int
    derived: int
    dropped: int
    dropped_bytes: int
    steps: int
    threads: int
    peak_buffer_bytes: int
    seconds: float
    fingerprint: str

    def rows(self) -> list[tuple[str, str]]:
        """The summary as labels and texts; sizes in powers of 1024."""
        rows = [("plan", f"{self.source_format} -> {self.target_format}")]
        names = {
            "kernel": "copied by the kernel",
            "strided": "copied in buffers",
            "cast": "cast",
            "decode": "decoded",
            "fill": "filled",
            "reduce": "averaged",
            "merge": "merged with an adapter",
        }
        for field in fields(self.num_bytes):
            if n := getattr(self.num_bytes, field.name):
                rows.append((names[field.name], format_bytes(n)))
        dropped = f", {self.dropped:,} dropped" if self.dropped else ""
        if self.dropped_bytes:
            dropped += f" ({format_bytes(self.dropped_bytes)})"
        rows += [
            ("headers and small files", format_bytes(self.header_bytes)),
            ("read", f"{format_bytes(self.read_bytes)} of {_count(self.source_files, 'file')}"),
            (
                "written",
                f"{format_bytes(self.num_bytes.total + self.header_bytes)} to "
                f"{_count(self.target_files, 'file')}",
            ),
            (
                "source tensors",
                f"{self.moved:,} moved, {self.derived:,} derived{dropped}",
            ),
            ("steps", f"{self.steps:,}"),
            (
                "buffers",
                f"at most {format_bytes(self.peak_buffer_bytes)} "
                f"in {_count(self.threads, 'thread')}",
            ),
            ("estimated time", _duration(self.seconds)),
        ]
        return rows

    def to_json(self) -> dict[str, Any]:
        """The summary as plain data: bytes and seconds as numbers."""
        return asdict(self)


def summarize(
    plan: ReshardPlan, *, threads: int = 1, memory_bytes: int = 256 << 20, digest_all: bool = False
) -> PlanSummary:
    """Summarize a plan as `execute.execute` would execute it with these settings.

    With `digest_all` every byte passes through buffers. Works on columns, so that millions of
    steps take about a second.
    """
    entries, steps, target = plan.entries, plan.steps, plan.target.catalogue
    volume = _by_entry(steps.boxes.volume(), steps.first)
    item = np.array([plan.target_tensor(e).dtype.itemsize for e in entries], np.int64)
    writes = np.array([e.writes for e in entries], bool)
    written = volume * item * writes
    _, plain = plan.step_runs()
    copied = np.array([e.op is Op.COPY for e in entries], bool)
    buffered = _by_entry((~plain).astype(np.int64), steps.first) > 0
    kernel = copied & ~buffered if not digest_all else np.zeros(len(entries), bool)
    by_op = {op: int(written[np.array([e.op is op for e in entries], bool)].sum()) for op in Op}
    through_kernel = int(written[kernel].sum())
    num_bytes = OpBytes(
        kernel=through_kernel,
        strided=by_op[Op.COPY] - through_kernel,
        cast=by_op[Op.CAST],
        decode=by_op[Op.DECODE],
        fill=by_op[Op.FILL],
        reduce=by_op[Op.REDUCE],
        merge=by_op[Op.MERGE],
    )
    used, derived = set[tuple[int, int]](), set[tuple[int, int]]()
    for e in entries:
        if e.source_index >= 0:
            used.add((e.source_index, e.source_tensor))
            if e.op is not Op.COPY:
                derived.add((e.source_index, e.source_tensor))
    small = sum(len(data) for _, data in plan.target.iter_small_files())
    return PlanSummary(
        source_format=" + ".join(dict.fromkeys(c.format for c in plan.sources)),
        target_format=target.format,
        num_bytes=num_bytes,
        read_bytes=_read_bytes(plan, volume),
        header_bytes=small + sum(len(data) for _, _, data in plan.target.fragments),
        source_files=_files_read(plan),
        target_files=len(target.files) + sum(1 for _ in plan.target.iter_small_files()),
        moved=len(used - derived),
        derived=len(derived),
        dropped=len({d.name for d in plan.dropped} & _tensor_names(plan)),
        dropped_bytes=sum(d.num_bytes for d in plan.dropped),
        steps=len(steps),
        threads=threads,
        peak_buffer_bytes=_peak(
            int(written[~kernel].max(initial=0)),
            COMPUTED_BYTES
            if num_bytes.merge or any(c.packed for c in plan.sources)
            else DEFAULT_BUFFER_BYTES,
            threads=threads,
            memory_bytes=memory_bytes,
            slots=NUM_BUFFERS + bool(num_bytes.reduce or num_bytes.merge),
        )
        + threads * _adder_bytes(plan, memory_bytes // threads // NUM_BUFFERS),
        seconds=_seconds(num_bytes, threads, _reduced_bytes(plan)),
        fingerprint=plan.fingerprint,
    )


def _tensor_names(plan: ReshardPlan) -> set[str]:
    """Names of the tensors that the sources store; dropped items may also be objects."""
    tensors = {t.name for c in plan.sources for t in c.tensors}
    return tensors | {s.name for c in plan.sources for s in c.ignored}


def _by_entry(values: Ints, first: Ints) -> Ints:
    """Sums over the steps of each entry."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    return np.asarray(np.diff(total[first]))


def _read_bytes(plan: ReshardPlan, volume: Ints) -> int:
    """Bytes read: whole elements, or of encoded tensors the part of their bytes that is used."""
    stored = [_stored_bytes(c) for c in plan.sources]
    total = 0
    for e, n in zip(plan.entries, volume.tolist(), strict=True):
        if e.op is not Op.FILL and plan.source_tensor(e).packing:
            elements = numel(plan.source_tensor(e).shape)
            total += int(stored[e.source_index][e.source_tensor]) * n // max(elements, 1)
        elif e.op is not Op.FILL:
            total += n * plan.source_tensor(e).dtype.itemsize
    return total


def _stored_bytes(catalogue: Catalogue) -> Ints:
    """Bytes that each tensor's shards take in files."""
    out = np.zeros(len(catalogue.tensors), np.int64)
    np.add.at(out, catalogue.shards.tensor, catalogue.extents.length)
    for name, parts in catalogue.packed.items():  # codes and scales
        sizes = [numel(p.part.shape) * dtype(p.part.dtype).itemsize for p in parts]
        out[catalogue.index[name]] = sum(sizes)
    return out


def _files_read(plan: ReshardPlan) -> int:
    """Source files that a step reads from."""
    pieces, total = plan.source_pieces, 0
    read = np.zeros(len(pieces), bool)
    read[plan.steps.source_piece[plan.steps.source_piece >= 0]] = True
    source = np.array([e.source_index for e in plan.entries], np.int64)[pieces.entry]
    for index, catalogue in enumerate(plan.sources):
        shard = pieces.shard[read & (source == index)]
        total += len(distinct(catalogue.extents.file[shard]))
    return total


def _reduced_bytes(plan: ReshardPlan) -> int:
    """Bytes added up by reductions, in the target's dtype, for every source."""
    return sum(
        numel(e.shape) * plan.target_tensor(e).dtype.itemsize
        for e in plan.entries
        if e.op is Op.REDUCE
    )


def _adder_bytes(plan: ReshardPlan, share_bytes: int) -> int:
    """The most memory with which one thread adds the updates of a weight."""
    cache_bytes = min(UPDATE_CACHE_BYTES, max(share_bytes, MIN_BUFFER_BYTES))
    sizes = (UpdateAdder.num_bytes(e.updates, cache_bytes) for e in plan.entries)
    return max(sizes, default=0)


def _peak(
    largest_bytes: int,
    default_bytes: int,
    *,
    threads: int,
    memory_bytes: int,
    slots: int = NUM_BUFFERS,
) -> int:
    """The bound on all buffers: the share of the memory, or the largest entry if smaller."""
    if not largest_bytes:
        return 0
    share = max(memory_bytes // threads // slots, MIN_BUFFER_BYTES)
    return threads * slots * min(share, max(largest_bytes, default_bytes))


def _seconds(num_bytes: OpBytes, threads: int, reduced_bytes: int = 0) -> float:
    alone = (
        num_bytes.kernel / KERNEL_RATE
        + num_bytes.strided / STRIDED_RATE
        + num_bytes.cast / CAST_RATE
        + num_bytes.decode / DECODE_RATE
        + num_bytes.fill / FILL_RATE
        + num_bytes.merge / MERGE_RATE
        + reduced_bytes / REDUCE_RATE
    )
    return alone / min(1 + THREAD_GAIN * (threads - 1), MAX_GAIN)


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _duration(seconds: float) -> str:
    """An estimate in seconds as text, with two digits at most."""
    if seconds < 1:
        return "less than a second"
    if seconds < 90:
        return f"about {seconds:.0f} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
