"""Publishing a checkpoint in a store: what appears when, and how readers know that it is not whole.

A store cannot rename. From the first object at the destination until the last one, the object
`publishing` beside it says that a run is not done; readers of megtool refuse such a destination.
Objects are only created, and the objects that make a checkpoint complete come last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megtool.errors import DestinationError, FormatError, StorageError
from megtool.storage.location.path import StorePath
from megtool.storage.objects.index import store_index
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.objects.small_object import read_json
from megtool.storage.stores.protocol import (
    ConditionError,
    ObjectInfo,
    ObjectMissingError,
    Store,
    UploadedPart,
)

LEASE, RUN, PUBLISHING = "lock", "run", "publishing"
MARKERS = (
    "model.safetensors.index.json",
    "config.json",
    "metadata.json",
    ".metadata",
    "zarr.json",
    "latest_checkpointed_iteration.txt",
)
"""Files without which no loader takes a folder for a checkpoint, in the order of their writing."""

_BATCH = 1000  # keys in one request that deletes


def staging_prefix(destination: StorePath) -> StorePath:
    """Where a run keeps its notes about a destination."""
    return destination.parent / f".{destination.name}.megtool"


def publishing_order(names: Iterable[str], last: Sequence[str] = ()) -> list[str]:
    """Small files in the order in which they appear; `last` come at the end, in this order."""
    names = set(names)
    ends = [name for name in last if name in names]
    rest = sorted(names.difference(ends))

    def rank(name: str) -> int:
        base = name.rpartition("/")[2]
        return MARKERS.index(base) if base in MARKERS else -1

    return [*sorted(rest, key=rank), *ends]


class Publication:
    """The state of a destination: `state` is empty, or one of

    `removing` (the former checkpoint is being removed), `writing` (objects of the new one appear)
    and `complete`. `last` is the key of the object that appears last. A note is replaced only as it
    was read or written, so that a run that was out of touch notices that another one publishes.
    """

    def __init__(self, destination: StorePath) -> None:
        self._path = staging_prefix(destination) / PUBLISHING
        self._destination = destination
        self._store = destination.store
        self._version: str | None = None  # of the note; None: there is none
        self.state = self.last = ""

    def read(self) -> None:
        """Find out what an earlier run has left.

        Raises:
            StorageError: the store refused.
        """
        info = self._store.head(self._path.key)
        self._version = None if info is None else info.version
        values = read_json(self._path) if info is not None else {}
        self.state, self.last = str(values.get("state", "")), str(values.get("last", ""))
        if self.state == "writing" and self.last and self._store.head(self.last) is not None:
            self.state = "complete"

    def begin(self, *, replaces: bool, last: str, check: Callable[[], None] | None = None) -> None:
        """Say that objects appear from now on; what is at the destination is removed first.

        Before each request that removes something, `check` raises if another run may publish.

        Raises:
            DestinationError: another run publishes, or `check` has raised it.
            StorageError: the store refused.
        """
        if self.state in ("writing", "complete"):  # what a run that was stopped has begun
            return
        if replaces or self.state == "removing":
            self._put("removing", last)
            try:
                remove_objects(self._destination, check=check)
            except DestinationError:
                self._withdraw()
                raise
        self._put("writing", last)

    def end(self) -> None:
        """Say that the checkpoint is complete.

        Raises:
            StorageError: the store refused.
        """
        self._put("complete", self.last)

    def reset(self) -> bool:
        """Take over what was `read` of a run that is over; whether the destination must be emptied.

        Raises:
            DestinationError: another run has begun to publish since.
            StorageError: the store refused.
        """
        if self.state == "writing":
            self._put("removing", self.last)
        elif self.state == "complete":
            self._put("", self.last)
        return self.state == "removing"

    def forget(self) -> None:
        """The note is removed."""
        self.state, self.last, self._version = "", "", None

    def _put(self, state: str, last: str) -> None:
        """Replace the note, unless another run of the same kind has done so.

        Raises:
            DestinationError: another run has replaced or removed it.
        """
        data = json.dumps({"state": state, "last": last}).encode()
        is_new = self._version is None
        try:
            info = self._store.put(self._path.key, data, create=is_new, version=self._version or "")
        except (ConditionError, ObjectMissingError) as e:
            self.read()
            if self.state not in (state, "complete"):
                raise DestinationError(
                    "another run has taken over this destination",
                    file=self._destination,
                    hint="this one was out of touch with the store for too long: run it again",
                    error_id="destination-locked",
                ) from e
            return
        self.state, self.last, self._version = state, last, info.version

    def _withdraw(self) -> None:
        """Remove the note, unless another run has replaced it."""
        info = self._store.head(self._path.key)
        if info is not None and info.version == self._version:
            self._store.delete([self._path.key])


def refuse_unpublished(path: Path) -> None:
    """Refuse to read a checkpoint in a store of which only some objects have appeared.

    Raises:
        FormatError: a run is publishing it, or was stopped while it did.
        StorageError: the store refused.
    """
    if not isinstance(path, StorePath) or not path.store.can_write:
        return
    for root in (path, *path.parents):
        if not isinstance(root, StorePath) or not root.key:
            return
        if store_index().is_staged(root) or root.name.endswith(".megtool"):
            return
        publication = Publication(root)
        try:
            publication.read()
        except StorageError as e:
            if e.id != "permission-denied":  # who may read the checkpoint alone
                e.file = str(path)
                raise
        if publication.state in ("removing", "writing"):
            raise FormatError(
                "the checkpoint is not whole: a run is publishing it, or was stopped while it did",
                file=root,
                hint="wait until that run has ended, or start it again to finish it; "
                f"`megtool clean {root}` lists what it left, and with --yes removes it",
                error_id="incomplete-publication",
            )


def list_keys(path: StorePath) -> list[str]:
    """The keys of an object and of everything below its name, markers of completeness first.

    Raises:
        StorageError: the store refused.
    """
    store = path.store
    keys = [info.key for info in store.list(path.key, recursive=True).objects]
    if store.head(path.key) is not None:
        keys.append(path.key)
    return sorted(keys, key=lambda key: key.rpartition("/")[2] not in MARKERS)


def is_there(path: StorePath, data: bytes | memoryview) -> bool:
    """Whether an object has these bytes.

    Raises:
        StorageError: the store refused.
    """
    return find_same(path, data) is not None


def find_same(path: ObjectPath, data: bytes | memoryview) -> ObjectInfo | None:
    """The object, if it has these bytes.

    Raises:
        StorageError: the store refused.
    """
    info, size = path.store.head(path.key), memoryview(data).nbytes
    if info is None or info.size != size:
        return None
    try:
        is_same = not size or path.store.read(path.key, 0, size, version=info.version) == data
    except (ConditionError, ObjectMissingError):  # another program is at work
        return None
    return info if is_same else None


def remove_objects(path: StorePath, *, check: Callable[[], None] | None = None) -> int:
    """Remove an object and everything below its name; returns how many there were.

    `check` is called before each request that removes some.

    Raises:
        StorageError: the store refused.
    """
    keys = list_keys(path)
    for start in range(0, max(len(keys), 1), _BATCH):
        if check is not None:
            check()
        path.store.delete(keys[start : start + _BATCH])
    return len(keys)


def delete_keys(store: Store, keys: Sequence[str]) -> None:
    """Remove objects, however many.

    Raises:
        StorageError: the store refused.
    """
    for start in range(0, len(keys), _BATCH):
        store.delete(keys[start : start + _BATCH])


def remove_notes(staging: StorePath, *, trace: str = "") -> None:
    """Remove what a run has left beside a destination, except for its lock and a `trace`.

    Raises:
        StorageError: the store refused.
    """
    last = [(staging / PUBLISHING).key, (staging / LEASE).key]
    remaining = {*last, (staging / trace).key}
    delete_keys(staging.store, [key for key in list_keys(staging) if key not in remaining])
    staging.store.delete(last[:1])


def put_once(path: ObjectPath, data: bytes | memoryview) -> ObjectInfo:
    """Create an object; one that is there already with the same bytes is its own lost success.

    Raises:
        DestinationError: there is another object.
        StorageError: the store refused.
    """
    store = path.store
    try:
        return store.put(path.key, data, create=True)
    except ConditionError as e:
        info = find_same(path, data)
        if info is not None:
            return info
        raise _conflict(path) from e


def complete_once(
    path: ObjectPath, upload_id: str, parts: Sequence[UploadedPart], *, is_safe: bool = True
) -> ObjectInfo:
    """Make an object of its parts; one that is made of them already is its own lost success.

    Raises:
        DestinationError: there is another object.
        StorageError: the store refused.
    """
    store: Store = path.store
    try:
        return store.complete_upload(path.key, upload_id, parts, create=is_safe)
    except (ConditionError, ObjectMissingError) as e:
        info = store.head(path.key)
        is_whole = info is not None and info.size == sum(part.size for part in parts)
        if info is not None and is_whole and store.is_made_of(info, upload_id):
            return info
        if isinstance(e, ObjectMissingError):
            raise StorageError(
                "the upload of this object was aborted by another program",
                file=path,
                hint="run the command again: it uploads the object anew",
            ) from e
        raise _conflict(path) from e


def _conflict(path: ObjectPath) -> DestinationError:
    return DestinationError(
        "another program has written this object meanwhile",
        file=path,
        hint="two runs must not write one destination: choose another one",
        error_id="destination-exists",
    )
