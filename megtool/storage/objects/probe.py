"""Whether a store keeps what a commit relies on: ranges, conditional puts, uploads in parts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

from megtool.errors import DestinationError, FormatError, StorageError
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.stores.protocol import ConditionError, ObjectInfo, ObjectMissingError, Store
from megtool.storage.stores.read_only import require_writable

_LOG = logging.getLogger(__name__)
_PROBED: WeakKeyDictionary[Store, tuple[str, ...]] = WeakKeyDictionary()
_CLEAR_ANSWERS = ("ranges-ignored", "not-implemented")  # ids of errors
_FIRST = b"megtool asks"
_CONTENT = b"megtool asks what this store keeps"


def probe_store(folder: ObjectPath, *, is_unsafe: bool = False) -> tuple[str, ...]:
    """Check a store once per process, with objects below `folder` that are removed again.

    Returns what it does not keep, as warnings; without `is_unsafe` that is refused.

    Raises:
        DestinationError: it cannot be written, or ignores conditions or ranges.
        StorageError: it refused a request, or a request failed, which says nothing of the store and
            is not remembered.
    """
    store = folder.store
    require_writable(store, folder.parent)
    faults = find_store_faults(folder)
    if faults and not is_unsafe:
        raise DestinationError(
            f"the store {faults[0]}",
            file=store.url,
            hint="choose another store; or --unsafe-store, if no other program writes there and no "
            "request is repeated",
            error_id="unsafe-store",
        )
    return tuple(f"the store {fault}: --unsafe-store was given" for fault in faults)


def find_store_faults(folder: ObjectPath) -> tuple[str, ...]:
    """What a store does not keep, each as the rest of a sentence; asked once per process.

    Raises:
        StorageError: a request failed.
    """
    faults = _PROBED.get(folder.store)
    if faults is None:
        faults = _PROBED[folder.store] = tuple(_find_faults(folder))
    return faults


def _find_faults(folder: ObjectPath) -> list[str]:
    store, key = folder.store, (folder / f"probe-{secrets.token_hex(8)}").key
    faults: list[str] = []
    uploads: list[str] = []
    try:
        first = store.put(key, _FIRST, create=True)
        if first.size != len(_FIRST):
            faults.append("states a wrong size of what was written")
        questions: tuple[tuple[Callable[[], Iterator[str]], str], ...] = (
            (lambda: _find_condition_faults(store, first), "does not replace a known version"),
            (lambda: _find_range_faults(store, key), "does not read ranges"),
            (lambda: _find_upload_faults(store, f"{key}-parts", uploads), "does not take parts"),
        )
        for find, fault in questions:
            try:
                for finding in find():
                    faults.append(finding)
            except (FormatError, StorageError) as e:
                if not _is_clear(e):
                    if faults:
                        return faults
                    raise
                faults.append(f"{fault}: {e.message}")
    finally:
        if not uploads:  # else the object tells the next run that there is something to remove
            store.delete([key])
    return faults


def _is_clear(error: FormatError | StorageError) -> bool:
    """Whether an error is the store's answer, which it would give again, not a failure."""
    kinds = (FormatError, ConditionError, ObjectMissingError)
    return isinstance(error, kinds) or error.id in _CLEAR_ANSWERS


def _find_condition_faults(store: Store, first: ObjectInfo) -> Iterator[str]:
    """Create the object again, replace its first version, and try that once more.

    Leases are created, renewed and taken over by such requests. The contents differ: versions are
    digests of them in some stores.
    """
    version = first.version
    try:
        version = store.put(first.key, b"created again", create=True).version
    except ConditionError:
        pass
    else:
        yield "ignores If-None-Match: it replaces objects that must only be created"
    store.put(first.key, _CONTENT, version=version)
    try:
        store.put(first.key, b"replaced again", version=version)
    except ConditionError:
        pass
    else:
        yield "ignores If-Match: it replaces objects that have another version"
        store.put(first.key, _CONTENT)


def _find_range_faults(store: Store, key: str) -> Iterator[str]:
    if bytes(store.read(key, 3, 5)) != _CONTENT[3:8]:
        yield "ignores ranges: it sends other bytes than those asked for"


def _find_upload_faults(store: Store, key: str, uploads: list[str]) -> Iterator[str]:
    """Upload a part, and complete the upload where an object has appeared meanwhile.

    `uploads` holds the upload until it is aborted.
    """
    upload_id = store.begin_upload(key)
    uploads.append(upload_id)
    try:
        part = store.upload_part(key, upload_id, 1, _CONTENT)
        listed = list(store.list_parts(key, upload_id))
        if [(p.number, p.size, p.tag) for p in listed] != [(1, len(_CONTENT), part.tag)]:
            yield "does not list the parts of an upload"
            return
        if store.head(key) is not None:
            yield "shows an object before its upload is complete"
            return
        store.put(key, _FIRST)
        try:
            store.complete_upload(key, upload_id, [part], create=True)
        except ConditionError:
            return
        yield "ignores If-None-Match where an upload is completed: it replaces objects"
    finally:
        store.abort_upload(key, upload_id)
        uploads.clear()
        store.delete([key])
