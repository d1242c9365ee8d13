"""Bugs in what workers agree on, each a small patch that a simulation must find."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from megtool.staging.workers import share_copy
from megtool.staging.workers.record import WorkerRecord
from megtool.staging.workers.shared_folder import SharedStaging
from megtool.staging.workers.shared_store import SharedStoreStage
from tests.support.simulation.planted_local import Plant


def _names_not_flushed() -> AbstractContextManager[Any]:
    """A worker signs off before the names of its files are durable."""
    return patch.object(SharedStaging, "_flush_names", lambda self, paths: None)


def _share_not_flushed() -> AbstractContextManager[Any]:
    """A worker signs off before its files are durable."""
    original = SharedStaging.sign_off

    def sign_off(self: SharedStaging, record: WorkerRecord, paths: Any, *, fsync: bool) -> None:
        original(self, record, [], fsync=fsync)

    return patch.object(SharedStaging, "sign_off", sign_off)


def _missing_ignored() -> AbstractContextManager[Any]:
    """A worker publishes although others have not signed off."""
    return patch.object(SharedStaging, "find_missing", lambda self: [])


def _unit_left_out() -> AbstractContextManager[Any]:
    """Every share ends one unit early."""
    original = share_copy.own_units
    return patch.object(share_copy, "own_units", lambda *job: original(*job)[:-1])


def _signs_off_first() -> AbstractContextManager[Any]:
    """A worker signs off before it has copied its share."""
    original = share_copy.copy_share

    def copy_share(copy: Any, stage: Any, worker: Any, fingerprint: str, **options: Any) -> Any:
        run = copy.run
        copy.run = lambda numbers, *, resumed: None
        record = original(copy, stage, worker, fingerprint, **options)
        copy.run = run
        return record

    return patch.object(share_copy, "copy_share", copy_share)


def _fragments_forgotten() -> AbstractContextManager[Any]:
    """Parts that a worker has filled in part are not put together."""

    def fill(self: SharedStoreStage, writer: Any, number: int) -> None:
        for part, _ in self._fragments.get(number, ()):
            begin, end = writer.layout.bounds(part)
            if not writer.is_uploaded(part):
                writer.import_part(part, [(begin, end)], bytes(end - begin))

    return patch.object(SharedStoreStage, "_fill", fill)


def _all_missing_ignored() -> AbstractContextManager[Any]:
    """A worker of a store publishes although others have not signed off."""
    return patch.object(SharedStoreStage, "find_missing", lambda self: [])


def _no_trace() -> AbstractContextManager[Any]:
    """Nothing tells workers that are late of the commit."""
    return patch.object(SharedStoreStage, "_leave_trace", lambda self: None)


def _named(*plants: Plant) -> dict[str, Plant]:
    return {re.sub("^_", "", plant.__name__): plant for plant in plants}


WORKER_PLANTS = _named(
    _names_not_flushed, _share_not_flushed, _missing_ignored, _unit_left_out, _signs_off_first
)
STORE_WORKER_PLANTS = _named(_fragments_forgotten, _all_missing_ignored, _no_trace)
