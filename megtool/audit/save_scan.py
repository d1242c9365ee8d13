"""Reads one save: every byte of its tensors once, or with `quick` headers and checksums alone."""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megtool.audit.element_sums import ElementSums, Workspace, rows_at_once
from megtool.audit.fp8_scales import find_scale_faults
from megtool.audit.pair_checks import PairCheck
from megtool.audit.piece_checksums import (
    CRC32C,
    ByteRange,
    read_bytes,
    zip_ranges,
)
from megtool.audit.run_saves import RunSave
from megtool.audit.save_facts import PairFacts, SaveFacts, TensorFacts
from megtool.audit.shard_reader import ReadAhead, ShardReader
from megtool.audit.stored_rows import RowGroup, ShardRow, group_rows
from megtool.audit.training_state import read_training_facts
from megtool.convert.megatron.names import split_state
from megtool.digests.crc32c import SIDECAR, Sidecar, read_sidecar
from megtool.digests.files import check_files
from megtool.errors import FormatError, MegtoolError, MissingPackageError, listed
from megtool.formats import open_checkpoint
from megtool.megatron_state.model_space import to_model_space
from megtool.process.threads import stream_in_threads
from megtool.run_state.common_state import read_source_layout
from megtool.source.identify import identify_model
from megtool.storage.files import Files
from megtool.storage.location.path import location
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.parallel_scan import default_threads
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.shard_locator import ShardLocator

SKETCH_SIZES = ((8192, 16), (65536, 8), (1 << 62, 4))
"""The side of sketches for up to so many tensors: the memory of all stays below 20 MiB."""

_GROUPS_AHEAD = 2
_ZIPPED = (".distcp", ".pt", ".pth")
_RULES = {  # by the id of the error that opening a save raises
    "truncated-file": "truncated-file",
    "missing-shard": "missing-shard",
    "unfinished-save": "unfinished-save",
    "incomplete-publication": "unfinished-save",
    "foreign-optimizer": "foreign-masters",
    "mixed-iterations": "mixed-save",
}

Progress = Callable[[int], None]
_OpenGroup = tuple[RowGroup, list[ShardReader]]


@dataclass(slots=True, kw_only=True)
class ScanPlan:
    """How saves are read: threads (None: one per core), `quick` without the data."""

    threads: int | None = None
    is_quick: bool = False
    progress: Progress = lambda num_bytes: None


def scan_save(save: RunSave, settings: ScanPlan) -> SaveFacts:
    """Read a save, and keep what an audit needs of it.

    What is wrong with it is in the `problems` of the result: it is no error.
    """
    facts = SaveFacts(step=save.step, path=str(save.path))
    if save.unread:
        facts.notes.append(f"not read: {listed(save.unread)}")
    try:
        catalogue = open_checkpoint(save.path)
        facts.format = catalogue.format
        facts.layout = read_source_layout(catalogue)
        facts.total_bytes = sum(f.size for f in catalogue.files)
        facts.training = read_training_facts(catalogue)
        facts.stored = {t.name: (t.packing or t.dtype.name, t.shape) for t in catalogue.tensors}
        facts.is_open = True
        scan = _Scan(catalogue, facts, settings)
        scan.run()
        for module, text in find_scale_faults(scan.model_space, save.path):
            facts.problems.append(("fp8-scale", module, text))
        catalogue.check_unchanged()
    except MegtoolError as e:
        if not facts.is_open and _is_unknown_kind(e):
            facts.unknown_kind = _problem(e)
        else:
            facts.problems.append(_problem(e))
    return facts


def _is_unknown_kind(error: MegtoolError) -> bool:
    """Return whether megtool cannot read the kind, which says nothing against the save."""
    return (
        isinstance(error, MissingPackageError)
        or error.id == "not-a-checkpoint"
        or error.id.startswith("unsupported")
    )


def _problem(error: MegtoolError) -> tuple[str, str, str]:
    rule = _RULES.get(error.id, "unreadable-save")
    if error.id == "coverage":
        rule = "missing-shard"
    where = error.tensor or (location(error.file).name if error.file else "")
    return rule, where, error.message


