"""Names of what workers leave in their staging folder, and the manifest of their run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megtool.errors import DestinationError
from megtool.process.worker_identity import WorkerIdentity
from megtool.storage.files import Files

MANIFEST = "workers"
PUBLISH_LOCK = "publish.lock"
PUBLISHER = "publisher"
"""Index and host of the worker that publishes."""
PUBLISHED = "published"
"""The journal of a publication that is complete, for workers that are started later."""

_OF_WORKER = re.compile(r"worker-(\d{1,9})\.(lock|journal|record|new|claim)")
_LINE = re.compile(r"megtool-workers 1 (\S+) (\d{1,9})\n")
_MAX_BYTES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A run of `count` workers for the plan with this fingerprint."""

    fingerprint: str
    count: int

    def create(self, files: Files, staging: Path, index: int) -> None:
        """Create the manifest, unless there is one; `index` is that of this worker."""
        data = f"megtool-workers 1 {self.fingerprint} {self.count}\n".encode()
        files.create_file(staging / MANIFEST, data, worker_file(index, "claim"))

    def check(self, existing: Manifest, staging: Path) -> None:
        """Refuse to join the run of another manifest.

        Raises:
            DestinationError: it is of another plan, or of another number of workers.
        """
        if existing == self:
            return
        other = "with another source or other options"
        if existing.fingerprint == self.fingerprint:
            other = f"of {existing.count} workers, not {self.count}"
        raise DestinationError(
            f"workers of a run {other} have begun to write this destination",
            file=staging,
            hint="start all workers with the same command, paths and versions; if that run is "
            f"given up, remove what it left: {clean_command(staging)}",
            error_id="foreign-workers",
        )


def read_manifest(files: Files, staging: Path) -> Manifest | None:
    """The manifest in a staging folder; None if there is none, or it is torn."""
    data = files.read_whole(staging / MANIFEST, at_most=_MAX_BYTES) or b""
    match = _LINE.fullmatch(data.decode(errors="replace"))
    return None if match is None else Manifest(fingerprint=match[1], count=int(match[2]))


def refuse_workers(files: Files, staging: Path) -> None:
    """Refuse to begin without --worker where workers have begun.

    Raises:
        DestinationError: they have.
    """
    manifest = read_manifest(files, staging)
    if manifest is not None:
        raise workers_have_begun(manifest.count, staging)


def workers_have_begun(count: int, staging: Path) -> DestinationError:
    """The error of a run without --worker where workers have begun."""
    return DestinationError(
        f"{count} workers have begun to write this destination",
        file=staging,
        hint=f"start them again to finish it: --worker 0/{count} and so on; or remove "
        f"what they left: {clean_command(staging)}",
        error_id="interrupted-run",
    )


def is_running_already(
    worker: WorkerIdentity, path: Path, cause: DestinationError
) -> DestinationError:
    """The error of a worker whose lock, at `path`, another process holds."""
    return DestinationError(
        f"{worker} is running already: {cause.message}",
        file=path,
        hint=f"start each worker once; indices are 0 to {worker.count - 1} ({worker.origin})",
        error_id="destination-locked",
    )


def clean_command(staging: Path) -> str:
    """The command that removes what runs left for the destination of a staging folder."""
    name = staging.name.removeprefix(".").removesuffix(".megtool")
    return f"megtool clean {staging.parent / name} --yes"


SCAN_PREFIX = ".megtool-"
"""Folders of the records of scans begin with this, and the verb: `.megtool-verify-HASH`."""


def worker_file(index: int, kind: str) -> str:
    """The name of a worker's `lock`, `journal` or `record`."""
    return f"worker-{index}.{kind}"


def find_worker_files(names: Iterable[str], *kinds: str) -> list[tuple[int, str]]:
    """Index and name of the files of workers among some names, of the given kinds or of all."""
    out = []
    for name in names:
        match = _OF_WORKER.fullmatch(name)
        if match and (not kinds or match[2] in kinds):
            out.append((int(match[1]), name))
    return sorted(out)


def find_missing_workers(names: Iterable[str], count: int) -> list[int]:
    """The workers of `count` without a record among some names."""
    done = {index for index, _ in find_worker_files(names, "record")}
    return [n for n in range(count) if n not in done]


def list_run_files(names: Iterable[str]) -> list[str]:
    """All files of a run of workers among some names: first its records, last the manifest.

    A record vouches for data, so it is removed before them.
    """
    names = set(names)
    records = [name for _, name in find_worker_files(names, "record")]
    others = [name for _, name in find_worker_files(names) if name not in records]
    last = (PUBLISHER, PUBLISH_LOCK, MANIFEST)
    return [*records, *others, *(name for name in last if name in names)]
