"""Write a plan into a staging folder and commit it to its destination."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.console import Progress
from megtool.errors import FormatError
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.plan.copies import ReshardPlan
from megtool.plan.execute import CopyReport, PlanCopy, execute
from megtool.reshard.staged_headers import check_headers
from megtool.reshard.written_digests import write_digests
from megtool.staging.open_stage import has_versions, open_stage
from megtool.staging.stage import Stage
from megtool.storage.files import Files

if TYPE_CHECKING:
    from megtool.staging.place import SharedRun

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
) -> Stage:
    """Return the stage of a plan, see `open_stage`.

    `rewrites_data`: `finish` of `write_staged` changes data of the plan.
    """
    return open_stage(
        destination,
        files=files,
        fingerprint=fingerprint,
        overwrite=execution.overwrite,
        is_file=is_file,
        sources=sources,
        worker=execution.worker_identity,
        rewrites_data=rewrites_data,
        is_unsafe=execution.unsafe_store,
        plan=plan,
        threads=execution.num_threads,
        is_tiled=execution.digest_mode is DigestMode.ALL,
    )


def write_staged(
    plan: ReshardPlan,
    stage: Stage,
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
    stage: Stage
    execution: ExecutionOptions
    verb: str
    progress: Progress
    expected: Mapping[str, int]
    overflow_hint: str

    def run(self) -> CopyReport:
        """Write all data, or the share of a worker; a worker that is the last completes all."""
        plan, stage, execution = self.plan, self.stage, self.execution
        total = plan.target.catalogue.num_bytes
        if stage.run is not None:
            return self._run_worker(stage.run)
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

    def _run_worker(self, run: SharedRun) -> CopyReport:
        from megtool.plan.worker_status import WorkerStatus
        from megtool.staging.workers.share_copy import copy_share, merge_shares, own_units

        stage, worker = self.stage, run.worker
        if not has_versions(self.plan):
            stage.messages.append(_NO_VERSIONS)
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
        if run.is_published:
            return replace(share.report(), worker=status)
        if run.record is None:
            stage.require_space(sum(f.size for f in self.plan.target.catalogue.files))
            self.progress(self.verb, 0, num_bytes)
            copy_share(
                share,
                stage,
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
        if run.is_published:
            return replace(report, worker=status)
        missing = tuple(stage.find_missing())
        state = replace(status, state="waiting" if missing else "publishing", missing=missing)
        state = replace(state, publisher=run.publisher)
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
