"""A prefix, or an object, of a store: uploaded in parts, which appear together."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megtool.console import several
from megtool.digests.files import FileDigests
from megtool.errors import (
    MegtoolError,
    SourceChangedError,
    StorageError,
)
from megtool.process.threads import map_in_threads
from megtool.staging.destination.store_check import (
    check_free,
    check_object,
    check_surroundings,
    has_objects,
)
from megtool.staging.manifest import workers_have_begun
from megtool.staging.place import SharedRun, check_inside
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


class StorePlace:
    """See `Place`: objects that are uploaded in parts, and appear together.

    Data objects are uploads until all parts are there, and nothing sees them; one of a single part
    is put at once where nothing is replaced. Beside the destination, `.NAME.megtool/` holds `run`
    (which plan), `lock` (who writes), `uploads/N` (the upload of file N), `journal/` (finished
    units) and, from the first visible object to the last, `publishing`.

    A run that ends early leaves its uploads, and the next one with the same `fingerprint` goes on
    from the parts that the store lists.
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
        self.messages: list[str] = []
        self.digests = FileDigests()
        self.is_file = is_file
        self.run: SharedRun | None = None
        self.add_fragments: Callable[[ObjectWriter, int], None] = lambda _, __: None
        self.publish_lease: Lease | None = None  # of a worker that publishes
        self.copied_bytes = self.uploaded_bytes = 0
        self.store = destination.store
        self.fingerprint, self.overwrite = fingerprint, overwrite
        self.sources, self.is_unsafe = sources, is_unsafe
        self._plan_parts: Callable[[], Mapping[str, FileParts]] = dict
        self._last: Sequence[str] = ()
        self._parts: Mapping[str, FileParts] | None = None
        self.publication = Publication(destination)
        self.buffers = PartBuffers()
        self.transfers = UploadPool(1, 0)
        self.writers: list[ObjectWriter] = []
        self.numbers: dict[ObjectPath, int] = {}
        self.earlier = EarlierObjects(self.staged_path(UPLOADS))
        self._small: dict[str, bytes] = {}
        self.records: dict[int, UnitRecord] = {}
        self._finished: set[int] = set()
        self.by_number: dict[int, ObjectWriter] = {}
        self._units = UnitTracker(self._add_record)
        self.replaces = self._is_complete = self.is_over = self._is_following = False
        self.has_leftovers = False  # of an earlier run, beside the destination
        self._overflows: Callable[[], bool] = bool
        self._mutex = threading.Lock()
        self.trace = ""  # what stays beside a complete checkpoint
        self.lease: Lease | None = None
        self.journal: StoreJournal | None = None
        self.staged: StagedObjects | None = None

    def follow_plan(
        self, parts: Callable[[], Mapping[str, FileParts]], *, last: Sequence[str], threads: int = 1
    ) -> None:
        """Take from a plan how its files become `parts`, by path, and which files appear `last`.

        Other files are cut evenly. Threads of their own upload the parts, unless there is 1 of
        `threads` that fill them: then it does.
        """
        self._plan_parts, self._last = parts, last
        self.transfers = UploadPool(UPLOAD_THREADS if threads > 1 else 1, BUDGET_BYTES // 2)

    # ---- before the first byte

    def check(self) -> None:
        check_surroundings(self.destination, self.sources)
        self.check_free()

    def check_early(self) -> None:
        """See `Place`: what an interrupted run has left may go on."""
        check_surroundings(self.destination, self.sources)
        if self.run is None and not has_objects(self.staging):
            self.check_free()
        if self.is_file:
            check_object(self.destination)

    def check_free(self, *, is_completed: bool = False) -> bool:
        """Refuse to replace what exists; returns whether something is replaced.

        Raises:
            DestinationError: see `store_check.check_free`.
        """
        return check_free(
            self.destination,
            is_file=self.is_file,
            overwrite=self.overwrite,
            is_completed=is_completed,
        )

    def enter(self) -> None:
        check_surroundings(self.destination, self.sources)
        self.has_leftovers = has_objects(self.staging)
        if not self.has_leftovers:
            self.check_free()
        try:
            self.lease = Lease(self.staged_path(LEASE))
            self.messages += probe_store(self.staging, is_unsafe=self.is_unsafe)
            self._recover()
            self.begin_staging()
        except BaseException:
            with contextlib.suppress(MegtoolError):
                self.release()
            raise

    def begin_staging(self) -> None:
        """Let what is written be seen at the destination, by this process alone, and digested."""
        self.staged = store_index().stage(self.destination)
        self.files.recorder = self.digests
        self.digests.observer = self.note_section

    def require_space(self, num_bytes: int) -> None:
        """See `Place`: a store says nothing about space."""

    def staged_path(self, name: str) -> StorePath:
        """Return the path of a note in the staging area."""
        return self.staging / name

    def identity(self) -> str:
        """Return what has to be equal so that an earlier run's parts are of use."""
        return f"{self.fingerprint} {part_layout.PART_BYTES} {part_layout.LEAST_BYTES}"

    def _recover(self) -> None:
        """Take up or discard what an earlier run left."""
        run = read_json(self.staged_path(RUN))
        self.publication.read()
        identity, state = self.identity(), self.publication.state
        if "count" in run and state != "complete":
            raise workers_have_begun(run["count"], self.staging)
        is_same = run.get("identity") == identity
        is_completed = state == "complete"
        is_trace = self.has_leftovers and not run and not state  # such as a probe's
        if is_completed or is_trace or ((run or state) and not is_same):
            if is_completed or is_trace:
                self.abort_uploads()
            else:
                self._discard_other(run, state)
            self.remove_notes()
            self.publication.forget()
            run = {}
        if not self.publication.state:
            is_replaced = self.check_free(is_completed=is_completed and is_same)
            self.replaces = is_replaced or bool(run.get("replaces"))
        else:
            self.replaces = bool(run.get("replaces"))
        if run.get("replaces") is not self.replaces:
            values = {"identity": identity, "replaces": self.replaces}
            path = self.staged_path(RUN)
            self.store.put(path.key, json.dumps(values).encode())
        self.journal = StoreJournal(self.staged_path(JOURNAL), identity)
        if run:
            self.records = {r.unit: r for r in self.journal.read()}
            self.earlier.note(self.records.values())
            self.earlier.read_ids()

    def _discard_other(self, run: Mapping[str, Any], state: str) -> None:
        """Drop the work of an earlier run with another plan."""
        self.messages.append(
            "discarded what an earlier run with another source or other options had uploaded"
        )
        if state == "writing" or (state == "removing" and run.get("replaces", True)):
            remove_objects(self.destination)
        self.abort_uploads()

    # ---- writing

    def path(self, relative: str) -> StorePath:
        """See `Place`.

        Raises:
            FormatError: the path is outside the checkpoint.
        """
        if self.is_file and relative in ("", self.destination.name):
            return self.destination
        check_inside(relative, self.destination)
        return self.destination / relative

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """See `Place`; parts that an earlier run has uploaded are kept."""
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
            self.buffers,
            known.expected,
            headers=known.headers,
            deferred=known.deferred,
            transfers=self.transfers,
        )
        with self._mutex:
            number = len(self.writers) if known.number < 0 else known.number
            if path in self.numbers:
                raise RuntimeError(f"{path} is created twice")
            self.numbers[path], self.by_number[number] = number, writer
            self.writers.append(writer)
        is_publishing = self.publication.state in ("writing", "complete")
        self.earlier.adopt(writer, number, is_publishing=is_publishing)
        self.add_fragments(writer, number)
        if cuts is not None:
            self.digests.register(path, num_bytes, cuts)
        self._show(path, writer.completed or writer_info(writer))
        open_objects().construct(path, writer)
        return path

    def _show(self, path: ObjectPath, info: ObjectInfo) -> None:
        if self.staged is not None:
            self.staged.set(path, info)

    def write(self, relative: str, data: bytes) -> Path:
        """See `Place`: the object appears at the commit."""
        path = self.path(relative)
        self._small[relative] = data
        self.digests.register(path, len(data))
        self.digests.record(path, 0, (data,))
        small = SmallObject(path, data)
        self._show(path, small.info)
        open_objects().construct(path, small)
        return path

    def forget_writers(self) -> None:
        """Begin anew: as the one that publishes, a worker opens all files."""
        self.files.recorder = None
        for writer in self.writers:
            open_objects().construct(writer.path, None)
        self.writers, self.numbers, self.by_number, self.records = [], {}, {}, {}
        self.buffers.close()
        self.buffers = PartBuffers()

    # ---- units

    def follow(self, context: Any) -> Container[int]:
        """See `Place`: units whose parts are all in the store, by their journal."""
        if not self._is_following:
            self._is_following = True
            self._take_up(context)
        context.digests.observer = self._units.note_tensor
        self._overflows = lambda: bool(context.overflowed or context.fed_overflowed)
        self._units.forget()
        return self._finished

    def _take_up(self, context: Any) -> None:
        writers = self.by_number
        for unit, record in self.records.items():
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
        uploaded = sum(w.num_adopted for w in self.writers)
        if uploaded:
            total = sum(len(w.layout) for w in self.writers)
            self.messages.append(
                f"resuming: {uploaded} of {several(total, 'part')} are uploaded already"
            )

    def note_section(self, path: Path, section: int, linear: int) -> None:
        """Add the digest of a section of a file to the records of units in progress."""
        number = self.numbers.get(path)  # type: ignore[call-overload]
        if number is not None:
            self._units.note_section(number, section, linear)

    def touch(self, writer: ObjectWriter, part: int) -> None:
        self._units.touch((self.numbers[writer.path], part))

    def finish(self, unit: int, note: str = "") -> None:
        """See `Place`: the unit is in the journal once its parts are uploaded."""
        if self._overflows():
            self._units.forget()  # what it counted is not in the journal: it is done again
        else:
            self._units.finish(unit, note, lambda p: self.by_number[p[0]].is_uploaded(p[1]))

    def _add_record(self, record: UnitRecord) -> None:
        for file, _ in record.parts:
            writer = self.by_number.get(file)  # one that publishes opens files one by one
            if writer is not None and writer.completed is not None:
                record.objects[file] = writer.completed.version
        self.require_journal().add(record)

    def uploaded(self, writer: ObjectWriter, part: int) -> None:
        self._units.uploaded((self.numbers[writer.path], part))

    def require_journal(self) -> StoreJournal:
        """Return the journal, which there is inside `with`."""
        if self.journal is None:
            raise RuntimeError("a stage is used inside `with`")
        return self.journal

    # ---- parts

    def upload(self, writer: ObjectWriter, part: int, data: memoryview) -> UploadedPart:
        with self._mutex:
            self.uploaded_bytes += data.nbytes
        if len(writer.layout) == 1 and not self.replaces:
            self._begin_publishing()
            if writer.path in self.earlier.doubtful:
                writer.completed = find_same(writer.path, data)
            writer.completed = writer.completed or put_once(writer.path, data)
            return UploadedPart(number=1, size=data.nbytes, tag="")
        upload_id = self._begin_upload(writer)
        return self.store.upload_part(writer.path.key, upload_id, part + 1, data)

    def copy(self, writer: ObjectWriter, part: int, run: CopyRun) -> UploadedPart | None:
        """See `PartTarget`.

        Raises:
            SourceChangedError: the source was replaced since it was looked at.
        """
        upload_id = self._begin_upload(writer)
        try:
            tag = self.store.copy_part(
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
                path = self.earlier.path(self.numbers[writer.path])
                upload_id = self.store.begin_upload(writer.path.key)
                try:
                    self.store.put(path.key, upload_id.encode(), create=True)
                except ConditionError:
                    data = read_object(path)
                    if data is None:
                        raise
                    agreed = data.decode(errors="replace")
                    if agreed != upload_id:
                        self.store.abort_upload(writer.path.key, upload_id)
                    upload_id = agreed
                writer.upload_id = upload_id
            return writer.upload_id

    def _begin_publishing(self) -> None:
        if self.run is not None and self.publication.state in ("", "removing"):
            self._check_publication()  # nothing is announced by one that lost the lease
        with self._mutex:
            last = self._last[-1] if self._last and not self.is_file else ""
            key = self.path(last).key if last or self.is_file else ""
            self.publication.begin(replaces=self.replaces, last=key, check=self._check_publication)

    def _check_publication(self) -> None:
        """Refuse to remove what another run may have published meanwhile."""
        lease = self.lease if self.run is None else self.publish_lease
        if lease is not None:
            lease.check()

    def complete(self, writer: ObjectWriter) -> ObjectInfo:
        self.transfers.settle()
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
        """See `Place`: what the store copied itself."""
        self.transfers.settle()
        return self.copied_bytes

    def complete_data(self, *, threads: int = 1) -> None:
        """See `Place`: data objects appear; what they replace is gone.

        Raises:
            DestinationError: another program has written one of them.
            StorageError: the store refused.
        """
        if self._is_complete:
            return
        self.transfers.settle()
        map_in_threads(self._complete_object, self.writers, threads=threads)
        self.require_journal().flush()
        self._is_complete = True

    def _complete_object(self, writer: ObjectWriter) -> None:
        writer.finish()
        self.complete(writer)
        open_objects().construct(writer.path, None)

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """See `Place`: small files appear, the markers of completeness last.

        Raises:
            DestinationError: another program has written to the destination.
            StorageError: the store refused; the next run goes on.
        """
        self.complete_data(threads=threads)
        if self.lease is not None:
            self.lease.check()
        self._begin_publishing()
        for name in publishing_order(self._small, self._last):
            put_once(self.path(name), self._small[name])
        if self.run is not None:
            self.run.leave_trace()
        self.publication.end()
        self.is_over = True
        try:
            self.abort_uploads()
            self.remove_notes()
        except StorageError as e:
            self.messages.append(f"the checkpoint is complete, but left-overs remain: {e.message}")
        self.release()

    def abort_uploads(self) -> None:
        """Abort every upload of the destination: only this run writes there."""
        uploads = list(self.store.list_uploads(self.staging.key))
        uploads += self.store.list_uploads(self.destination.key)
        if self.is_file:
            folder = self.destination.key.rpartition("/")[0]
            uploads += [u for u in self.store.list_uploads(folder) if u.key == self.destination.key]
        for upload in uploads:
            self.store.abort_upload(upload.key, upload.upload_id)

    def remove_notes(self) -> None:
        """Remove what the run has left beside the destination, except for its lock."""
        remove_notes(self.staging, trace=self.trace)

    @property
    def has_progress(self) -> bool:
        """Whether parts are uploaded, by this run or an earlier one."""
        return any(w.num_uploaded for w in self.writers)

    def leave(self) -> None:
        self.transfers.close()
        try:
            if self.has_progress or self.publication.state:
                self.messages.append(self.describe_resume())
                self.require_journal().flush()
            else:
                self._discard()
        finally:
            self.release()

    def describe_resume(self) -> str:
        uploaded = sum(w.num_uploaded for w in self.writers)
        return (
            f"kept {several(uploaded, 'uploaded part')}: run the same command again to resume, "
            f"or `megtool clean {self.destination} --yes` removes them"
        )

    def discard(self) -> None:
        """See `Place`: what appeared already is removed."""
        self.transfers.close()
        self._discard()
        self.release()
        self.is_over = True  # nothing is left to keep

    def _discard(self) -> None:
        if self.publication.state == "writing":  # and nothing that another program has put there
            small = {self.path(name): data for name, data in self._small.items()}
            keys = [path.key for path, data in small.items() if is_there(path, data)]
            keys += [w.path.key for w in self.writers if w.completed is not None]
            delete_keys(self.store, keys)
        self.abort_uploads()
        self.remove_notes()
        self.publication.forget()

    def release(self) -> None:
        """Forget what is under construction, and release the lease."""
        try:
            if self.run is not None:
                self.run.release()
        finally:
            self._release()

    def _release(self) -> None:
        self.transfers.close()
        self.files.recorder = None
        for writer in self.writers:
            open_objects().construct(writer.path, None)
        for name in self._small:
            open_objects().construct(self.path(name), None)
        if self.staged is not None:
            store_index().unstage(self.destination)
            self.staged = None
        self.buffers.close()
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()


def writer_info(writer: ObjectWriter) -> ObjectInfo:
    """An object that is not complete, as a listing shows it."""
    return ObjectInfo(key=writer.path.key, size=writer.size, version="")
