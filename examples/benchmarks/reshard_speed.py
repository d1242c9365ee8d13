"""How long `megtool reshard` takes, as a multiple of `cp`; what it reads, writes and holds.

python examples/benchmarks/reshard_speed.py [--gib 4] [--dir DIR] [--rounds 5] [--group NAME]...

Groups are printed, and written to --table and --json, as soon as each is measured.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from bench.groups import GROUPS, Job
from bench.race import Entrant, Result, race, run_job
from bench.synthetic import llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

MEMORY_LIMIT = 256 << 20
AMPLIFICATION_LIMIT = 1.02
DIGEST_LIMIT = 0.4
NOTE = (
    "Random bytes, files in the page cache. `s` is the fastest `reshard()` in a fresh process; cp "
    "is `cp -r --reflink=never` of the source, just before and just after each run. `x fastest "
    "cp` divides by the fastest of all copies of the race (the jobs with one source), since copies "
    "come fast and slow; the median is of the runs, each over the mean of the copies around it."
)

MEMORY = "memory"  # the group that is no race


def measure(given: argparse.Namespace, root: Path) -> None:
    """All races, with and without fsync, one group's source on disk at a time.

    So all of it stays in the page cache, and a run that is stopped has told all it measured.
    """
    modes = {"no": (False,), "yes": (True,), "both": (False, True)}[given.fsync]
    tables = [speed_table(durable) for durable in modes]
    moved = Table(
        title="Bytes moved and anonymous memory",
        head=("job", "digest", "threads", "(read + written) / payload", "limit", "MiB", "limit"),
    )
    wanted = given.group or [*(g.name for g in GROUPS), MEMORY]
    for group in [g for g in GROUPS if g.name in wanted]:
        source, num_bytes = group.make(root / "source", given.gib)
        for durable, table in zip(modes, tables, strict=True):
            entrants = [
                entrant(job, threads, durable, num_bytes, group.share)
                for job in group.jobs
                for threads in (1, 2)
            ]
            found = race(entrants, source, root / "scratch", rounds=given.rounds, fsync=durable)
            for result in found:
                add_speed(table, result)
            add_digest_cost(table, found)
            if durable == modes[0]:
                for result in found:
                    add_moved(moved, result)
            show(given, root, [*tables, moved], NOTE)
        shutil.rmtree(root / "source")
    if MEMORY in wanted:
        show(given, root, [*tables, moved, grow(given, root)], NOTE)


def entrant(job: Job, threads: int, durable: bool, num_bytes: int, share: float) -> Entrant:
    """A job at a number of threads, of a source of `num_bytes`."""
    options = {**job.options, "threads": threads, "fsync": durable}
    if job.num_files:
        options["max_shard_size"] = f"{int(num_bytes * share) // job.num_files // 1000}KB"
    return Entrant(
        name=job.name,
        kind=job.kind,
        options=options,
        ideal_bytes=int(num_bytes * (1 + share)),
        limit=job.limits[threads - 1] if job.limits else None,
    )


def speed_table(durable: bool) -> Table:
    """An empty table of times."""
    what = "with fsync on both sides" if durable else "without fsync"
    head = ("job", "digest", "threads", "s", "fastest cp s", "x fastest cp", "limit")
    head = (*head, "x cp around it (median)", "spread", "whole process s")
    return Table(title=f"Time, {what}", head=head)


def add_speed(table: Table, result: Result) -> None:
    """A row of times."""
    job = result.entrant
    table.add(
        job.name,
        job.options.get("digest", "all"),
        str(job.options["threads"]),
        f"{min(result.seconds):.2f}",
        f"{result.copy_least:.2f}",
        times(result.least),
        verdict(result.least, job.limit),
        times(result.median),
        f"{times(min(result.pairs))}-{times(max(result.pairs))}",
        f"{min(result.process_seconds):.2f}",
        job=job.name,
        threads=job.options["threads"],
        least=result.least,
        median=result.median,
        seconds=result.seconds,
        copies=result.copies,
    )


def add_digest_cost(table: Table, found: list[Result]) -> None:
    """Rows with what digests of everything add to `none`, for each number of threads."""
    for plain in found:
        options = dict(plain.entrant.options)
        if options.pop("digest", None) != "none":
            continue
        for digested in [r for r in found if r.entrant.options == options]:
            threads, least = options["threads"], digested.least - plain.least
            cost = verdict(least, DIGEST_LIMIT)
            median = times(digested.median - plain.median)
            name = "what digests add to --digest none"
            cells = (name, "all", str(threads), "", "", times(least), cost, median, "", "")
            table.add(*cells, job=name, threads=threads, least=least)


def add_moved(table: Table, result: Result) -> None:
    """A row of what a job moved and held."""
    job = result.entrant
    peak = result.peak_bytes
    table.add(
        job.name,
        job.options.get("digest", "all"),
        str(job.options["threads"]),
        f"{result.amplification:.3f}",
        verdict(result.amplification, AMPLIFICATION_LIMIT),
        mib(peak),
        "✓" if peak <= MEMORY_LIMIT else "✗",
        job=job.name,
        threads=job.options["threads"],
        amplification=result.amplification,
        peak_bytes=peak,
    )


def grow(given: argparse.Namespace, root: Path) -> Table:
    """The peak of anonymous memory over sizes; data are holes, so only memory is told."""
    jobs = {
        "HF → torch_dist TP2": {"to": "torch_dist", "tp": 2},
        "the same, --digest none": {"to": "torch_dist", "tp": 2, "digest": "none"},
        "HF bf16 → fp16": {"dtype": "fp16"},
    }
    sizes = [float(x) for x in given.sizes.split(",")]
    head = ("job, two threads", *(f"{gib:g} GiB" for gib in sizes), "limit")
    table = Table(title="Peak anonymous memory over size (MiB)", head=head)
    peaks: dict[str, list[int]] = {name: [] for name in jobs}
    for gib in sizes:
        made = llama(root / "holes", gib, sparse=True)
        for name, options in jobs.items():
            out = root / "scratch" / "out"
            places = {"source": str(made.folder), "destination": str(out), "fsync": False}
            run = run_job("reshard", {**places, "threads": 2, **options}, watch=True)
            peaks[name].append(run.peak_bytes())
            shutil.rmtree(out)
        shutil.rmtree(made.folder)
    for name, seen in peaks.items():
        kept = f"≤ 256 {'✓' if max(seen) <= MEMORY_LIMIT else '✗'}"
        table.add(name, *(mib(n) for n in seen), kept, job=name, peaks=seen)
    return table


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    names = [*(g.name for g in GROUPS), MEMORY]
    options.add_argument("--group", action="append", choices=names, help="only this; repeatable")
    options.add_argument("--fsync", choices=("no", "yes", "both"), default="both")
    options.add_argument("--sizes", default="1,4,16", help="GiB of the checkpoints of holes")
    given = options.parse_args()
    with workplace(given) as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
