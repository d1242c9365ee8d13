"""Audit the saves of a run: which of them went wrong, and how."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator

from megtool.audit.run_audit import RunAudit
from megtool.audit.run_saves import RunFolder, RunSave, read_run
from megtool.audit.save_scan import ScanPlan, scan_save
from megtool.commands.options.checkpoints import AuditOptions
from megtool.commands.reports.audit import AuditReport
from megtool.console import Progress, several, silent
from megtool.errors import FormatError, UsageError
from megtool.options.effects import check_effects

_LOG = logging.getLogger(__name__)
_MIN_INTERVAL = 0.1


def audit(options: AuditOptions, *, progress: Progress = silent) -> AuditReport:
    """Read the saves of a run one after the other, and report which of them went wrong.

    Every byte of tensors is read at most once; of each save only sums, checksums and small sketches
    are kept. With `quick` headers and checksums are read alone. With `watch` new saves are audited
    when they are complete, until the process is interrupted, or step `until` was audited; the
    `report` is written again after each.

    Raises:
        FormatError: there is no run.
        UsageError: an option has no effect here.
    """
    check_effects(options)
    run = read_run(options.run)
    chosen = _steps(options, run)
    watch = _Watch(options, progress)
    with watch.interruptible():
        watch.audit_ready(run, chosen, is_last=options.watch is None)
        while options.watch is not None and not watch.is_done():
            if watch.stopped.wait(max(options.watch, _MIN_INTERVAL)):
                break
            with contextlib.suppress(FormatError):  # a folder may be on its way out
                run = read_run(options.run)
            watch.audit_ready(run, chosen, is_last=False)
    if options.watch is None or watch.is_done():
        watch.run_audit.finish(run)
    report = watch.report(run)
    if report.saves and not report.findings and all(s.unknown_kind for s in report.saves):
        raise FormatError(
            f"none of the {len(report.saves)} saves is read: "
            f"{(report.saves[0].unknown_kind or ('',) * 3)[2]}",
            file=options.run,
            hint="megtool cannot read what saved them, which says nothing against them",
            error_id="not-a-checkpoint",
        )
    return report


def _steps(options: AuditOptions, run: RunFolder) -> range | None:
    """The steps to audit, if not all."""
    if options.first is None and options.last is None:
        return None
    first, last = options.first or 0, options.last if options.last is not None else 1 << 62
    steps = range(first, last + 1)
    if not any(s.step in steps for s in run.saves) and options.watch is None:
        there = ", ".join(str(s.step) for s in run.saves[:8])
        raise UsageError(f"no save is between {first} and {last}", hint=f"there are: {there}")
    return steps


class _Watch:
    """The audit of a run that may still go on."""

    def __init__(self, options: AuditOptions, progress: Progress) -> None:
        self.options, self.progress = options, progress
        self.run_audit = RunAudit()
        self.stopped = threading.Event()
        self._audited: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._done = self._total = 0
        self._seconds = 0.0

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """With --watch the first interruption ends the watch, and the report is still written."""
        if self.options.watch is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, frame: object) -> None:
            self.stopped.set()
            for s, handler in before.items():
                signal.signal(s, handler)

        for s in before:
            signal.signal(s, stop)
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def is_done(self) -> bool:
        """Whether the last step that is asked for was audited."""
        until = self.options.until
        return self.stopped.is_set() or (until is not None and until in self._audited)

    def audit_ready(self, run: RunFolder, steps: range | None, *, is_last: bool) -> None:
        """Audit all saves that are complete and were not audited yet."""
        saves = [
            s
            for s in run.saves
            if s.step not in self._audited and (steps is None or s.step in steps)
        ]
        ready = [s for s in saves if is_last or self._is_ready(run, s)]
        settings = ScanPlan(
            threads=self.options.threads, is_quick=self.options.quick, progress=self._count
        )
        for save in ready:
            if self.stopped.is_set():
                return
            self._total = self._done + sum(_size(s) for s in ready[ready.index(save) :])
            start = time.monotonic()
            findings = self.run_audit.add(scan_save(save, settings))
            self._seconds += time.monotonic() - start
            self._audited.add(save.step)
            if self.options.watch is not None:
                _LOG.info("step %d: %s", save.step, several(len(findings), "finding"))
                for finding in findings:
                    _LOG.warning("step %d, %s: %s", finding.step, finding.id, finding.text())
        if ready and self.options.watch is not None and self.options.report is not None:
            from megtool.commands.pages.audit import audit_page
            from megtool.report.html import write_page

            write_page(self.options.report, audit_page(self.report(run)))

    def _is_ready(self, run: RunFolder, save: RunSave) -> bool:
        """Whether a save is complete: a later one follows, the tracker names it or a later one, or,
        without a tracker, it has not grown since the last look."""
        if save.step < run.saves[-1].step:
            return True
        if run.tracked is not None:
            return run.tracked >= save.step
        size = _size(save)
        before, self._sizes[save.step] = self._sizes.get(save.step), size
        return size > 0 and before == size

    def _count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self.progress("audit", self._done, max(self._total, self._done))

    def report(self, run: RunFolder) -> AuditReport:
        """What was found so far."""
        audit = self.run_audit
        notes = dict.fromkeys(f"step {s.step}: {note}" for s in audit.saves for note in s.notes)
        return AuditReport(
            path=str(self.options.run),
            is_quick=self.options.quick,
            saves=tuple(audit.saves),
            findings=tuple(sorted(audit.findings, key=lambda f: f.step)),
            points=tuple(audit.points),
            read_bytes=sum(s.read_bytes for s in audit.saves),
            total_bytes=sum(s.total_bytes for s in audit.saves),
            seconds=self._seconds,
            tracked=run.tracked,
            notes=tuple(notes),
        )


def _size(save: RunSave) -> int:
    """The bytes of a save's files; 0 if they cannot be listed."""
    from megtool.storage.files import Files

    files, total = Files(), 0
    try:
        for path in files.tree(save.path)[0]:
            status = files.stat(path)
            total += 0 if status is None else status.st_size
    except (OSError, FormatError):
        return 0
    return total