class _Scan:
    """The reading of one save."""

    def __init__(self, catalogue: Catalogue, facts: SaveFacts, settings: ScanPlan) -> None:
        self.raw = self.model_space = catalogue
        self.facts, self.settings = facts, settings
        self.threads = default_threads(settings.threads, catalogue.root)
        self.lock = threading.Lock()
        self.local = threading.local()
        self.alive: dict[str, NDArray[np.bool_]] = {}
        self.elements: dict[str, int] = defaultdict(int)

    def run(self) -> None:
        """Open the tensors as those of the model, then read, or take the checksums of headers."""
        root = self.raw.root
        sidecar = read_sidecar(root / SIDECAR) if root.is_dir() else None
        catalogue = self.model_space = self._in_model_space()
        ranges = self._zip_ranges()
        if self.settings.is_quick:
            self._take_checksums(catalogue, ranges, sidecar)
            return
        if sidecar is not None:
            ranges += self._check_small_files(sidecar, ranges)
        index = _RangeIndex(ranges)
        tensors = sum(t.packing is None for t in catalogue.tensors)
        size = next(side for most, side in SKETCH_SIZES if tensors <= most)
        with CheckpointReader(catalogue, Files()) as reader, ReadAhead() as self.ahead:
            self.reader, self.index, self.sketch_size = reader, index, size
            self.check = PairCheck.of(self.facts.training)
            groups = self._open_groups(group_rows(catalogue))
            for _ in stream_in_threads(self._read_group, groups, threads=self.threads, ahead=64):
                pass
            self._finish_tensors()
            self._check_ranges(ranges)

    def _in_model_space(self) -> Catalogue:
        """The catalogue with optimizer state in buckets taken apart, where that is possible."""
        try:
            model = identify_model(self.raw, None, None)
        except MegtoolError:
            model = None
        try:
            return to_model_space(self.raw, model.config if model else None)
        except FormatError as e:
            if e.id == "foreign-optimizer":
                self.facts.problems.append(_problem(e))
            else:
                self.facts.notes.append(f"optimizer state stays in its buckets: {e.message}")
        except MegtoolError as e:
            self.facts.notes.append(f"optimizer state stays in its buckets: {e.message}")
        return self.raw

    def _zip_ranges(self) -> list[ByteRange]:
        """The data of torch.save's containers, with their checksums."""
        ranges: list[ByteRange] = []
        extents, raw = self.raw.extents, self.raw
        by_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
        if extents.contained:
            regions = zip(
                extents.file.tolist(), extents.offset.tolist(), extents.length.tolist(), strict=True
            )
            for file, offset, length in regions:
                by_file[file].append((offset, length))
        else:
            for number, stored in enumerate(raw.files):
                if stored.path.endswith(_ZIPPED):
                    by_file[number].append((0, stored.size))
        files = Files()

        def open_file(number: int) -> list[ByteRange]:
            path = raw.path(number)
            fd = files.open_read(path)
            try:
                regions = sorted(set(by_file[number]))
                files.prefetch_open(fd, [(a, min(a + 1024, a + n)) for a, n in regions])
                return [r for offset, n in regions for r in zip_ranges(fd, path, offset, n)]
            finally:
                files.close(fd)

        for found_ranges in stream_in_threads(open_file, sorted(by_file), threads=self.threads):
            ranges += found_ranges
        return ranges

    def _check_small_files(self, sidecar: Sidecar, ranges: Sequence[ByteRange]) -> list[ByteRange]:
        """Compare files without tensors with their digests. What is read anyway are ranges: stored
        tensors with a digest of their own, or files, unless their containers have checksums."""
        root = self.raw.root
        own = {f.path for f in self.raw.files}
        zipped = {r.path for r in ranges}
        small = {n: d for n, d in sidecar.files.items() if n not in own}
        for mismatch in check_files(root, small, threads=self.threads):
            self.facts.problems.append(("flipped-bits", mismatch.file, mismatch.reason))
        tensors = [
            ByteRange(
                path=root / digest.file,
                start=digest.begin,
                size=digest.size,
                expected=digest.crc32c,
                kind=CRC32C,
                label=name,
            )
            for name, digest in sidecar.stored_tensors.items()
            if digest.size and root / digest.file not in zipped
        ]
        zipped |= {r.path for r in tensors}
        return tensors + [
            ByteRange(
                path=root / name,
                start=0,
                size=digest.size,
                expected=digest.crc32c,
                kind=CRC32C,
                label=name,
            )
            for name, digest in sidecar.files.items()
            if name in own and root / name not in zipped
        ]

    def _take_checksums(
        self, catalogue: Catalogue, ranges: Sequence[ByteRange], sidecar: Sidecar | None
    ) -> None:
        """Digests of tensors without their data: from the sidecar, or from zip directories."""
        known: dict[tuple[str, str], int] = {}
        if sidecar is not None:
            for name, digest in sidecar.tensors.items():
                state, _, key = name.rpartition(":")
                known[state, key] = digest.crc32c
            for name, digest in sidecar.stored_tensors.items():
                state, _, key = split_state(name)
                known[state, key] = digest.crc32c
        if not known and ranges:
            by_start = {(r.path, r.start): r.expected for r in ranges}
            locator = ShardLocator(self.raw)
            for group in group_rows(self.raw):
                for row in group.rows:
                    (offset,) = locator.offsets(np.array([row.shard], np.int64)).tolist()
                    path = self.raw.path(int(self.raw.extents.file[row.shard]))
                    crc = by_start.get((path, offset)) if not row.skip else None
                    if crc is not None:
                        self._add_tensor(group.name, row, ElementSums(), crc, path)
            self._finish_tensors()
            return
        for (state, key), crc in known.items():
            self.facts.tensors[f"{state}:{key}" if state else key] = TensorFacts(
                name=key, state=state, dtype="", num_elements=0, sums=ElementSums(), digest=crc
            )
        if not known:
            self.facts.notes.append("no checksums in its headers: tensors are not compared")

    def _open_groups(self, groups: Iterable[RowGroup]) -> Iterator[_OpenGroup]:
        """Open the shards of groups, a few groups before they are read."""
        waiting: deque[_OpenGroup] = deque()
        for group in groups:
            readers = [ShardReader(self.reader, row, self.sketch_size) for row in group.rows]
            for reader in readers:
                reader.range = self.index.find(reader.path, reader.offset, reader.num_bytes)
            self.ahead.plan(readers, self._step(group))
            waiting.append((group, readers))
            if len(waiting) > _GROUPS_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _step(self, group: RowGroup) -> int:
        """How many rows of its shards are read at once."""
        return rows_at_once(group.rows[0].width, self.sketch_size)

    def _read_group(self, opened: _OpenGroup) -> None:
        """Read shards of the same box side by side, a few rows at a time."""
        group, readers = opened
        if not hasattr(self.local, "workspace"):
            self.local.workspace, self.local.buffers = Workspace(), {}
        for reader in readers:
            reader.begin(self.local.workspace)
        num_rows, step = group.rows[0].num_rows, self._step(group)
        pair = PairFacts()
        try:
            for start in range(0, num_rows, step):
                count = min(step, num_rows - start)
                self.ahead.take(sum(r.bytes_of(count) for r in readers))
                chunks = [
                    (r.row.state, r.read(start, count, self._buffer(n)), r.kind)
                    for n, r in enumerate(readers)
                ]
                self.check.add(pair, chunks, self.local.workspace)
        finally:
            for reader in readers:
                reader.close()
        with self.lock:
            for reader in readers:
                digest = reader.finish()
                if reader.range is not None:
                    stored = self.reader.catalogue.tensors[reader.row.tensor].name
                    self.index.names.setdefault(id(reader.range), stored)
                self.facts.read_bytes += reader.num_bytes
                self._add_tensor(group.name, reader.row, reader.collector.sums, digest, reader.path)
                if reader.alive is not None:
                    self._add_alive(group.name, reader.row, reader.alive)
            if pair.compared_masters or pair.compared_moments:
                self.facts.pairs.setdefault(group.name, PairFacts()).merge(pair)
        self.settings.progress(sum(r.num_bytes for r in readers))

    def _buffer(self, number: int) -> bytearray:
        buffers: dict[int, bytearray] = self.local.buffers
        return buffers.setdefault(number, bytearray())

    def _add_tensor(
        self, name: str, row: ShardRow, sums: ElementSums, digest: int, path: Path
    ) -> None:
        stored = self.reader_catalogue.tensors[row.tensor]
        key = f"{row.state}:{name}" if row.state else name
        tensor = self.facts.tensors.get(key)
        if tensor is None:
            tensor = self.facts.tensors[key] = TensorFacts(
                name=name,
                state=row.state,
                dtype=stored.dtype.name,
                num_elements=int(np.prod(row.shape, dtype=np.int64)),
                sums=ElementSums(),
            )
        tensor.sums.merge(sums)
        box = ",".join(f"{a}:{b}" for a, b in zip(row.lo, row.hi, strict=True))
        tensor.shards[path.name, box] = digest
        self.elements[key] += int(
            np.prod([b - a for a, b in zip(row.lo, row.hi, strict=True)], dtype=np.int64)
        )

    @property
    def reader_catalogue(self) -> Catalogue:
        """The catalogue that rows count into."""
        reader: CheckpointReader | None = getattr(self, "reader", None)
        return reader.catalogue if reader is not None else self.raw

    def _add_alive(self, name: str, row: ShardRow, alive: NDArray[np.bool_]) -> None:
        """Note which rows of a weight are not all zeros."""
        first = row.first_row()
        if row.state or first is None:
            return
        total = int(np.prod(row.shape[:-1], dtype=np.int64))
        rows = self.alive.setdefault(name, np.zeros(total, bool))
        rows[first : first + len(alive)] |= alive

    def _finish_tensors(self) -> None:
        for key, tensor in self.facts.tensors.items():
            if self.elements[key] == tensor.num_elements and tensor.num_elements:
                lines = sorted(f"{box} {crc}" for (_, box), crc in tensor.shards.items())
                tensor.digest = zlib.crc32("\n".join(lines).encode()) | len(lines) << 32
            rows = self.alive.get(tensor.name) if not tensor.state else None
            if rows is not None:
                tensor.num_rows, tensor.dead_rows = len(rows), int((~rows).sum())
        self.facts.sort()

    def _check_ranges(self, ranges: Sequence[ByteRange]) -> None:
        """Compare the checksums of all ranges of which something was read."""
        opened = self.reader.open_files
        for item in ranges:
            if not item.pieces:
                continue
            with opened.use(item.path) as fd:
                if not item.complete(lambda start, n, fd=fd: read_bytes(fd, start, n)):  # type: ignore[misc]
                    label = item.label or self.index.names.get(id(item), "")
                    text = f"bytes {item.start}+{item.size} of {item.path.name} are not those saved"
                    self.facts.problems.append(("flipped-bits", label or item.path.name, text))


class _RangeIndex:
    """Finds the range that bytes of a file are in; notes whose bytes those are."""

    def __init__(self, ranges: Iterable[ByteRange]) -> None:
        self._by_file: dict[Path, list[ByteRange]] = defaultdict(list)
        self.names: dict[int, str] = {}
        for item in ranges:
            self._by_file[item.path].append(item)
        for items in self._by_file.values():
            items.sort(key=lambda r: r.start)
        self._starts = {
            path: np.array([r.start for r in items], np.int64)
            for path, items in self._by_file.items()
        }

    def find(self, path: Path, offset: int, num_bytes: int) -> ByteRange | None:
        """The range with these bytes."""
        starts = self._starts.get(path)
        if starts is None:
            return None
        item = self._by_file[path][int(np.searchsorted(starts, offset, "right")) - 1]
        inside = item.start <= offset and offset + num_bytes <= item.start + item.size
        return item if inside else None
