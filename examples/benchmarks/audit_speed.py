"""The audit of a run beside reading its bytes: seconds, and peak memory.

python examples/benchmarks/audit_speed.py [--gib 6] [--saves 3] [--rounds 5] [--threads 2]

A run of a Llama-shaped model in bfloat16 with fp32 master weights and moments is made by
`reshard`, its saves different from each other. Then all its files are read to nothing by the same
number of threads, and audited, in turns, with the page cache emptied of them before (`cold`) and
not (`warm`). A run on a disk is cold: it is larger than memory. The ratio is the median of those of
the rounds. Each process audits with --quick first, which imports what it needs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.table import Table, parser, show, times, verdict, workplace
from bench.trained import trained

LIMIT, MAX_MIB = 1.1, 256
BLOCK = 4 << 20


def make_run(root: Path, gib: float, saves: int) -> Path:
    """Saves with optimizer state, each of other numbers."""
    run = root / "run"
    source, _ = trained(root, gib / saves, to="torch_dist", optimizer="fully_reshardable", tp=2)
    iteration = next(source.rglob(".metadata")).parent
    for number in range(1, saves + 1):
        folder = run / f"iter_{number:07d}"
        folder.parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", iteration, folder], check=True)
        scale_exponents(folder, number)
    (run / "latest_checkpointed_iteration.txt").write_text(str(saves))
    return run


def scale_exponents(folder: Path, number: int) -> None:
    """Change some bytes in the middle of every data file, so that saves differ."""
    for path in folder.glob("*.distcp"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(bytes([number]) * 8)


def files_of(run: Path) -> list[Path]:
    """All files of a run."""
    return sorted(p for p in run.rglob("*") if p.is_file())


def forget(paths: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(paths: Sequence[Path], threads: int) -> float:
    """Seconds in which threads read all files into a buffer each."""

    def read(path: Path) -> None:
        buffer = bytearray(BLOCK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, paths))
    return time.perf_counter() - start


def audit(run: Path, threads: int) -> tuple[float, int]:
    """Seconds of the audit in a process of its own, without its imports, and its peak in bytes."""
    code = (
        "import sys, resource, megtool; from megtool.commands.audit import audit;"
        f"megtool.audit(sys.argv[1], quick=True);"
        f"r = megtool.audit(sys.argv[1], threads={threads});"
        "print(r.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, run],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    seconds, kib = done.stdout.split()
    return float(seconds), int(kib) * 1024


def measure(run: Path, given: argparse.Namespace, *, cold: bool) -> tuple[list[float], ...]:
    """Seconds of reading and of auditing in turns, and peaks of memory."""
    paths = files_of(run)
    reads, audits, peaks = list[float](), list[float](), list[float]()
    for _ in range(given.rounds):
        for job in ("read", "audit"):
            if cold:
                forget(paths)
            if job == "read":
                reads.append(read_all(paths, given.threads))
            else:
                seconds, peak = audit(run, given.threads)
                audits.append(seconds)
                peaks.append(peak)
    return reads, audits, peaks


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=6)
    options.set_defaults(rounds=5)
    options.add_argument("--saves", type=int, default=3)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = options.parse_args()
    table = Table(
        title="Audit of a run",
        head=("page cache", "GiB", "read, s", "audit, s", "ratio", "limit", "peak MiB", "limit"),
    )
    with workplace(given) as folder:
        run = make_run(Path(folder), given.gib, given.saves)
        size = sum(p.stat().st_size for p in files_of(run)) / 2**30
        for cold in (True, False):
            reads, audits, peaks = measure(run, given, cold=cold)
            read, audited, peak = statistics.median(reads), statistics.median(audits), max(peaks)
            ratio = statistics.median(b / a for a, b in zip(reads, audits, strict=True))
            table.add(
                "cold" if cold else "warm",
                f"{size:.2f}",
                f"{read:.2f}",
                f"{audited:.2f}",
                times(ratio),
                verdict(ratio, LIMIT if cold else None),
                f"{peak / 2**20:.0f}",
                verdict(peak / 2**20, MAX_MIB),
                cold=cold,
                read_s=read,
                audit_s=audited,
                ratio=ratio,
                peak_bytes=peak,
            )
        show(given, Path(folder), [table])


if __name__ == "__main__":
    main()
