"""The stage of a checkpoint in a store that several workers write together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from megtool.digests.files import FileDigests
from megtool.errors import DestinationError, FormatError, MegtoolError
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.destination.store_check import (
    check_free,
    check_surroundings,
    exists,
    find_live_run,
)
from megtool.staging.manifest import (
    PUBLISH_LOCK,
    PUBLISHED,
    Manifest,
    clean_command,
    find_missing_workers,
    is_running_already,
    worker_file,
)
from megtool.staging.publication import LEASE, RUN, Publication
from megtool.staging.store.journal import StoreJournal
from megtool.staging.store.stage import JOURNAL, StoreStage
from megtool.staging.workers.record import WorkerRecord, encode_record, parse_record_of
from megtool.storage.location.path import StorePath
from megtool.storage.objects.index import store_index
from megtool.storage.objects.lease import Lease
from megtool.storage.objects.open_objects import REQUEST_BYTES, open_objects
from megtool.storage.objects.part_buffers import PartBuffers
from megtool.storage.objects.probe import probe_store
from megtool.storage.objects.small_object import read_json, read_object
from megtool.storage.objects.writer import ObjectWriter
from megtool.storage.stores.protocol import ConditionError, ObjectInfo, ObjectMissingError
from megtool.storage.stores.read_pool import read_pool

FRAGMENTS = "fragments"

_AHEAD_BYTES = 64 << 20
"""About the most bytes of fragments that are read at a time."""


class SharedStoreStage(StoreStage):
    """The stage of one worker of several: see `SharedStage`.

    All share `run` and the uploads of files, which the first that needs one begins. Each has its
    own lock and journal. Parts that a worker has filled in part are `fragments/FILE/PART-WORKER`
    when it signs off, with a list of all its parts; the one that publishes puts fragments together.
    Of a committed run `published` stays, for workers that are started later.
    """

    is_repeated = False  # what an interrupted publication wrote has the same bytes
    rewrites_data = False
    has_all_digests = True

    def __init__(self, *args: Any, worker: WorkerIdentity, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.worker = worker
        self._manifest = Manifest(fingerprint=self._fingerprint, count=worker.count)
        self.record: WorkerRecord | None = None
        self.is_published = False
        self.publisher: int | None = None  # not known: the lease of the publication names no worker
        self._publish_lease: Lease | None = None
        self._fragments: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._places: set[tuple[int, int]] = set()
        self._reader = _FragmentReader(self.staging, ())

    @property
    def _is_publisher(self) -> bool:
        return self._publish_lease is not None

    # ---- entering

    def check(self) -> None:
        """See `CheckpointStage`; a destination that workers have completed passes."""
        if not self._find_published():
            super().check()

    def __enter__(self) -> SharedStoreStage:
        check_surroundings(self.destination, self._sources)
        self.is_published = self._find_published()
        if self.is_published:
            self._remove_left_overs()
            return self
        try:
            if not read_json(self._staged_path(RUN)) and not self._find_published():
                self._check_free()
            self._take_place()
            self.messages += probe_store(self.staging, is_unsafe=self._is_unsafe)
            self._join()
            if self.is_published:
                self._release()
                return self
            self._staged = store_index().stage(self.destination)
        except BaseException:
            with contextlib.suppress(MegtoolError):
                self._release()
            raise
        self.files.recorder = self.digests
        self.digests.observer = self._note_section
        return self

    def _check_free(self) -> None:
        """Refuse to replace what exists, unless it is of a run that has begun just now."""
        try:
            check_free(self.destination, is_file=self.is_file, overwrite=self._overwrite)
        except DestinationError:
            if not read_json(self._staged_path(RUN)) and not self._find_published():
                raise

    def _find_published(self) -> bool:
        values = read_json(self._staged_path(PUBLISHED))
        if values.get("identity") != self._identity() or not exists(self.destination):
            return False
        publication = Publication(self.destination)
        publication.read()
        if publication.state not in ("", "complete"):
            return False
        return not self._overwrite or values.get("objects") == self._describe_objects()

    def _describe_objects(self) -> str:
        """What tells whether the destination is as it was published, by what the store lists."""
        infos = list(self._store.list(self.destination.key, recursive=True).objects)
        if (info := self._store.head(self.destination.key)) is not None:
            infos.append(info)
        lines = sorted(f"{info.key} {info.size} {info.version}" for info in infos)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _remove_left_overs(self) -> None:
        """Remove what a publisher has left that was stopped after its commit."""
        self._trace = PUBLISHED
        listing = self._store.list(self.staging.key, recursive=True)
        keys = [info.key for info in listing.objects]
        if keys == [self._staged_path(PUBLISHED).key] or find_live_run(self.staging):
            return
        with contextlib.suppress(MegtoolError):
            self._publish_lease = Lease(self._staged_path(PUBLISH_LOCK))
            self._abort_uploads()
            self._store.delete([self._staged_path(LEASE).key])
            self._remove_notes()
        self._release_publication()

    def _take_place(self) -> None:
        path = self._staged_path(worker_file(self.worker.index, "lock"))
        try:
            self._lease = Lease(path)
        except DestinationError as e:
            raise is_running_already(self.worker, path, e) from e

    def _join(self) -> None:
        """Begin the run, or join it.

        Raises:
            DestinationError: another run has left its work.
        """
        path, identity = self._staged_path(RUN), self._identity()
        run = read_json(path)
        if not run:
            self.is_published = self._find_published()  # and its notes were removed just now
            if self.is_published:
                return
            run = self._begin_run()
        existing = Manifest(
            fingerprint=str(run.get("identity", "")), count=int(run.get("count", 1))
        )
        replace(self._manifest, fingerprint=identity).check(existing, self.staging)
        self._replaces = bool(run["replaces"])
        self._publication.read()
        self.record = self._read_record(self.worker.index)
        folder = self._staged_path(f"{JOURNAL}-{self.worker.index}")
        self._journal = StoreJournal(folder, identity)
        self._earlier.read_ids()
        if self.record is None:
            self._records = {r.unit: r for r in self._journal.read()}
            self._earlier.note(self._records.values())

    def _begin_run(self) -> dict[str, Any]:
        """Begin a run, unless another worker does so at the same time; returns what it is.

        Raises:
            DestinationError: the destination is not free.
        """
        path = self._staged_path(RUN)
        try:
            replaces = check_free(self.destination, is_file=self.is_file, overwrite=self._overwrite)
            self._store.delete([self._staged_path(PUBLISHED).key])
            self._publication.read()
            if run := read_json(path):  # what this one has announced stands
                return run
            replaces = self._publication.reset() or replaces
        except DestinationError:
            if run := read_json(path):  # its objects, or its announcement
                return run
            raise
        run = {"identity": self._identity(), "replaces": replaces, "count": self.worker.count}
        try:
            self._store.put(path.key, json.dumps(run).encode(), create=True)
        except ConditionError:
            run = read_json(path)
        return run

    def _read_record(self, index: int) -> WorkerRecord | None:
        path = self._staged_path(worker_file(index, "record"))
        data = read_object(path)
        return None if data is None else parse_record_of(self._manifest, index, data, path)

    # ---- the end of a share

    def sign_off(self, record: WorkerRecord, paths: Sequence[Path], *, fsync: bool) -> None:
        """See `SharedStage`: what is not uploaded becomes fragments.

        Raises:
            StorageError: the store refused.
        """
        own: list[list[Any]] = []
        for writer in self._writers:
            number = self._numbers[writer.path]
            for part, ranges, data in writer.export_parts():
                name = f"{FRAGMENTS}/{number}/{part}-{self.worker.index}"
                whole = json.dumps({"ranges": ranges}).encode() + b"\n" + data
                self._transfers.run(len(whole), partial(self._put, name, whole))
                own.append([number, part, name, ""])
        self._transfers.settle()
        for writer in self._writers:
            number, parts = self._numbers[writer.path], range(len(writer.layout))
            version = "" if writer.completed is None else writer.completed.version
            own += [[number, part, "", version] for part in parts if writer.is_uploaded(part)]
        self._require_journal().flush()
        index = self.worker.index
        parts_key = self._staged_path(f"worker-{index}.parts").key
        self._store.put(parts_key, json.dumps({"parts": own}).encode())
        record_key = self._staged_path(worker_file(index, "record")).key
        self._store.put(record_key, encode_record(record))
        self.record = record
        self._forget_writers()

    def _put(self, name: str, data: bytes) -> None:
        self._store.put(self._staged_path(name).key, data)

    def _forget_writers(self) -> None:
        """Begin anew: as the one that publishes, a worker opens all files."""
        self.files.recorder = None
        for writer in self._writers:
            open_objects().construct(writer.path, None)
        self._writers, self._numbers, self._by_number, self._records = [], {}, {}, {}
        self._buffers.close()
        self._buffers = PartBuffers()

    def check_files(self, record: WorkerRecord, sizes: Mapping[str, int]) -> None:
        """See `SharedStage`: parts are compared with the store's lists when files are opened."""

    def find_missing(self) -> list[int]:
        """See `SharedStage`."""
        names = [info.key.rpartition("/")[2] for info in self._store.list(self.staging.key).objects]
        return find_missing_workers(names, self.worker.count)

    # ---- publication

    def begin_publication(self) -> list[WorkerRecord] | None:
        """See `SharedStage`.

        Raises:
            FormatError: a record is damaged, or of another run.
        """
        if self.find_missing():
            self.is_published = self._find_published()
            return None
        try:
            self._publish_lease = Lease(self._staged_path(PUBLISH_LOCK))
        except DestinationError:
            self.is_published = self._find_published()
            return None
        if self.find_missing() or self._find_published():
            self.is_published = self._find_published()
            self._release_publication()
            return None
        read = map(self._read_record, range(self.worker.count))
        records = [record for record in read if record is not None]
        if len(records) < self.worker.count:  # another that had stalled has just published
            self.is_published = self._find_published()
            self._release_publication()
            return None
        self._earlier.clear()
        self._earlier.read_ids()
        self._publication.read()
        for index in range(self.worker.count):
            self._read_parts(index)
        names = [name for _, of in sorted(self._fragments.items()) for _, name in of]
        self._reader = _FragmentReader(self.staging, names)
        self.digests = FileDigests()
        self.files.recorder = self.digests
        return records

    def _read_parts(self, index: int) -> None:
        values = read_json(self._staged_path(f"worker-{index}.parts"))
        for number, part, name, version in values.get("parts", ()):
            if name:
                self._fragments[number].append((part, name))
                continue
            self._places.add((number, part))
            if version:
                self._earlier.versions[number] = version

    def _fill(self, writer: ObjectWriter, number: int) -> None:
        """Add the fragments of an object, and check that no part is lost.

        Raises:
            FormatError: one is.
        """
        for file, part in self._places:
            if file == number and not writer.is_uploaded(part):
                raise self._lost(writer, f"part {part + 1}")
        for part, name in self._fragments.get(number, ()):
            if writer.is_uploaded(part):
                continue  # by a publication that was interrupted
            first, last = writer.layout.bounds(part)
            most = _AHEAD_BYTES // (last - first) if self._transfers.is_parallel else 1
            whole = self._reader.read(name, most=max(1, most))
            if whole is None:
                raise self._lost(writer, f"the fragment {name}")
            head, _, data = whole.partition(b"\n")
            ranges = [(int(a), int(b)) for a, b in json.loads(head)["ranges"]]
            if data and sum(b - a for a, b in ranges) != len(data):
                raise self._lost(writer, f"bytes of the fragment {name}")
            writer.import_part(part, ranges, data)

    def _lost(self, writer: ObjectWriter, what: str) -> FormatError:
        return FormatError(
            f"a worker has written {what}, and the store does not have it any more",
            file=writer.path,
            hint="another program has removed or replaced it: start again after "
            f"{clean_command(self.staging)}",
        )

    def follow(self, context: Any) -> Container[int]:
        """See `CheckpointStage`; the one that publishes has the records of all instead."""
        return () if self._is_publisher else super().follow(context)

    def finish(self, unit: int, note: str = "") -> None:
        """See `CheckpointStage`; units of the one that publishes are not recorded."""
        if not self._is_publisher:
            super().finish(unit, note)

    def _check_publication(self) -> None:
        """See `StoreStage`; one that was out of touch for so long that another published stops."""
        if self._publish_lease is not None:
            self._publish_lease.check()

    def _begin_publishing(self) -> None:
        """See `StoreStage`; nothing is announced by one that does not publish any more."""
        if self._publication.state in ("", "removing"):
            self._check_publication()
        super()._begin_publishing()

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """See `CheckpointStage`; a trace stays for workers that are late."""
        if not self._is_publisher:
            raise RuntimeError("only the worker that publishes commits")
        super().commit(fsync=fsync, threads=threads)
        self.is_published = True

    def _leave_trace(self) -> None:
        values = {"identity": self._identity(), "objects": self._describe_objects()}
        data = json.dumps(values).encode()
        self._store.put(self._staged_path(PUBLISHED).key, data)
        self._trace = PUBLISHED

    def discard(self) -> None:
        """See `CheckpointStage`.

        Raises:
            RuntimeError: this worker does not publish, so others may be at work.
        """
        if not self._is_publisher:
            raise RuntimeError("only the worker that publishes discards the work of all")
        super().discard()

    # ---- leaving

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._committed:
            return
        self._transfers.close()
        if error is not None and self.record is None and any(w.num_uploaded for w in self._writers):
            self.messages.append(self.describe_resume())
        with contextlib.suppress(*[MegtoolError] if error else []):
            if self._journal is not None:
                self._journal.flush()
        with contextlib.suppress(*[MegtoolError] if error else []):
            self._release()

    def _release(self) -> None:
        try:
            self._release_publication()
        finally:
            super()._release()

    def _release_publication(self) -> None:
        lease, self._publish_lease = self._publish_lease, None
        if lease is not None:
            lease.release()


