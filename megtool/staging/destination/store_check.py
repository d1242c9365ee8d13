"""Checks that a place in a store can and may be written, before anything is written there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megtool.errors import DestinationError, StorageError
from megtool.staging.publication import LEASE, PUBLISHING, RUN, staging_prefix
from megtool.storage.location.path import StorePath
from megtool.storage.objects.lease import describe_holder, is_alive, read_holder
from megtool.storage.objects.probe import probe_store
from megtool.storage.stores.read_only import require_writable

OVERWRITE_HINT = (
    "choose another destination, or replace this one with --overwrite (overwrite=True in Python)"
)
_STAGING = re.compile(r"\.(.*)\.megtool", re.DOTALL)


def check_writable(destination: StorePath) -> None:
    """Refuse a location that no store takes, without a request.

    Raises:
        DestinationError: it is a whole bucket, or its store is only read.
    """
    require_writable(destination.store, destination)
    if not destination.key:
        raise DestinationError(
            "a whole bucket cannot be a destination",
            file=destination,
            hint=f"name a prefix: {destination}/model",
        )


def check_surroundings(destination: StorePath, sources: Sequence[Path]) -> None:
    """Refuse a destination that overlaps a source, or that another run replaces.

    Raises:
        DestinationError: it does, it is a whole bucket, or its store is only read.
        StorageError: the store refused.
    """
    check_writable(destination)
    for source in sources:
        if not isinstance(source, StorePath):
            continue
        staging = staging_prefix(destination)
        if any(a.is_relative_to(b) for a, b in ((destination, source), (source, destination))):
            raise DestinationError(
                f"the destination and the source {str(source)!r} are the same, "
                "or one is inside the other",
                file=destination,
                hint="choose a destination outside the source",
                error_id="destination-in-source",
            )
        if source.is_relative_to(staging):
            raise DestinationError(
                f"the source {str(source)!r} is inside the staging folder of the destination",
                file=staging,
                hint="choose another destination",
                error_id="destination-in-source",
            )
    try:
        for folder in destination.parents:
            if not isinstance(folder, StorePath) or not folder.key:
                break
            _check_above(destination, folder)
    except StorageError as e:
        e.file = str(destination)
        raise


def _check_above(destination: StorePath, folder: StorePath) -> None:
    if _STAGING.fullmatch(folder.name):
        raise DestinationError(
            "the destination is inside a staging folder, which is removed when its run ends",
            file=folder,
            hint="choose another destination",
        )
    info = folder.store.head(folder.key)
    if info is not None and info.size:  # folders of some tools are empty objects
        raise DestinationError(
            f"{str(folder)!r} is a file, so nothing is written below it",
            file=destination,
            hint="choose another destination",
        )
    holder = find_live_run(staging_prefix(folder))
    if holder:
        raise DestinationError(
            f"{holder} is writing {str(folder)!r}, which the destination is inside",
            file=destination,
            hint="wait until it has ended, or choose another destination",
            error_id="destination-locked",
        )


def find_live_run(staging: StorePath) -> str:
    """The process that holds a staging folder, in words; empty if none does.

    Raises:
        StorageError: the store refused.
    """
    store = staging.store
    for info in store.list(staging.key).objects:
        if not info.key.endswith(LEASE):
            continue
        lease = staging / info.key.rpartition("/")[2]
        holder = read_holder(lease, info)
        if holder and is_alive(lease, info, holder):
            return describe_holder(holder)
    return ""


def exists(destination: StorePath) -> bool:
    """Whether there is an object, or something below the name.

    Raises:
        StorageError: the store refused.
    """
    return destination.store.head(destination.key) is not None or has_objects(destination)


def has_objects(folder: StorePath) -> bool:
    """Whether there is something below a name.

    Raises:
        StorageError: the store refused.
    """
    # SeaweedFS still lists a prefix for a while after the last object below it was removed.
    try:
        return bool(folder.store.list(folder.key, recursive=True, most=1).objects)
    except StorageError as e:
        staging = _STAGING.fullmatch(folder.name)
        e.file = str(folder.parent / staging[1] if staging else folder)
        raise


def check_free(
    destination: StorePath, *, is_file: bool, overwrite: bool, is_completed: bool = False
) -> bool:
    """Refuse to replace what exists; returns whether something is replaced.

    `is_completed`: an earlier run of this command wrote it.

    Raises:
        DestinationError: it exists, has the wrong kind, or has work of other runs in it.
        StorageError: the store refused.
    """
    if not exists(destination):
        return False
    is_object = destination.store.head(destination.key) is not None
    if is_object != is_file:
        kinds = ("a folder", "a file") if is_file else ("a file", "a folder")
        inside = f"name a file inside it: {destination / 'model.safetensors'}"
        raise DestinationError(
            f"is {kinds[0]}, and the output is {kinds[1]}",
            file=destination,
            hint=inside if is_file else "name a new folder, or move the file away",
        )
    if not overwrite:
        hint = OVERWRITE_HINT
        if is_completed:
            hint = f"an earlier run of the same command has completed it; {hint}"
        raise DestinationError(
            "the destination already exists",
            file=destination,
            hint=hint,
            error_id="destination-exists",
        )
    _check_within(destination)
    return True


def check_object(path: StorePath) -> None:
    """Refuse an object that cannot be put, or that is a folder, by putting one beside it.

    Raises:
        DestinationError: it has the name of a folder, or its store is only read.
        StorageError: the store refused.
    """
    check_surroundings(path, ())
    if has_objects(path):
        raise DestinationError(
            "this is a folder, but a file is written here",
            file=path,
            hint="choose another file",
        )
    probe_store(staging_prefix(path), is_unsafe=True)  # to replace an object takes no conditions


def _check_within(destination: StorePath) -> None:
    """Refuse to replace a folder in which another run writes, or has left finished work."""
    for info in destination.store.list(destination.key, recursive=True).objects:
        folder, _, name = info.key.rpartition("/")
        inner = _STAGING.fullmatch(folder.rpartition("/")[2])
        if inner and name in (LEASE, RUN, PUBLISHING):
            raise DestinationError(
                f"a run has left its work for {inner[1]!r} inside the destination",
                file=destination,
                hint="run its command again to finish it; or `megtool clean` lists it, and with "
                "--yes removes it",
                error_id="interrupted-run",
            )
