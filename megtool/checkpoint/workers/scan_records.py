"""The folder in which workers leave the results of their shares of a scan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megtool.checkpoint.digest import crc32c
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.lock import LockFile
from megtool.checkpoint.workers.identity import WorkerIdentity
from megtool.checkpoint.workers.manifest import (
    PUBLISH_LOCK,
    SCAN_PREFIX,
    find_worker_files,
    list_run_files,
    worker_file,
)
from megtool.checkpoint.workers.record import MAX_RECORD_BYTES, WorkerStatus
from megtool.checkpoint.workers.shared_scan import SharedScan
from megtool.checkpoint.workers.shared_staging import describe_state
from megtool.console import after_report
from megtool.errors import DestinationError, FormatError, MegtoolError, StorageError

Result = TypeVar("Result")

_VERSION = 1


def share_scan(
    worker: WorkerIdentity,
    folder: Path,
    scan: Callable[[SharedScan], Result],
    *,
    files: Files | None = None,
) -> tuple[WorkerStatus, Result | None]:
    """Do a worker's share of a scan; the last worker gets the result, which is that of all.

    `folder` is seen by all workers. It is removed when the report is printed (see `after_report`).

    Raises:
        DestinationError: the folder cannot be written, or this worker runs already.
        FormatError: the record of a worker is damaged.
    """
    files = files or Files()
    lock = LockFile(
        files,
        folder / worker_file(worker.index, "lock"),
        lambda: _make_folder(files, folder),
    )
    try:
        record = folder / worker_file(worker.index, "record")
        own = SharedScan(worker)
        if files.lstat(record) is None:
            scan(own)
            data = _encode(own.results)
            files.replace_file(record, data, worker_file(worker.index, "new"), fsync=True)
        status = WorkerStatus(
            index=worker.index, count=worker.count, state="publishing", num_bytes=own.num_bytes
        )
        missing = _find_missing(files, folder, worker)
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
        ending, result = _merge(worker, folder, scan, files, status)
    finally:
        lock.release()
    if ending.state == "published":
        after_report(partial(_remove_records, files, folder))
    return ending, result


def _make_folder(files: Files, folder: Path) -> None:
    try:
        files.make_own_folder(folder, is_private=True)
    except StorageError as e:
        raise DestinationError(
            f"no folder for the records of workers: {e.message}",
            file=folder,
            hint="--worker-dir names a folder that all workers see and may write to",
            error_id="destination-not-writable",
        ) from e


def _find_missing(files: Files, folder: Path, worker: WorkerIdentity) -> tuple[int, ...]:
    """The workers without a record; none if another one has merged them and removed the folder."""
    if files.lstat(folder / worker_file(worker.index, "record")) is None:
        return ()
    done = {index for index, _ in find_worker_files(files.names(folder), "record")}
    return tuple(n for n in range(worker.count) if n not in done)


def _merge(
    worker: WorkerIdentity,
    folder: Path,
    scan: Callable[[SharedScan], Result],
    files: Files,
    status: WorkerStatus,
) -> tuple[WorkerStatus, Result | None]:
    """Scan with the results of all workers, unless another one does or has done it."""
    try:
        lock = LockFile(files, folder / PUBLISH_LOCK, lambda: None)
    except DestinationError:
        return status, None
    try:
        if files.lstat(folder / worker_file(worker.index, "record")) is None:
            return status, None
        results: dict[str, dict[str, Any]] = {}
        for index in range(worker.count):
            path = folder / worker_file(index, "record")
            data = files.read_whole(path, at_most=MAX_RECORD_BYTES, is_own=True)
            if data is None:  # merged by another host, whose locks are not seen here
                return status, None
            for label, values in _parse(data, path).items():
                results.setdefault(label, {}).update(values)
        result = scan(SharedScan(worker, results))
        published = WorkerStatus(
            index=worker.index, count=worker.count, state="published", num_bytes=status.num_bytes
        )
        return published, result
    finally:
        lock.release()


def _remove_records(files: Files, folder: Path) -> None:
    if files.lstat(folder) is None:
        return
    try:
        lock = LockFile(files, folder / PUBLISH_LOCK, lambda: None)
    except DestinationError:  # a worker that was started again merges them once more
        return
    try:
        for name in list_run_files(files.names(folder)):
            files.remove(folder / name)
        files.remove_empty(folder)
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
