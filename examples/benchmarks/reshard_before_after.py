"""Whether `megtool reshard` became slower: two versions in turn on the same source.

git worktree add --detach /tmp/before COMMIT
python examples/benchmarks/reshard_before_after.py --before /tmp/before [--gib 1] [--group NAME]...

Each round runs both versions, in fresh processes and in alternating order, so that both meet the
same state of the machine. `least` divides the fastest runs, `pairs` is the median of the ratios of
neighbours. OpenBLAS has one thread: at its start a second one spins for a while, where it may.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.groups import GROUPS, Group
from bench.race import run_job
from bench.table import Table, parser, show, times, verdict, workplace

LIMIT = 1.03
DEFAULT_GROUPS = ("rename", "hf", "rows", "columns")


def main() -> None:
    """All groups that are asked for, one source on disk at a time."""
    arguments = parser(__doc__ or "", gib=1)
    arguments.add_argument(
        "--before", type=Path, required=True, help="a checkout of the earlier version"
    )
    arguments.add_argument("--group", action="append", choices=[g.name for g in GROUPS])
    given = arguments.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    table = Table(
        title="Reshard before and after, without fsync",
        head=("job", "threads", "before s", "after s", "least", "median", "pairs", "limit"),
    )
    with workplace(given) as folder:
        root = Path(folder)
        for group in GROUPS:
            if group.name in (given.group or DEFAULT_GROUPS):
                measure(group, root, given, table)
        show(given, root, [table], (__doc__ or "").rpartition("\n\n")[2].replace("\n", " ").strip())


def measure(group: Group, root: Path, given: argparse.Namespace, table: Table) -> None:
    """The reshards of a group with digests, by one thread and by two."""
    source, num_bytes = group.make(root / "source", given.gib)
    for job in group.jobs:
        if job.kind != "reshard" or "digest" in job.options:
            continue
        options: dict[str, Any] = {"source": str(source), **job.options}
        if job.num_files:
            size = int(num_bytes * group.share) // job.num_files
            options["max_shard_size"] = f"{size // 1000}KB"
        for threads in (1, 2):
            before, after = alternate(options | {"threads": threads}, root, given)
            least = min(after) / min(before)
            pairs = statistics.median(b / a for a, b in zip(before, after, strict=True))
            table.add(
                job.name,
                str(threads),
                f"{min(before):.3f}",
                f"{min(after):.3f}",
                times(least),
                times(statistics.median(after) / statistics.median(before)),
                times(pairs),
                verdict(min(least, pairs), LIMIT),
                job=job.name,
                threads=threads,
                before=before,
                after=after,
            )
    shutil.rmtree(root / "source")


def alternate(
    options: Mapping[str, Any], root: Path, given: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Seconds of the runs before and after; the first round of each is not counted."""
    seconds: dict[Path | None, list[float]] = {given.before.resolve(): [], None: []}
    destination = root / "out"
    for number in range(given.rounds + 1):
        for tree in list(seconds)[:: 1 if number % 2 else -1]:
            shutil.rmtree(destination, ignore_errors=True)
            job = {**options, "destination": str(destination), "fsync": False}
            seconds[tree].append(run_job("reshard", job, tree=tree).seconds)
    before, after = (times_of[1:] for times_of in seconds.values())
    return before, after


if __name__ == "__main__":
    main()
