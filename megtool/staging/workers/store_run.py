"""A run of workers at a prefix of a store that they write together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megtool.digests.files import FileDigests
from megtool.errors import DestinationError, FormatError, MegtoolError
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.destination.store_check import (
    check_surroundings,
    exists,
    find_live_run,
)
from megtool.staging.manifest import (
    PUBLISH_LOCK,
    PUBLISHED,
    Manifest,
    clean_command,
    is_running_already,
    worker_file,
)
from megtool.staging.publication import LEASE, RUN, Publication
from megtool.staging.record import WorkerRecord, encode_record, parse_record_of
from megtool.staging.store.journal import StoreJournal
from megtool.staging.store.place import JOURNAL, StorePlace
from megtool.storage.location.path import StorePath
from megtool.storage.objects.lease import Lease
from megtool.storage.objects.open_objects import REQUEST_BYTES
from megtool.storage.objects.probe import probe_store
from megtool.storage.objects.small_object import read_json, read_object
from megtool.storage.objects.writer import ObjectWriter
from megtool.storage.stores.protocol import ConditionError, ObjectInfo, ObjectMissingError
from megtool.storage.stores.read_pool import read_pool

FRAGMENTS = "fragments"

_AHEAD_BYTES = 64 << 20
"""About the most bytes of fragments that are read at a time."""


class StoreRun:
    """See `SharedRun`: the staging prefix of several workers.

    All share `run` and the uploads of files, which the first that needs one begins. Each has its
    own lock and journal. Parts that a worker has filled in part are `fragments/FILE/PART-WORKER`
    when it signs off, with a list of all its parts; the one that publishes puts fragments together.
    Of a committed run `published` stays, for workers that are started later.
    """

    is_repeated = False  # what an interrupted publication wrote has the same bytes
    rewrites_data = False
    has_all_digests = True

    def __init__(self, place: StorePlace, worker: WorkerIdentity) -> None:
        self.place, self.worker = place, worker
        self.record: WorkerRecord | None = None
        self.is_published = False
        self.publisher: int | None = None  # not known: the lease of the publication names no worker
        self._manifest = Manifest(fingerprint=place.fingerprint, count=worker.count)
        self._fragments: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._places: set[tuple[int, int]] = set()
        self._reader = _FragmentReader(place.staging, ())
        place.run, place.add_fragments = self, self._add_fragments

    # ---- entering

    def check(self) -> None:
        if not self.is_complete():
            self.place.check()

    def enter(self) -> None:
        place = self.place
        check_surroundings(place.destination, place.sources)
        self.is_published = self.is_complete()
        if self.is_published:
            self._remove_left_overs()
            return
        try:
            if not read_json(place.staged_path(RUN)) and not self.is_complete():
                self._check_free()
            self._take_place()
            place.messages += probe_store(place.staging, is_unsafe=place.is_unsafe)
            self._join()
            if self.is_published:
                place.release()
                return
            place.begin_staging()
        except BaseException:
            with contextlib.suppress(MegtoolError):
                place.release()
            raise

    def _check_free(self) -> None:
        """Refuse to replace what exists, unless it is of a run that has begun just now."""
        try:
            self.place.check_free()
        except DestinationError:
            if not read_json(self.place.staged_path(RUN)) and not self.is_complete():
                raise

    def is_complete(self) -> bool:
        values = read_json(self.place.staged_path(PUBLISHED))
        if values.get("identity") != self.place.identity() or not exists(self.place.destination):
            return False
        publication = Publication(self.place.destination)
        publication.read()
        if publication.state not in ("", "complete"):
            return False
        return not self.place.overwrite or values.get("objects") == self._describe_objects()

    def _describe_objects(self) -> str:
        """What tells whether the destination is as it was published, by what the store lists."""
        infos = list(self.place.store.list(self.place.destination.key, recursive=True).objects)
        if (info := self.place.store.head(self.place.destination.key)) is not None:
            infos.append(info)
        lines = sorted(f"{info.key} {info.size} {info.version}" for info in infos)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _remove_left_overs(self) -> None:
        """Remove what a publisher has left that was stopped after its commit."""
        self.place.trace = PUBLISHED
        listing = self.place.store.list(self.place.staging.key, recursive=True)
        keys = [info.key for info in listing.objects]
        if keys == [self.place.staged_path(PUBLISHED).key] or find_live_run(self.place.staging):
            return
        with contextlib.suppress(MegtoolError):
            self.place.publish_lease = Lease(self.place.staged_path(PUBLISH_LOCK))
            self.place.abort_uploads()
            self.place.store.delete([self.place.staged_path(LEASE).key])
            self.place.remove_notes()
        self.unlock_publication()

    def _take_place(self) -> None:
        path = self.place.staged_path(worker_file(self.worker.index, "lock"))
        try:
            self.place.lease = Lease(path)
        except DestinationError as e:
            raise is_running_already(self.worker, path, e) from e

    def _join(self) -> None:
        """Begin the run, or join it.

        Raises:
            DestinationError: another run has left its work.
        """
        path, identity = self.place.staged_path(RUN), self.place.identity()
        run = read_json(path)
        if not run:
            self.is_published = self.is_complete()  # and its notes were removed just now
            if self.is_published:
                return
            run = self._begin_run()
        existing = Manifest(
            fingerprint=str(run.get("identity", "")), count=int(run.get("count", 1))
        )
        replace(self._manifest, fingerprint=identity).check(existing, self.place.staging)
        self.place.replaces = bool(run["replaces"])
        self.place.publication.read()
        self.record = self.read_record(self.worker.index)
        folder = self.place.staged_path(f"{JOURNAL}-{self.worker.index}")
        self.place.journal = StoreJournal(folder, identity)
        self.place.earlier.read_ids()
        if self.record is None:
            self.place.records = {r.unit: r for r in self.place.journal.read()}
            self.place.earlier.note(self.place.records.values())

    def _begin_run(self) -> dict[str, Any]:
        """Begin a run, unless another worker does so at the same time; returns what it is.

        Raises:
            DestinationError: the destination is not free.
        """
        path = self.place.staged_path(RUN)
        try:
            replaces = self.place.check_free()
            self.place.store.delete([self.place.staged_path(PUBLISHED).key])
            self.place.publication.read()
            if run := read_json(path):  # what this one has announced stands
                return run
            replaces = self.place.publication.reset() or replaces
        except DestinationError:
            if run := read_json(path):  # its objects, or its announcement
                return run
            raise
        run = {"identity": self.place.identity(), "replaces": replaces, "count": self.worker.count}
        try:
            self.place.store.put(path.key, json.dumps(run).encode(), create=True)
        except ConditionError:
            run = read_json(path)
        return run

    def read_record(self, index: int) -> WorkerRecord | None:
        path = self.place.staged_path(worker_file(index, "record"))
        data = read_object(path)
        return None if data is None else parse_record_of(self._manifest, index, data, path)

    # ---- the end of a share

    def sign_off(self, record: WorkerRecord, paths: Sequence[Path], *, fsync: bool) -> None:
        """See `SharedRun`: what is not uploaded becomes fragments.

        Raises:
            StorageError: the store refused.
        """
        own: list[list[Any]] = []
        for writer in self.place.writers:
            number = self.place.numbers[writer.path]
            for part, ranges, data in writer.export_parts():
                name = f"{FRAGMENTS}/{number}/{part}-{self.worker.index}"
                whole = json.dumps({"ranges": ranges}).encode() + b"\n" + data
                self.place.transfers.run(len(whole), partial(self._put, name, whole))
                own.append([number, part, name, ""])
        self.place.transfers.settle()
        for writer in self.place.writers:
            number, parts = self.place.numbers[writer.path], range(len(writer.layout))
            version = "" if writer.completed is None else writer.completed.version
            own += [[number, part, "", version] for part in parts if writer.is_uploaded(part)]
        self.place.require_journal().flush()
        index = self.worker.index
        parts_key = self.place.staged_path(f"worker-{index}.parts").key
        self.place.store.put(parts_key, json.dumps({"parts": own}).encode())
        record_key = self.place.staged_path(worker_file(index, "record")).key
        self.place.store.put(record_key, encode_record(record))
        self.record = record
        self.place.forget_writers()

    def _put(self, name: str, data: bytes) -> None:
        self.place.store.put(self.place.staged_path(name).key, data)

    def check_files(self, record: WorkerRecord, sizes: Mapping[str, int]) -> None:
        """See `SharedRun`: parts are compared with the store's lists when files are opened."""

    def names(self) -> list[str]:
        place = self.place
        return [info.key.rpartition("/")[2] for info in place.store.list(place.staging.key).objects]

    # ---- publication

    def lock_publication(self) -> bool:
        try:
            self.place.publish_lease = Lease(self.place.staged_path(PUBLISH_LOCK))
        except DestinationError:
            return False
        return True

    def claim_publication(self) -> bool:
        """See `SharedRun`: the lease is a claim."""
        return True

    def begin_publication(self) -> None:
        place = self.place
        place.earlier.clear()
        place.earlier.read_ids()
        place.publication.read()
        for index in range(self.worker.count):
            self._read_parts(index)
        names = [name for _, of in sorted(self._fragments.items()) for _, name in of]
        self._reader = _FragmentReader(place.staging, names)
        place.digests = FileDigests()
        place.files.recorder = place.digests

    def _read_parts(self, index: int) -> None:
        values = read_json(self.place.staged_path(f"worker-{index}.parts"))
        for number, part, name, version in values.get("parts", ()):
            if name:
                self._fragments[number].append((part, name))
                continue
            self._places.add((number, part))
            if version:
                self.place.earlier.versions[number] = version

    def _add_fragments(self, writer: ObjectWriter, number: int) -> None:
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
            most = _AHEAD_BYTES // (last - first) if self.place.transfers.is_parallel else 1
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
            f"{clean_command(self.place.staging)}",
        )

    def leave_trace(self) -> None:
        values = {"identity": self.place.identity(), "objects": self._describe_objects()}
        data = json.dumps(values).encode()
        self.place.store.put(self.place.staged_path(PUBLISHED).key, data)
        self.place.trace = PUBLISHED

    # ---- leaving

    def leave(self, *, is_failed: bool) -> None:
        place = self.place
        place.transfers.close()
        if is_failed and self.record is None and place.has_progress:
            place.messages.append(place.describe_resume())
        try:
            if place.journal is not None:
                place.journal.flush()
        finally:
            place.release()

    def describe_resume(self) -> str:
        return self.place.describe_resume()

    def release(self) -> None:
        self.unlock_publication()

    def unlock_publication(self) -> None:
        lease, self.place.publish_lease = self.place.publish_lease, None
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
