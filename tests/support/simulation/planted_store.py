"""Bugs in the recovery of checkpoints in stores, each a small patch that a simulation must find."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from megtool.staging import publication as store_publish
from megtool.staging.publication import Publication
from megtool.staging.store import place as store_place
from megtool.staging.store.place import StorePlace
from megtool.staging.store.resume import EarlierObjects
from megtool.storage.location.path import StorePath
from megtool.storage.objects.lease import Lease
from megtool.storage.objects.writer import ObjectWriter
from megtool.storage.stores.protocol import ConditionError, UploadedPart
from tests.support.simulation.planted_local import Plant


def _marker_before_data() -> AbstractContextManager[Any]:
    """The file that makes a checkpoint complete appears before the data."""
    original = StorePlace.commit

    def commit(self: StorePlace, **options: Any) -> None:
        self._begin_publishing()
        for name in self._last:
            store_publish.put_once(self.path(name), self._small[name])
        original(self, **options)

    return patch.object(StorePlace, "commit", commit)


def _marker_not_last() -> AbstractContextManager[Any]:
    """Small files appear in the order of their names."""

    def order(names: Any, last: Sequence[str] = ()) -> list[str]:
        return sorted(names)

    return patch.object(store_place, "publishing_order", order)


def _marker_removed_late() -> AbstractContextManager[Any]:
    """The former checkpoint loses its marker after its data."""
    original = store_publish.list_keys

    def list_keys(path: StorePath) -> list[str]:
        return original(path)[::-1]

    return patch.object(store_publish, "list_keys", list_keys)


def _conflict_is_success() -> AbstractContextManager[Any]:
    """A 412 is believed to be the reply to a repeated request, and not read back."""

    def put_once(path: StorePath, data: Any) -> Any:
        try:
            return path.store.put(path.key, data, create=True)
        except ConditionError:
            return path.store.head(path.key)

    return patch.object(store_place, "put_once", put_once)


def _conflict_is_failure() -> AbstractContextManager[Any]:
    """A 412 of a request that was repeated ends the run: an object is there already."""

    def put_once(path: StorePath, data: Any) -> Any:
        return path.store.put(path.key, data, create=True)

    return patch.object(store_place, "put_once", put_once)


def _part_left_out() -> AbstractContextManager[Any]:
    """An upload of several parts is completed without its last but one."""
    original = ObjectWriter.tags

    def tags(self: ObjectWriter) -> list[UploadedPart]:
        parts = original(self)
        return parts[:-2] + parts[-1:] if len(parts) > 4 else parts

    return patch.object(ObjectWriter, "tags", tags)


def _journal_over_store() -> AbstractContextManager[Any]:
    """Parts count as uploaded because the journal says so, not because the store lists them."""
    return patch.object(ObjectWriter, "is_uploaded", lambda self, part: True)


def _plan_not_compared() -> AbstractContextManager[Any]:
    """Uploads of another plan are taken up."""
    return patch.object(StorePlace, "identity", lambda self: "any plan")


def _part_size_not_compared() -> AbstractContextManager[Any]:
    """A listed part counts whatever size it has, and so do parts of another plan."""

    def adopt(self: ObjectWriter, parts: Sequence[UploadedPart]) -> None:
        for part in parts:
            if 1 <= part.number <= len(self.layout):
                state = self._parts[part.number - 1]
                state.tag, state.is_earlier = part, True

    @contextmanager
    def both() -> Iterator[None]:
        with patch.object(ObjectWriter, "adopt", adopt), _plan_not_compared():
            yield

    return both()


def _parts_not_listed() -> AbstractContextManager[Any]:
    """A resumed run uploads all parts again."""
    return patch.object(ObjectWriter, "adopt", lambda self, parts: None)


def _uploads_not_aborted() -> AbstractContextManager[Any]:
    """Uploads of other plans stay in the store."""
    return patch.object(StorePlace, "abort_uploads", lambda self: None)


def _upload_not_remembered() -> AbstractContextManager[Any]:
    """The uploads that a run has begun are not looked for by the next."""
    return patch.object(EarlierObjects, "read_ids", lambda self: None)


def _publishing_not_told() -> AbstractContextManager[Any]:
    """Readers are not told that objects of a new checkpoint appear."""

    def begin(self: Publication, *, replaces: bool, last: str, **_: Any) -> None:
        if not self.state and replaces:
            store_publish.remove_objects(self._destination)
        self.state, self.last = "writing", last

    return patch.object(Publication, "begin", begin)


def _not_removed_first() -> AbstractContextManager[Any]:
    """The former checkpoint is not removed before the new one appears."""

    def begin(self: Publication, *, replaces: bool, last: str, **_: Any) -> None:
        if self.state != "writing":
            self._put("writing", last)

    return patch.object(Publication, "begin", begin)


def _no_lease() -> AbstractContextManager[Any]:
    """Every run gets the lock."""

    def acquire(self: Lease) -> Any:
        return self._store.put(self._path.key, self._content())

    @contextmanager
    def both() -> Iterator[None]:
        with patch.object(Lease, "_acquire", acquire), patch.object(Lease, "check", lambda s: None):
            yield

    return both()


STORE_PLANTS: dict[str, Plant] = {
    re.sub("^_", "", plant.__name__): plant
    for plant in (
        _marker_before_data,
        _marker_not_last,
        _marker_removed_late,
        _conflict_is_success,
        _conflict_is_failure,
        _part_left_out,
        _journal_over_store,
        _plan_not_compared,
        _part_size_not_compared,
        _parts_not_listed,
        _uploads_not_aborted,
        _upload_not_remembered,
        _publishing_not_told,
        _not_removed_first,
        _no_lease,
    )
}
