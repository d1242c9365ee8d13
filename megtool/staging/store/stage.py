"""A checkpoint under construction in an object store, the counterpart of `StagingFolder`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from megtool.console import several
from megtool.digests.crc32c import Sidecar
from megtool.digests.files import FileDigests
from megtool.errors import (
    MegtoolError,
    SourceChangedError,
    StorageError,
)
from megtool.process.threads import map_in_threads
from megtool.staging.destination.store_check import check_free, check_surroundings, has_objects
from megtool.staging.manifest import workers_have_begun
from megtool.staging.protocol import check_inside
from megtool.staging.publication import (
    LEASE,
    RUN,
    Publication,
    complete_once,
    delete_keys,
    find_same,
    is_there,
    publishing_order,
    put_once,
    remove_notes,
    remove_objects,
    staging_prefix,
)
from megtool.staging.store.journal import StoreJournal, UnitRecord
from megtool.staging.store.part_plan import FileParts
from megtool.staging.store.resume import EarlierObjects
from megtool.staging.store.unit_tracker import UnitTracker
from megtool.staging.store.upload_pool import UploadPool
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.objects import part_layout
from megtool.storage.objects.index import StagedObjects, store_index
from megtool.storage.objects.lease import Lease
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.open_objects import open_objects
from megtool.storage.objects.part_buffers import BUDGET_BYTES, PartBuffers
from megtool.storage.objects.part_layout import CopyRun, Coverage, cut_parts
from megtool.storage.objects.probe import probe_store
from megtool.storage.objects.small_object import SmallObject, read_json, read_object
from megtool.storage.objects.writer import ObjectWriter, run_info
from megtool.storage.stores.protocol import (
    ConditionError,
    ObjectInfo,
    ObjectMissingError,
    UploadedPart,
)

T = TypeVar("T")

UPLOADS, JOURNAL = "uploads", "journal"
UPLOAD_THREADS = 8


class StoreStage:
    """Objects that are uploaded in parts, and appear together: see `CheckpointStage`.

    Data objects are uploads until all parts are there, and nothing sees them; one of a single part
    is put at once where nothing is replaced. Beside the destination, `.NAME.megtool/` holds `run`
    (which plan), `lock` (who writes), `uploads/N` (the upload of file N), `journal/` (finished
    units) and, from the first visible object to the last, `publishing`.

    A run that ends early leaves its uploads, and the next one with the same `fingerprint` goes on
    from the parts that the store lists. `messages` are for the user.

    Args:
        destination: The prefix, or the object, that is written.
        files: Opens the objects for those who write them.
        fingerprint: Names the plan: another one starts anew.
        overwrite: What is at the destination may be replaced; it is removed when publishing begins.
        is_file: The checkpoint is one object.
        sources: What is read, which the destination must not overlap.
        is_unsafe: Take a store that ignores conditions.
    """

    def __init__(
        self,
        destination: StorePath,
        *,
        files: Files,
        fingerprint: str,
        overwrite: bool = False,
        is_file: bool = False,
        sources: Sequence[Path] = (),
        is_unsafe: bool = False,
    ) -> None:
        self.files, self.destination = files, destination
        self.staging = staging_prefix(destination)
        self.tree: Path = destination
        self.resumed: set[int] = set()
        self.notes: dict[int, str] = {}
        self.messages: list[str] = []
        self.digests = FileDigests()
        self.sidecar: Sidecar | None = None
        self.is_file = is_file
        self.copied_bytes = self.uploaded_bytes = 0
        self._store = destination.store
        self._fingerprint, self._overwrite = fingerprint, overwrite
        self._sources, self._is_unsafe = sources, is_unsafe
        self._plan_parts: Callable[[], Mapping[str, FileParts]] = dict
        self._last: Sequence[str] = ()
        self._parts: Mapping[str, FileParts] | None = None
        self._publication = Publication(destination)
        self._buffers = PartBuffers()
        self._transfers = UploadPool(1, 0)
        self._writers: list[ObjectWriter] = []
        self._numbers: dict[ObjectPath, int] = {}
        self._earlier = EarlierObjects(self._staged_path(UPLOADS))
        self._small: dict[str, bytes] = {}
        self._records: dict[int, UnitRecord] = {}
        self._finished: set[int] = set()
        self._by_number: dict[int, ObjectWriter] = {}
        self._units = UnitTracker(self._add_record)
        self._replaces = self._is_complete = self._committed = self._is_following = False
        self._has_leftovers = False  # of an earlier run, beside the destination
        self._overflows: Callable[[], bool] = bool
        self._mutex = threading.Lock()
        self._trace = ""  # what stays beside a complete checkpoint
        self._lease: Lease | None = None
        self._journal: StoreJournal | None = None
        self._staged: StagedObjects | None = None

    def follow_plan(
        self, parts: Callable[[], Mapping[str, FileParts]], *, last: Sequence[str], threads: int = 1
    ) -> None:
        """Take from a plan how its files become `parts`, by path, and which files appear `last`.

        Other files are cut evenly. Threads of their own upload the parts, unless there is 1 of
        `threads` that fill them: then it does.
        """
        self._plan_parts, self._last = parts, last
        self._transfers = UploadPool(UPLOAD_THREADS if threads > 1 else 1, BUDGET_BYTES // 2)

    # ---- before the first byte

    def check(self) -> None:
        """See `CheckpointStage`."""
        check_surroundings(self.destination, self._sources)
        check_free(self.destination, is_file=self.is_file, overwrite=self._overwrite)

    def __enter__(self) -> StoreStage:
        check_surroundings(self.destination, self._sources)
        self._has_leftovers = has_objects(self.staging)
        if not self._has_leftovers:
            check_free(self.destination, is_file=self.is_file, overwrite=self._overwrite)
        try:
            self._lease = Lease(self._staged_path(LEASE))
            self.messages += probe_store(self.staging, is_unsafe=self._is_unsafe)
            self._recover()
            self._staged = store_index().stage(self.destination)
        except BaseException:
            with contextlib.suppress(MegtoolError):
                self._release()
            raise
        self.files.recorder = self.digests
        self.digests.observer = self._note_section
        return self

    def require_space(self, num_bytes: int) -> None:
        """See `CheckpointStage`: a store says nothing about space."""

    def _staged_path(self, name: str) -> StorePath:
        return self.staging / name

    def _identity(self) -> str:
        """What has to be equal so that an earlier run's parts are of use."""
        return f"{self._fingerprint} {part_layout.PART_BYTES} {part_layout.LEAST_BYTES}"

    def _recover(self) -> None:
        """Take up or discard what an earlier run left."""
        run = read_json(self._staged_path(RUN))
        self._publication.read()
        identity, state = self._identity(), self._publication.state
        if "count" in run and state != "complete":
            raise workers_have_begun(run["count"], self.staging)
        is_same = run.get("identity") == identity
        is_completed = state == "complete"
        is_trace = self._has_leftovers and not run and not state  # such as a probe's
        if is_completed or is_trace or ((run or state) and not is_same):
            if is_completed or is_trace:
                self._abort_uploads()
            else:
                self._discard_other(run, state)
            self._remove_notes()
            self._publication.forget()
            run = {}
        if not self._publication.state:
            is_replaced = check_free(
                self.destination,
                is_file=self.is_file,
                overwrite=self._overwrite,
                is_completed=is_completed and is_same,
            )
            self._replaces = is_replaced or bool(run.get("replaces"))
        else:
            self._replaces = bool(run.get("replaces"))
        if run.get("replaces") is not self._replaces:
            values = {"identity": identity, "replaces": self._replaces}
            path = self._staged_path(RUN)
            self._store.put(path.key, json.dumps(values).encode())
        self._journal = StoreJournal(self._staged_path(JOURNAL), identity)
        if run:
            self._records = {r.unit: r for r in self._journal.read()}
            self._earlier.note(self._records.values())
            self._earlier.read_ids()

    def _discard_other(self, run: Mapping[str, Any], state: str) -> None:
        """Drop the work of an earlier run with another plan."""
        self.messages.append(
            "discarded what an earlier run with another source or other options had uploaded"
        )
        if state == "writing" or (state == "removing" and run.get("replaces", True)):
            remove_objects(self.destination)
        self._abort_uploads()

    # ---- writing

    def path(self, relative: str) -> StorePath:
        """See `CheckpointStage`.

        Raises:
            FormatError: the path is outside the checkpoint.
        """
        if self.is_file and relative in ("", self.destination.name):
            return self.destination
        check_inside(relative, self.destination)
        return self.destination / relative

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """See `CheckpointStage`; parts that an earlier run has uploaded are kept."""
        if self._parts is None:
            self._parts = self._plan_parts()
        path = self.path(relative)
        known = self._parts.get(relative)
        if known is None:
            known = FileParts(number=-1, expected=Coverage())
            if num_bytes:
                known.expected.add(0, num_bytes)
        writer = ObjectWriter(
            path,
            cut_parts(num_bytes, known.runs, known.borders),
            self,
            self._buffers,
            known.expected,
            headers=known.headers,
            deferred=known.deferred,
            transfers=self._transfers,
        )
        with self._mutex:
            number = len(self._writers) if known.number < 0 else known.number
            if path in self._numbers:
                raise RuntimeError(f"{path} is created twice")
            self._numbers[path], self._by_number[number] = number, writer
            self._writers.append(writer)
        is_publishing = self._publication.state in ("writing", "complete")
        self._earlier.adopt(writer, number, is_publishing=is_publishing)
        self._fill(writer, number)
        if cuts is not None:
            self.digests.register(path, num_bytes, cuts)
        self._show(path, writer.completed or writer_info(writer))
        open_objects().construct(path, writer)
        return path

    def _show(self, path: ObjectPath, info: ObjectInfo) -> None:
        if self._staged is not None:
            self._staged.set(path, info)

    def _fill(self, writer: ObjectWriter, number: int) -> None:
        """Add what other processes have left of parts of an object: nothing."""

    def write(self, relative: str, data: bytes) -> Path:
        """See `CheckpointStage`: the object appears at the commit."""
        path = self.path(relative)
        self._small[relative] = data
        self.digests.register(path, len(data))
        self.digests.record(path, 0, (data,))
        small = SmallObject(path, data)
        self._show(path, small.info)
        open_objects().construct(path, small)
        return path

    # ---- units

    def follow(self, context: Any) -> Container[int]:
        """See `CheckpointStage`: units whose parts are all in the store, by their journal."""
        if not self._is_following:
            self._is_following = True
            self._take_up(context)
        context.digests.observer = self._units.note_tensor
        self._overflows = lambda: bool(context.overflowed or context.fed_overflowed)
        self._units.forget()
        return self._finished

    def _take_up(self, context: Any) -> None:
        writers = self._by_number
        for unit, record in self._records.items():
            if not all(
                file in writers
                and part < len(writers[file].layout)
                and writers[file].is_uploaded(part)
                for file, part in record.parts
            ):
                continue
            self._finished.add(unit)
            for name, (crc, num_bytes) in record.tensors.items():
                context.digests.add_parts(name, crc, num_bytes)
            for (file, section), crc in record.sections.items():
                self.digests.add_sections(writers[file].path, section, [crc])
        uploaded = sum(w.num_adopted for w in self._writers)
        if uploaded:
            total = sum(len(w.layout) for w in self._writers)
            self.messages.append(
                f"resuming: {uploaded} of {several(total, 'part')} are uploaded already"
            )

    def _note_section(self, path: Path, section: int, linear: int) -> None:
        number = self._numbers.get(path)  # type: ignore[call-overload]
        if number is not None:
            self._units.note_section(number, section, linear)

    def touch(self, writer: ObjectWriter, part: int) -> None:
        """See `PartTarget`."""
        self._units.touch((self._numbers[writer.path], part))

    def finish(self, unit: int, note: str = "") -> None:
        """See `CheckpointStage`: the unit is in the journal once its parts are uploaded."""
        if self._overflows():
            self._units.forget()  # what it counted is not in the journal: it is done again
        else:
            self._units.finish(unit, note, lambda p: self._by_number[p[0]].is_uploaded(p[1]))

    def _add_record(self, record: UnitRecord) -> None:
        for file, _ in record.parts:
            writer = self._by_number.get(file)  # one that publishes opens files one by one
            if writer is not None and writer.completed is not None:
                record.objects[file] = writer.completed.version
        self._require_journal().add(record)

    def uploaded(self, writer: ObjectWriter, part: int) -> None:
        """See `PartTarget`."""
        self._units.uploaded((self._numbers[writer.path], part))

    def _require_journal(self) -> StoreJournal:
        if self._journal is None:
            raise RuntimeError("a StoreStage is used inside `with`")
        return self._journal

    # ---- parts

    def upload(self, writer: ObjectWriter, part: int, data: memoryview) -> UploadedPart:
        """See `PartTarget`."""
        with self._mutex:
            self.uploaded_bytes += data.nbytes
        if len(writer.layout) == 1 and not self._replaces:
            self._begin_publishing()
            if writer.path in self._earlier.doubtful:
                writer.completed = find_same(writer.path, data)
            writer.completed = writer.completed or put_once(writer.path, data)
            return UploadedPart(number=1, size=data.nbytes, tag="")
        upload_id = self._begin_upload(writer)
        return self._store.upload_part(writer.path.key, upload_id, part + 1, data)

    def copy(self, writer: ObjectWriter, part: int, run: CopyRun) -> UploadedPart | None:
        """See `PartTarget`.

        Raises:
            SourceChangedError: the source was replaced since it was looked at.
        """
        upload_id = self._begin_upload(writer)
        try:
            tag = self._store.copy_part(
                writer.path.key,
                upload_id,
                part + 1,
                run_info(run),
                run.source_offset,
                run.num_bytes,
            )
        except (ConditionError, ObjectMissingError) as e:
            raise SourceChangedError(
                "the object was replaced or removed while it was copied",
                file=run.source,
                hint="wait until nothing writes to the source, then run again",
            ) from e
        with self._mutex:
            self.copied_bytes += run.num_bytes
        return tag

    def _begin_upload(self, writer: ObjectWriter) -> str:
        """The upload of an object: the one that the first of all workers has begun."""
        with writer.lock:
            if not writer.upload_id:
                path = self._earlier.path(self._numbers[writer.path])
                upload_id = self._store.begin_upload(writer.path.key)
                try:
                    self._store.put(path.key, upload_id.encode(), create=True)
                except ConditionError:
                    data = read_object(path)
                    if data is None:
                        raise
                    agreed = data.decode()
                    if agreed != upload_id:
                        self._store.abort_upload(writer.path.key, upload_id)
                    upload_id = agreed
                writer.upload_id = upload_id
            return writer.upload_id

    def _begin_publishing(self) -> None:
        with self._mutex:
            last = self._last[-1] if self._last and not self.is_file else ""
            key = self.path(last).key if last or self.is_file else ""
            self._publication.begin(
                replaces=self._replaces, last=key, check=self._check_publication
            )

    def _check_publication(self) -> None:
        """Refuse to remove what another run may have published meanwhile."""
        if self._lease is not None:
            self._lease.check()

    def complete(self, writer: ObjectWriter) -> ObjectInfo:
        """See `PartTarget`."""
        self._transfers.settle()
        with writer.lock:
            if writer.completed is None:
                self._begin_publishing()
                if not len(writer.layout):
                    writer.completed = put_once(writer.path, b"")
                else:
                    writer.completed = complete_once(
                        writer.path, self._begin_upload(writer), writer.tags()
                    )
            self._show(writer.path, writer.completed)
            return writer.completed

    # ---- the end

    def count_copied(self, planned: int) -> int:
        """See `CheckpointStage`: what the store copied itself."""
        self._transfers.settle()
        return self.copied_bytes

    def complete_data(self, *, threads: int = 1) -> None:
        """See `CheckpointStage`: data objects appear; what they replace is gone.

        Raises:
            DestinationError: another program has written one of them.
            StorageError: the store refused.
        """
        if self._is_complete:
            return
        self._transfers.settle()
        map_in_threads(self._complete_object, self._writers, threads=threads)
        self._require_journal().flush()
        self._is_complete = True

    def _complete_object(self, writer: ObjectWriter) -> None:
        writer.finish()
        self.complete(writer)
        open_objects().construct(writer.path, None)

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """See `CheckpointStage`: small files appear, the markers of completeness last.

        Raises:
            DestinationError: another program has written to the destination.
            StorageError: the store refused; the next run goes on.
        """
        self.complete_data(threads=threads)
        if self._lease is not None:
            self._lease.check()
        self._begin_publishing()
        for name in publishing_order(self._small, self._last):
            put_once(self.path(name), self._small[name])
        self._leave_trace()
        self._publication.end()
        self._committed = True
        try:
            self._abort_uploads()
            self._remove_notes()
        except StorageError as e:
            self.messages.append(f"the checkpoint is complete, but left-overs remain: {e.message}")
        self._release()

    def _abort_uploads(self) -> None:
        """Abort every upload of the destination: only this run writes there."""
        uploads = list(self._store.list_uploads(self.staging.key))
        uploads += self._store.list_uploads(self.destination.key)
        if self.is_file:
            folder = self.destination.key.rpartition("/")[0]
            uploads += [
                u for u in self._store.list_uploads(folder) if u.key == self.destination.key
            ]
        for upload in uploads:
            self._store.abort_upload(upload.key, upload.upload_id)

    def _remove_notes(self) -> None:
        """Remove what the run has left beside the destination, except for its lock."""
        remove_notes(self.staging, trace=self._trace)

    def _leave_trace(self) -> None:
        """Leave a sign that the checkpoint is complete: none."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._committed:
            return
        self._transfers.close()
        keep = any(w.num_uploaded for w in self._writers) or bool(self._publication.state)
        with contextlib.suppress(*[MegtoolError] if error else []):
            if keep:
                self.messages.append(self.describe_resume())
                self._require_journal().flush()
            else:
                self._discard()
        with contextlib.suppress(*[MegtoolError] if error else []):
            self._release()

    def describe_resume(self) -> str:
        """See `CheckpointStage`."""
        uploaded = sum(w.num_uploaded for w in self._writers)
        return (
            f"kept {several(uploaded, 'uploaded part')}: run the same command again to resume, "
            f"or `megtool clean {self.destination} --yes` removes them"
        )

    def discard(self) -> None:
        """See `CheckpointStage`: what appeared already is removed."""
        self._transfers.close()
        self._discard()
        self._release()
        self._committed = True  # nothing is left to keep

    def _discard(self) -> None:
        if self._publication.state == "writing":  # and nothing that another program has put there
            small = {self.path(name): data for name, data in self._small.items()}
            keys = [path.key for path, data in small.items() if is_there(path, data)]
            keys += [w.path.key for w in self._writers if w.completed is not None]
            delete_keys(self._store, keys)
        self._abort_uploads()
        self._remove_notes()
        self._publication.forget()

    def _release(self) -> None:
        self._transfers.close()
        self.files.recorder = None
        for writer in self._writers:
            open_objects().construct(writer.path, None)
        for name in self._small:
            open_objects().construct(self.path(name), None)
        if self._staged is not None:
            store_index().unstage(self.destination)
            self._staged = None
        self._buffers.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def writer_info(writer: ObjectWriter) -> ObjectInfo:
    """An object that is not complete, as a listing shows it."""
    return ObjectInfo(key=writer.path.key, size=writer.size, version="")
