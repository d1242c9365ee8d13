"""Reading that several workers share out: each reads its share, and the last merges and reports.

A scan is a function that reads a checkpoint in jobs, by `run_scan`. A worker calls it once, does
only its own share of every list of jobs in it, and signs off with the results in a folder that all
workers see. The last one calls it again, with the results of all. The function sees None for
the results of other workers the first time, and what it returns then is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megtool.process.threads import map_in_threads
from megtool.process.worker_identity import WorkerIdentity

Job = TypeVar("Job")
Result = TypeVar("Result")


class SharedScan:
    """One worker's part of a scan, or with the results of all workers the whole.

    `is_partial`: other workers do the rest, and their results are None. Results are plain JSON.
    """

    def __init__(
        self, worker: WorkerIdentity, results: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.worker = worker
        self.is_partial = results is None
        self.results: dict[str, dict[str, Any]] = {}
        self.num_bytes = 0
        self._known = results or {}

    def part(self, label: str) -> ScanPart:
        """The part of the scan with this label: one list of jobs."""
        return ScanPart(self, label)

    def run(
        self,
        label: str,
        jobs: Sequence[Job],
        name: Callable[[Job], str],
        size: Callable[[Job], int],
        work: Callable[[Job], Any],
        *,
        threads: int,
    ) -> list[Any]:
        """The results of jobs in their order; see `run_scan`."""
        if not self.is_partial:
            known = self._known.get(label, {})
            missing = [job for job in jobs if name(job) not in known]
            added = dict(
                zip(map(name, missing), map_in_threads(work, missing, threads=threads), strict=True)
            )
            return [known[n] if (n := name(job)) in known else added[n] for job in jobs]
        sizes = [size(job) for job in jobs]
        total, done = sum(sizes), 0
        own = set()
        for number, num_bytes in enumerate(sizes):
            middle = done + num_bytes // 2
            if middle * self.worker.count // max(total, 1) == self.worker.index:
                own.add(number)
            done += num_bytes
        numbers = sorted(own)
        values = map_in_threads(work, [jobs[n] for n in numbers], threads=threads)
        results = dict(zip(numbers, values, strict=True))
        self.num_bytes += sum(sizes[n] for n in numbers)
        results_by_name = self.results.setdefault(label, {})
        results_by_name.update((name(jobs[n]), value) for n, value in results.items())
        return [results.get(n) for n in range(len(jobs))]


@dataclass(frozen=True, slots=True)
class ScanPart:
    """One list of jobs of a scan, which `label` names."""

    scan: SharedScan
    label: str


def run_scan(
    part: ScanPart | None,
    jobs: Sequence[Job],
    work: Callable[[Job], Result],
    *,
    name: Callable[[Job], str],
    size: Callable[[Job], int],
    threads: int,
) -> list[Result | None]:
    """The results of `work` on every job, in their order; None where another worker does it.

    Args:
        part: Their part in the scan of several workers, if there are any.
        jobs: What is to be done, the same for all workers.
        work: Returns plain JSON values.
        name: Names a job in its list.
        size: The bytes of a job, by which shares are balanced.
        threads: The number of threads.
    """
    if part is None:
        return list(map_in_threads(work, jobs, threads=threads))
    return part.scan.run(part.label, jobs, name, size, work, threads=threads)
