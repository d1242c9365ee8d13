"""What interrupted runs have left beside destinations, on disks and in stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megtool.console import several
from megtool.errors import DestinationError
from megtool.staging.destination.store_check import find_live_run
from megtool.staging.folder import journal
from megtool.staging.manifest import PUBLISHED, SCAN_PREFIX, list_run_files
from megtool.staging.nested_runs import LOCK, SAVE_STAGING, find_run, staging_folder
from megtool.staging.publication import (
    LEASE,
    Publication,
    list_keys,
    remove_notes,
    remove_objects,
    staging_prefix,
)
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath
from megtool.storage.lock import LockFile, find_holder
from megtool.storage.objects.lease import Lease
from megtool.storage.stores.protocol import Upload

_STAGING = re.compile(r"\.(.+)\.megtool", re.DOTALL)
_CALIBRATION = re.compile(r"\.(.+)\.calibration", re.DOTALL)
_CALIBRATION_FILE = re.compile(
    r"lock|calibration\.json|sensitivity|unit-\d+\.safetensors|(unquantized-)?into-[\d-]+\.bin|\..+\.tmp"
)
"""What the resume folder of a calibration holds."""

_SCAN = re.compile(re.escape(SCAN_PREFIX) + r"([a-z][a-z-]*)-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
    """What one run has left for a destination.

    `staging` is the folder or the prefix beside it, empty for an upload of which no run is known.
    `holder` is the process that still writes there, `contents` what there is in words. `num_bytes`
    are those that removing it frees, as far as they are known.
    """

    destination: Path
    staging: Path | None
    contents: str
    holder: str = ""
    num_bytes: int = 0
    is_removable: bool = True

    def remove(self) -> None:
        """Remove it, unless a run has begun to write there meanwhile.

        Raises:
            DestinationError: a run writes there.
            StorageError: it cannot be removed.
        """
        if self.staging is None:
            return
        if isinstance(self.staging, StorePath):
            _remove_prefix(self.staging)
        elif _CALIBRATION.fullmatch(self.staging.name):
            _remove_calibration(Files(), self.staging)
        else:
            _remove_folder(Files(), self.staging)


def find_left_overs(location: Path) -> list[LeftOver]:
    """What runs have left for a destination, and for those inside a folder, at any depth.

    Raises:
        StorageError: a folder cannot be read, or a store refused.
    """
    if isinstance(location, StorePath):
        return list(_find_in_store(location))
    return list(_find_on_disk(Files(), Path(os.path.realpath(location))))


# ---- on a disk


def _find_on_disk(files: Files, location: Path) -> Iterator[LeftOver]:
    staging = staging_folder(location)
    if location.name and files.lstat(staging) is not None:
        yield _describe_folder(files, staging, location)
    work = location.with_name(f".{location.name}.calibration") if location.name else location
    if location.name and files.lstat(work) is not None:
        yield _describe_calibration(files, work, location)
    folders = [location] if location.is_dir() else []
    for folder in folders:  # the list grows during the loop
        for name in files.names(folder):
            path = folder / name
            if path.is_symlink() or not path.is_dir():
                continue
            match = _STAGING.fullmatch(name)
            if match is not None:
                yield _describe_folder(files, path, folder / match[1])
            elif match := _CALIBRATION.fullmatch(name):
                yield _describe_calibration(files, path, folder / match[1])
            elif name == SAVE_STAGING:
                yield _describe_folder(files, path, folder)
            elif _SCAN.fullmatch(name):
                yield _describe_folder(files, path, path)
            else:
                folders.append(path)


def _describe_folder(files: Files, staging: Path, destination: Path) -> LeftOver:
    status = files.lstat(staging)
    if status is None or not staging.is_dir() or staging.is_symlink():
        return LeftOver(
            destination=destination,
            staging=staging,
            contents="no folder: no run has made it",
            is_removable=False,
        )
    holder = find_run(files, staging) or ""
    names = set(files.names(staging))
    paths = files.tree(staging)[0]
    sizes = [s.st_size for path in paths if (s := files.lstat(path)) is not None]
    words = [several(len(paths), "file")]
    words += _scan_words(staging)
    if "workers" in names:
        words.append("of several workers")
    is_removable = True
    if "old" in names:
        words.append("with the former contents of the destination, which are put back")
        record = journal.read_journal(files, staging / "journal")
        current = files.stat(destination)
        if current is not None and (record is None or record.commit != current.st_ino):
            words[-1] = "with former contents, and the destination exists: look at both"
            is_removable = False
    return LeftOver(
        destination=destination,
        staging=staging,
        contents=", ".join(words),
        holder=holder,
        num_bytes=sum(sizes),
        is_removable=is_removable,
    )


def _describe_calibration(files: Files, work: Path, destination: Path) -> LeftOver:
    """Describe the folder from which an interrupted `quantize` resumes its calibration."""
    names = files.names(work) if work.is_dir() and not work.is_symlink() else ["no folder"]
    is_own = all(_CALIBRATION_FILE.fullmatch(name) for name in names)
    paths = files.tree(work)[0] if is_own else []
    words = "of a calibration, which the same command resumes" if is_own else "of something else"
    return LeftOver(
        destination=destination,
        staging=work,
        contents=f"{several(len(paths), 'file')} {words}",
        holder=find_holder(files, work / LOCK) or "" if LOCK in names else "",
        num_bytes=sum(s.st_size for path in paths if (s := files.lstat(path)) is not None),
        is_removable=is_own,
    )


def _remove_calibration(files: Files, work: Path) -> None:
    """Remove the resume folder of a calibration under its own lock."""
    lock = LockFile(files, work / LOCK, lambda: None)
    try:
        for name in files.names(work):
            if name != LOCK:
                files.remove(work / name)
        files.remove(work / LOCK)
    finally:
        lock.release()
    files.remove_empty(work)


def _scan_words(folder: Path) -> list[str]:
    scan = _SCAN.fullmatch(folder.name)
    return [f"of workers of `{scan[1]}`"] if scan else []


def _remove_folder(files: Files, staging: Path) -> None:
    """Remove a staging folder under its own lock; former contents are put back."""
    match = _STAGING.fullmatch(staging.name)
    lock = LockFile(files, staging / LOCK, lambda: None)
    try:
        names = files.names(staging)
        for name in names:
            if name.endswith(".lock") and find_holder(files, staging / name):
                raise DestinationError(
                    "a worker has begun to write there",
                    file=staging,
                    error_id="destination-locked",
                )
        if match is not None:
            _put_back(files, staging / "old", staging.parent / match[1])
        for name in names:
            if staging.name == SAVE_STAGING and name != LOCK:  # the save folder of a training run
                _put_back(files, staging / name / "old", staging.parent / name.rpartition(".")[0])
        names = files.names(staging)
        for name in [*list_run_files(names), *names]:  # first what vouches for data
            if name != LOCK:
                files.remove(staging / name)
        files.remove(staging / LOCK)
    finally:
        lock.release()
    files.remove_empty(staging)


def _put_back(files: Files, former: Path, destination: Path) -> None:
    if files.lstat(former) is not None and files.lstat(destination) is None:
        files.rename(former, destination)
        files.fsync_dir(destination.parent)


# ---- in a store


def _find_in_store(location: StorePath) -> Iterator[LeftOver]:
    store = location.store
    root = location
    while root.key:
        root = root.parent
    keys = [info.key for info in store.list(location.key, recursive=True).objects]
    uploads = list(store.list_uploads(location.key))
    if location.key:
        staging = staging_prefix(location)
        keys += [info.key for info in store.list(staging.key, recursive=True).objects]
        uploads += store.list_uploads(staging.key)
        folder = location.key.rpartition("/")[0]
        uploads += [u for u in store.list_uploads(folder) if u.key == location.key]
    prefixes = sorted({p for key in [*keys, *(u.key for u in uploads)] if (p := _prefix_of(key))})
    known: set[str] = set()
    for prefix in prefixes:
        staging = root / prefix
        if _SCAN.fullmatch(staging.name):
            yield _describe_records(staging)
            continue
        match = _STAGING.fullmatch(staging.name)
        destination = staging.parent / (match[1] if match else "")
        own = [u for u in uploads if _is_of(u, staging, destination)]
        known |= {u.upload_id for u in own}
        yield _describe_prefix(staging, destination, own)
    for upload in uploads:
        if upload.upload_id not in known:
            yield LeftOver(
                destination=root / upload.key,
                staging=None,
                contents="an upload under way, of which no run of megtool is known",
                is_removable=False,
            )


def _prefix_of(key: str) -> str:
    """The staging prefix, or that of records, which a key is in; empty if it is in none."""
    parts = key.split("/")
    for number, part in enumerate(parts[:-1]):
        if _STAGING.fullmatch(part) or _SCAN.fullmatch(part):
            return "/".join(parts[: number + 1])
    return ""


def _is_of(upload: Upload, staging: StorePath, destination: StorePath) -> bool:
    return upload.key == destination.key or upload.key.startswith(
        (f"{destination.key}/", f"{staging.key}/")
    )


def _describe_records(prefix: StorePath) -> LeftOver:
    objects = prefix.store.list(prefix.key, recursive=True).objects
    return LeftOver(
        destination=prefix,
        staging=prefix,
        contents=", ".join([several(len(objects), "object"), *_scan_words(prefix)]),
        holder=find_live_run(prefix),
        num_bytes=sum(info.size for info in objects),
    )


def _describe_prefix(staging: StorePath, destination: StorePath, uploads: list[Upload]) -> LeftOver:
    store = staging.store
    objects = store.list(staging.key, recursive=True).objects
    publication = Publication(destination)
    publication.read()
    words = [several(len(objects), "object")]
    published_note = staging / PUBLISHED  # for workers that are late
    num_bytes = sum(info.size for info in objects)
    if uploads:
        words.append(several(len(uploads), "upload") + " under way")
        for upload in uploads:
            num_bytes += sum(p.size for p in store.list_parts(upload.key, upload.upload_id))
    if publication.state in ("removing", "writing"):
        published = store.list(destination.key, recursive=True).objects
        words.append(f"an incomplete publication of {several(len(published), 'object')}")
        num_bytes += sum(info.size for info in published)
    elif publication.state == "complete" or [i.key for i in objects] == [published_note.key]:
        words.append("of a complete checkpoint, which stays")
    return LeftOver(
        destination=destination,
        staging=staging,
        contents=", ".join(words),
        holder=find_live_run(staging),
        num_bytes=num_bytes,
    )


def _remove_prefix(staging: StorePath) -> None:
    """Remove a staging prefix under its own lock, and what of a checkpoint is not complete."""
    match = _STAGING.fullmatch(staging.name)
    destination = staging.parent / match[1] if match else staging
    if holder := find_live_run(staging):
        raise DestinationError(
            f"{holder} is writing this destination",
            file=destination,
            hint="wait until it has ended",
            error_id="destination-locked",
        )
    store = staging.store
    if match is None:
        store.delete(list_keys(staging))
        return
    lock = staging / LEASE
    lease = Lease(lock)
    try:
        publication = Publication(destination)
        publication.read()
        if publication.state in ("removing", "writing"):
            remove_objects(destination)
        folder = destination.key.rpartition("/")[0]
        for upload in [*store.list_uploads(folder), *store.list_uploads(staging.key)]:
            if _is_of(upload, staging, destination):
                store.abort_upload(upload.key, upload.upload_id)
        remove_notes(staging)
    finally:
        lease.release()
    store.delete([key for key in list_keys(staging) if not key.endswith(f"/{LEASE}")])
