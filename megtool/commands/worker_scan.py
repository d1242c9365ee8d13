"""Verbs that only read, shared out to several workers: the last of them reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megtool.console import format_bytes
from megtool.options.groups import ScanShare
from megtool.plan.worker_status import WorkerStatus
from megtool.process.worker_identity import parse_worker
from megtool.report.sections import Report, Row
from megtool.staging.workers.scan_records import scan_folder, share_scan
from megtool.transport.reading.shared_scan import SharedScan

AnyReport = TypeVar("AnyReport", bound=Report)

_UNRELATED = ("worker", "worker_dir", "threads", "report")
"""Options that may differ between workers, as nothing depends on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReport(Report):
    """The report of a worker that is not the last: it has read its share of `source`."""

    source: str
    worker: WorkerStatus
    folder: str

    @property
    def is_whole(self) -> bool:
        """False: the last worker reports."""
        return False

    def to_json(self) -> dict[str, Any]:
        values = {"source": self.source, "folder": self.folder, "worker": self.worker.to_json()}
        return self.add_remarks(values)

    def title(self) -> str:
        return self.source

    def rows(self) -> Iterator[Row]:
        yield "worker", _describe(self.worker)
        if self.worker.num_bytes:
            yield "share", format_bytes(self.worker.num_bytes)
        is_waiting = self.worker.state == "waiting"
        yield "records", self.folder + (", which all workers have to see" if is_waiting else "")


def _describe(worker: WorkerStatus) -> str:
    """How a worker's part in a scan ended."""
    who = f"worker {worker.index} of {worker.count}"
    if worker.state == "waiting":
        return worker.describe().rpartition(";")[0] + "; the last one reports"
    return f"{who} is complete, and so are the others: one of them reports"


def run_shared(
    options: ScanShare,
    verb: str,
    locations: Sequence[Path],
    scan: Callable[[SharedScan | None], AnyReport],
) -> AnyReport | ShareReport:
    """The report of `scan`; of several workers only the last one has it, and the others a share's.

    Raises:
        UsageError: `--worker` names no worker.
        DestinationError: the folder for records cannot be written.
    """
    worker = parse_worker(options.worker)
    if worker is None:
        return scan(None)
    key = {k: v for k, v in asdict(options).items() if k not in _UNRELATED}
    parent = options.worker_dir or Path.cwd()
    folder = scan_folder(parent, verb, (worker.count, repr(key)), locations)
    status, report = share_scan(worker, folder, scan)
    if report is None:
        source = " ".join(str(path) for path in locations)
        return ShareReport(source=source, worker=status, folder=str(folder))
    return replace(report, notes=(*report.notes, f"{worker.count} workers have read it together"))
