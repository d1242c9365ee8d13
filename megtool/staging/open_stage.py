"""The stage of a destination: which kind of place it is, and who writes there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.errors import UsageError
from megtool.plan.copies import ReshardPlan
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.folder.place import FolderPlace
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath, find_copying_store

if TYPE_CHECKING:
    from megtool.staging.store.place import StorePlace


def open_stage(
    destination: Path,
    *,
    files: Files,
    fingerprint: str,
    overwrite: bool = False,
    is_file: bool = False,
    sources: Sequence[Path] = (),
    worker: WorkerIdentity | None = None,
    rewrites_data: bool = False,
    is_unsafe: bool = False,
    plan: ReshardPlan | None = None,
    threads: int = 1,
    is_tiled: bool = True,
) -> Stage:
    """Return the stage in which a checkpoint is written until it is complete. Writes nothing.

    Args:
        destination: Where it then appears.
        files: What makes the system calls.
        fingerprint: Names the plan: another one starts anew.
        overwrite: What is at the destination may be replaced.
        is_file: The destination is a single file.
        sources: What is read, which the destination must not replace.
        worker: This process, if several write the checkpoint together.
        rewrites_data: Data are changed again before the commit.
        is_unsafe: Take a store that ignores conditions.
        plan: The plan, from which a store learns how files become parts.
        threads: How many fill those parts.
        is_tiled: All bytes pass through this process, so a store copies none itself.

    Raises:
        UsageError: workers cannot write these files together.
    """
    if not isinstance(destination, StorePath):
        place = FolderPlace(
            destination,
            files=files,
            fingerprint=fingerprint,
            overwrite=overwrite,
            is_file=is_file,
            sources=sources,
        )
        if worker is None:
            return Stage(place)
        from megtool.staging.workers.folder_run import FolderRun

        return Stage(place, FolderRun(place, worker, rewrites_data=rewrites_data))

    # Imported where needed, as what workers share is: a tenth of the start of a local run.
    from megtool.staging.store.place import StorePlace

    if worker is None and plan is not None and not has_versions(plan):
        fingerprint += f" {secrets.token_hex(8)}"  # no other run is to go on
    prefix = StorePlace(
        destination,
        files=files,
        fingerprint=fingerprint,
        overwrite=overwrite,
        is_file=is_file,
        sources=sources,
        is_unsafe=is_unsafe,
    )
    if rewrites_data:
        return _spool(prefix, worker)
    if plan is not None:
        from megtool.staging.store.part_plan import plan_file_parts

        prefix.follow_plan(
            partial(
                plan_file_parts,
                plan,
                is_file=is_file,
                copies_in=None if is_tiled else find_copying_store(destination),
                workers=1 if worker is None else worker.count,
                is_tiled=is_tiled,
            ),
            last=tuple(plan.target.final_files),
            threads=threads,
        )
    if worker is None:
        return Stage(prefix)
    from megtool.staging.workers.store_run import StoreRun

    return Stage(prefix, StoreRun(prefix, worker))


def _spool(place: StorePlace, worker: WorkerIdentity | None) -> Stage:
    from megtool.staging.store.spooled import SpooledPlace

    if worker is not None:
        raise UsageError(
            "compressed arrays and databases in a store are written by one process",
            file=place.destination,
            hint="--worker 0/1, or a local destination",
        )
    return Stage(SpooledPlace(place))


def has_versions(plan: ReshardPlan) -> bool:
    """Whether a change of the sources changes the fingerprint of the plan."""
    return all(file.has_version for source in plan.sources for file in source.files)
