"""Records in which workers leave the results of their shares of a scan for the last of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megtool.console import after_report
from megtool.digests.crc32c import crc32c
from megtool.errors import DestinationError, FormatError, MegtoolError
from megtool.plan.worker_status import WorkerStatus
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.manifest import (
    PUBLISH_LOCK,
    SCAN_PREFIX,
    find_missing_workers,
    worker_file,
)
from megtool.staging.workers.record_folder import RecordFolder, open_records
from megtool.storage.files import Files
from megtool.storage.tree_state import describe_state
from megtool.transport.reading.shared_scan import SharedScan

Result = TypeVar("Result")

_VERSION = 1
"""Raised with every change of what a scan puts into a record, such as fields of `TensorDelta`."""


def share_scan(
    worker: WorkerIdentity,
    folder: Path,
    scan: Callable[[SharedScan], Result],
    *,
    files: Files | None = None,
) -> tuple[WorkerStatus, Result | None]:
    """Do a worker's share of a scan; the last worker gets the result, which is that of all.

    `folder`, or the prefix of a store, is seen by all workers. It is removed when the report is
    printed (see `after_report`).

    Raises:
        DestinationError: the folder cannot be written, or this worker runs already.
        FormatError: the record of a worker is damaged.
    """
    records = open_records(folder, files or Files())
    lock = records.lock(worker_file(worker.index, "lock"), create=True)
    try:
        own = SharedScan(worker)
        if not records.has(worker_file(worker.index, "record")):
            scan(own)
            records.write(worker.index, _encode(own.results))
        status = WorkerStatus(
            index=worker.index, count=worker.count, state="publishing", num_bytes=own.num_bytes
        )
        missing = _find_missing(records, worker)
        if missing:
            state = WorkerStatus(
                index=worker.index,
                count=worker.count,
                state="waiting",
                missing=missing,
                num_bytes=own.num_bytes,
                origin=worker.origin,
            )
            return state, None
        ending, result = _merge(worker, folder, scan, records, status)
    finally:
        lock.release()
    if ending.state == "published":
        after_report(partial(_remove_records, records))
    return ending, result


def _find_missing(records: RecordFolder, worker: WorkerIdentity) -> tuple[int, ...]:
    """The workers without a record; none if another one has merged them and removed the folder."""
    if not records.has(worker_file(worker.index, "record")):
        return ()
    return tuple(find_missing_workers(records.names(), worker.count))


def _merge(
    worker: WorkerIdentity,
    folder: Path,
    scan: Callable[[SharedScan], Result],
    records: RecordFolder,
    status: WorkerStatus,
) -> tuple[WorkerStatus, Result | None]:
    """Scan with the results of all workers, unless another one does or has done it."""
    try:
        lock = records.lock(PUBLISH_LOCK)
    except DestinationError:
        return status, None
    try:
        if not records.has(worker_file(worker.index, "record")):
            return status, None
        results: dict[str, dict[str, Any]] = {}
        for index in range(worker.count):
            name = worker_file(index, "record")
            data = records.read(name)
            if data is None:  # merged by another host, whose locks are not seen here
                return status, None
            for label, values in _parse(data, folder / name).items():
                results.setdefault(label, {}).update(values)
        result = scan(SharedScan(worker, results))
        published = WorkerStatus(
            index=worker.index, count=worker.count, state="published", num_bytes=status.num_bytes
        )
        return published, result
    finally:
        lock.release()


def _remove_records(records: RecordFolder) -> None:
    if not records.names():
        return
    try:
        lock = records.lock(PUBLISH_LOCK)
    except DestinationError:  # a worker that was started again merges them once more
        return
    try:
        records.remove()
    finally:
        lock.release()


def scan_folder(parent: Path, verb: str, key: object, locations: Sequence[Path]) -> Path:
    """The folder for the records of one scan, which depends on `key` and on what is scanned."""
    h = hashlib.sha256(repr((verb, _VERSION, key)).encode())
    for path in locations:
        state = ""
        try:
            state = describe_state(Files(), path)
        except MegtoolError:  # the scan itself says what is wrong, or cannot be listed
            state = "unknown"
        h.update(repr((str(path), state)).encode())
    return parent / f"{SCAN_PREFIX}{verb}-{h.hexdigest()[:16]}"


def _encode(results: Mapping[str, Mapping[str, Any]]) -> bytes:
    data = json.dumps({"version": _VERSION, "results": results}, separators=(",", ":")).encode()
    return data + b"\n%08x\n" % crc32c(data)


def _parse(data: bytes, path: Path) -> dict[str, dict[str, Any]]:
    body, end = data[:-10], data[-10:]
    try:
        if end != b"\n%08x\n" % crc32c(body):
            raise ValueError("it differs from its own digest")
        values = json.loads(body)
        if values["version"] != _VERSION:
            raise ValueError(f"it has version {values['version']!r}")
        results: dict[str, dict[str, Any]] = values["results"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(
            f"the record of a worker is damaged: {e}",
            file=path,
            hint="remove this file, and start this worker again",
        ) from e
    return results