class _FragmentReader:
    """Reads fragments, several at a time, in the order in which they are needed."""

    def __init__(self, staging: StorePath, names: Iterable[str]) -> None:
        self._staging = staging
        self._next = deque(names)
        self._ahead: dict[str, bytes | None] = {}
        self._mutex = threading.Lock()

    def read(self, name: str, *, most: int) -> bytes | None:
        """A fragment, or None if the store has none; with it at most `most` are read.

        Raises:
            StorageError: the store refused.
        """
        with self._mutex:
            if name not in self._ahead:
                while self._next and self._next.popleft() != name:
                    pass  # uploaded by a publication that was interrupted
                names = [name] + [
                    self._next.popleft() for _ in range(min(most - 1, len(self._next)))
                ]
                read_pool().run([partial(self._fetch, name) for name in names])
            return self._ahead.pop(name)

    def _fetch(self, name: str) -> None:
        path = self._staging / name
        info = path.store.head(path.key)
        self._ahead[name] = None if info is None else _read_in_parallel(path, info)


def _read_in_parallel(path: StorePath, info: ObjectInfo) -> bytes | None:
    """All bytes of an object, by several requests at a time; None if it is gone meanwhile."""
    data = bytearray(info.size)

    def read(begin: int) -> None:
        end = min(begin + REQUEST_BYTES, info.size)
        data[begin:end] = path.store.read(path.key, begin, end - begin, version=info.version)

    try:
        if data:
            read_pool().run([partial(read, n) for n in range(0, info.size, REQUEST_BYTES)])
    except (ConditionError, ObjectMissingError):
        return None
    return bytes(data)
