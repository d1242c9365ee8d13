"""Write a plan into a staging folder and commit it to its destination."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megtool.console import Progress
from megtool.errors import FormatError, UsageError
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.plan.copies import ReshardPlan
from megtool.plan.execute import CopyReport, PlanCopy, execute
from megtool.process.worker_identity import WorkerIdentity
from megtool.reshard.staged_headers import check_headers
from megtool.reshard.written_digests import write_digests
from megtool.staging.folder.stage import StagingFolder
from megtool.staging.protocol import CheckpointStage
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath

if TYPE_CHECKING:
    from megtool.staging.store.stage import StoreStage
    from megtool.staging.workers.share_copy import SharedStage
    from megtool.storage.stores.protocol import Store

_LOG = logging.getLogger(__name__)


def make_stage(
    execution: ExecutionOptions,
    destination: Path,
    *,
    files: Files,
    fingerprint: str,
    is_file: bool = False,
    sources: Sequence[Path] = (),
    rewrites_data: bool = False,
    plan: ReshardPlan | None = None,
) -> CheckpointStage:
    """Return the place where a plan is written until it is complete.

    Args:
        execution: How it is written.
        destination: Where it then appears.
        files: What makes the system calls.
        fingerprint: That of the plan.
        is_file: The destination is a single file.
        sources: What is read, which the destination must not replace.
        rewrites_data: `finish` of `write_staged` changes data of the plan.
        plan: The plan, for a destination in a store.
    """
    worker = execution.worker_identity
    run: dict[str, Any] = {
        "files": files,
        "fingerprint": fingerprint,
        "overwrite": execution.overwrite,
        "is_file": is_file,
        "sources": sources,
    }
    if worker is not None:
        run["worker"] = worker
    if isinstance(destination, StorePath):
        if worker is None and plan is not None and not _has_versions(plan):
            run["fingerprint"] += f" {secrets.token_hex(8)}"  # no other run is to go on
        stage = _store_stage(worker)(destination, is_unsafe=execution.unsafe_store, **run)
        return _follow_plan(stage, execution, plan, rewrites_data)
    if worker is None:
        return StagingFolder(destination, **run)
    from megtool.staging.workers.shared_folder import SharedStaging

    return SharedStaging(destination, rewrites_data=rewrites_data, **run)


def _store_stage(worker: WorkerIdentity | None) -> type[StoreStage]:
    # Imported where needed, as what workers share is: a tenth of the start of a local run.
    if worker is None:
        from megtool.staging.store.stage import StoreStage

        return StoreStage
    from megtool.staging.workers.shared_store import SharedStoreStage

    return SharedStoreStage


def find_copying_store(execution: ExecutionOptions, destination: Path) -> Store | None:
    """Return the store of a destination, if it copies what it has itself; that has no digests."""
    if execution.digest_mode is DigestMode.ALL or not isinstance(destination, StorePath):
        return None
    return destination.store if destination.store.can_copy else None


def _follow_plan(
    stage: StoreStage, execution: ExecutionOptions, plan: ReshardPlan | None, rewrites_data: bool
) -> CheckpointStage:
    """Return the stage of a store, which cuts the files of the plan into parts.

    Raises:
        UsageError: workers cannot write these files together.
    """
    worker = execution.worker_identity
    if rewrites_data and worker is not None:
        raise UsageError(
            "compressed arrays and databases in a store are written by one process",
            file=stage.destination,
            hint="--worker 0/1, or a local destination",
        )
    if rewrites_data:
        from megtool.staging.store.spooled import SpooledStage

        return SpooledStage(stage)
    if plan is not None:
        from megtool.staging.store.part_plan import plan_file_parts

        store = find_copying_store(execution, stage.destination)
        stage.follow_plan(
            partial(
                plan_file_parts,
                plan,
                is_file=stage.is_file,
                copies_in=store,
                workers=1 if worker is None else worker.count,
                is_tiled=execution.digest_mode is DigestMode.ALL,
            ),
            last=tuple(plan.target.final_files),
            threads=execution.num_threads,
        )
    return stage


def write_staged(
    plan: ReshardPlan,
    stage: CheckpointStage,
    execution: ExecutionOptions,
    *,
    verb: str,
    progress: Progress,
    expected: Mapping[str, int] | None = None,
    finish: Callable[[CopyReport], None] | None = None,
    overflow_hint: str = "",
) -> CopyReport:
    """Write a plan into `stage` and commit it to its destination.

    A worker of several writes its share; the last one commits, which the report's `worker` tells.
    If this fails, the staged data stay where that is possible, the next run resumes from them, and
    a log message says so.

    Args:
        plan: What is written.
        stage: Where it is written until it is complete.
        execution: How it is written.
        verb: What `progress` calls the operation.
        progress: Is called with bytes written and their total.
        expected: CRC-32C of source tensors by canonical name, compared as they are read.
        finish: Is called when all data are staged, before the commit: for files that are known only
            then, for checks, and for the digests (`write_digests`), which are those of stored
            tensors and files without it. What it raises is raised.
        overflow_hint: Refuse numbers that are too large for float16, with this hint, and discard
            the stage. Without it they are a warning.

    Raises:
        FormatError: with `overflow_hint`, some numbers became infinite; or what is staged cannot be
            read back.
        StorageError, SourceChangedError, DestinationError, DigestError: see `execute`.
    """
    writing = _StagedWrite(plan, stage, execution, verb, progress, expected or {}, overflow_hint)
    try:
        with stage:
            for message in stage.messages:
                _LOG.info("%s", message)
            copied = writing.run()
            if copied.worker is None or copied.worker.state == "published":
                writing.check_overflow(copied)
                if finish is not None:
                    finish(copied)
                else:
                    write_digests(
                        plan,
                        stage,
                        copied,
                        execution.digest_mode,
                        threads=execution.num_threads,
                    )
                check_headers(plan, stage)
                stage.commit(fsync=execution.fsync, threads=execution.num_threads)
    except BaseException:
        if stage.describe_resume() in stage.messages:  # there is something to resume from
            _LOG.warning("%s", stage.describe_resume())
        raise
    return copied


@dataclass(frozen=True, slots=True)
class _StagedWrite:
    """The data of `write_staged`, and its steps in an entered stage up to `finish`."""

    plan: ReshardPlan
    stage: CheckpointStage
    execution: ExecutionOptions
    verb: str
    progress: Progress
    expected: Mapping[str, int]
    overflow_hint: str

    def run(self) -> CopyReport:
        """Write all data, or the share of a worker; a worker that is the last completes all."""
        plan, stage, execution = self.plan, self.stage, self.execution
        total = plan.target.catalogue.num_bytes
        worker = getattr(stage, "worker", None)
        if worker is not None:
            return self._run_worker(cast("SharedStage", stage), worker)
        stage.require_space(sum(f.size for f in plan.target.catalogue.files))
        self.progress(self.verb, 0, total)
        return execute(
            plan,
            stage,
            files=stage.files,
            threads=execution.num_threads,
            memory_bytes=execution.memory_bytes,
            digest=execution.digest_mode,
            progress=lambda n: self.progress(self.verb, n, total),
            expected=self.expected,
        )

    def check_overflow(self, copied: CopyReport) -> None:
        """Warn of numbers that became infinite, or refuse them.

        Raises:
            FormatError: with `overflow_hint`, there are some; the staged data are discarded.
        """
        if copied.overflowed and self.overflow_hint:
            self.stage.discard()
            raise FormatError(
                copied.overflows, tensor=next(iter(copied.overflowed)), hint=self.overflow_hint
            )
        for message in filter(None, (copied.overflows, copied.roundings)):
            self.stage.messages.append(message)
            _LOG.warning("%s", message)

    def _run_worker(self, stage: SharedStage, worker: WorkerIdentity) -> CopyReport:
        from megtool.plan.worker_status import WorkerStatus
        from megtool.staging.workers.share_copy import copy_share, merge_shares, own_units

        if not _has_versions(self.plan):
            self.stage.messages.append(_NO_VERSIONS)
            _LOG.warning("%s", _NO_VERSIONS)
        num_bytes = 0  # of the share
        share = self._start_copy(lambda n: self.progress(self.verb, n, num_bytes), is_shared=True)
        own = own_units(share, worker)
        num_bytes = sum(share.units[n].num_bytes for n in own)
        status = WorkerStatus(
            index=worker.index,
            count=worker.count,
            state="complete",
            num_bytes=num_bytes,
            origin=worker.origin,
        )
        if stage.is_published:
            return replace(share.report(), worker=status)
        if stage.record is None:
            stage.require_space(sum(f.size for f in self.plan.target.catalogue.files))
            self.progress(self.verb, 0, num_bytes)
            copy_share(
                share,
                stage,
                worker,
                self.plan.fingerprint,
                expected=self.expected,
                fsync=self.execution.fsync,
            )
        records = stage.begin_publication()
        if records is not None:
            merged = self._start_copy(None)
            merged.units = share.units
            copied = merge_shares(merged, stage, records, expected=self.expected)
            return replace(copied, worker=replace(status, state="published"))
        report = share.report()
        if stage.is_published:
            return replace(report, worker=status)
        missing = tuple(stage.find_missing())
        state = replace(status, state="waiting" if missing else "publishing", missing=missing)
        state = replace(state, publisher=stage.publisher)
        return replace(report, worker=state)

    def _start_copy(
        self, progress: Callable[[int], None] | None, *, is_shared: bool = False
    ) -> PlanCopy:
        return PlanCopy(
            self.plan,
            self.stage,
            files=self.stage.files,
            threads=self.execution.num_threads,
            memory_bytes=self.execution.memory_bytes,
            digest=self.execution.digest_mode,
            progress=progress,
            is_shared=is_shared,
        )


def written_files(plan: ReshardPlan) -> tuple[str, ...]:
    """Relative paths of all files that a plan writes."""
    target = plan.target
    names = [f.path for f in target.catalogue.files]
    return tuple(sorted([*names, *(path for path, _ in target.iter_small_files())]))


_NO_VERSIONS = (
    "the server of the source tells neither versions nor times of files: if one changes before all "
    "workers are complete, nobody notices"
)


def _has_versions(plan: ReshardPlan) -> bool:
    """Whether a change of the sources changes the fingerprint of the plan."""
    return all(file.has_version for source in plan.sources for file in source.files)
