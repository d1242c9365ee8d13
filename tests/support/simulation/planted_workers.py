"""Bugs in what workers agree on, each a small patch that a simulation must find."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from megtool.staging.record import WorkerRecord
from megtool.staging.stage import Stage
from megtool.staging.workers import share_copy
from megtool.staging.workers.folder_run import FolderRun
from megtool.staging.workers.store_run import StoreRun
from tests.support.simulation.planted_local import Plant


def _names_not_flushed() -> AbstractContextManager[Any]:
    """A worker signs off before the names of its files are durable."""
    return patch.object(FolderRun, "_flush_names", lambda self, paths: None)


def _share_not_flushed() -> AbstractContextManager[Any]:
    """A worker signs off before its files are durable."""
    original = FolderRun.sign_off

    def sign_off(self: FolderRun, record: WorkerRecord, paths: Any, *, fsync: bool) -> None:
        original(self, record, [], fsync=fsync)

    return patch.object(FolderRun, "sign_off", sign_off)


def _missing_ignored() -> AbstractContextManager[Any]:
    """A worker publishes although others have not signed off."""

    def begin(self: Stage) -> list[WorkerRecord] | None:
        run = self.require_run()
        if run.is_complete() or not run.lock_publication() or not run.claim_publication():
            return None
        run.begin_publication()
        self._is_publisher = True
        records = map(run.read_record, range(run.worker.count))
        return [record for record in records if record is not None]

    return patch.object(Stage, "begin_publication", begin)


def _unit_left_out() -> AbstractContextManager[Any]:
    """Every share ends one unit early."""
    original = share_copy.own_units
    return patch.object(share_copy, "own_units", lambda *job: original(*job)[:-1])


def _signs_off_first() -> AbstractContextManager[Any]:
    """A worker signs off before it has copied its share."""
    original = share_copy.copy_share

    def copy_share(copy: Any, stage: Any, fingerprint: str, **options: Any) -> Any:
        run = copy.run
        copy.run = lambda numbers, *, resumed: None
        record = original(copy, stage, fingerprint, **options)
        copy.run = run
        return record

    return patch.object(share_copy, "copy_share", copy_share)


def _fragments_forgotten() -> AbstractContextManager[Any]:
    """Parts that a worker has filled in part are not put together."""

    def fill(self: StoreRun, writer: Any, number: int) -> None:
        for part, _ in self._fragments.get(number, ()):
            begin, end = writer.layout.bounds(part)
            if not writer.is_uploaded(part):
                writer.import_part(part, [(begin, end)], bytes(end - begin))

    return patch.object(StoreRun, "_add_fragments", fill)


def _all_missing_ignored() -> AbstractContextManager[Any]:
    """A worker of a store publishes although others have not signed off."""
    return patch.object(Stage, "find_missing", lambda self: [])


def _no_trace() -> AbstractContextManager[Any]:
    """Nothing tells workers that are late of the commit."""
    return patch.object(StoreRun, "leave_trace", lambda self: None)


def _named(*plants: Plant) -> dict[str, Plant]:
    return {re.sub("^_", "", plant.__name__): plant for plant in plants}


WORKER_PLANTS = _named(
    _names_not_flushed, _share_not_flushed, _missing_ignored, _unit_left_out, _signs_off_first
)
STORE_WORKER_PLANTS = _named(_fragments_forgotten, _all_missing_ignored, _no_trace)
