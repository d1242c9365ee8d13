"""How long `megtool reshard` takes, as a multiple of `cp`; what it reads, writes and holds.

python examples/benchmarks/reshard_speed.py [--gib 4] [--dir DIR] [--rounds 5] [--only WORD]
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.race import Entrant, Result, race, run_job
from bench.synthetic import COLUMNS, ROWS, Synthetic, llama, without_config
from bench.table import Table, mib, parser, show, times, verdict, workplace

CONTIGUOUS, STRIDED, CAST = (1.05, 0.6), (1.5, 1.0), (1.5, 1.5)
MEMORY_LIMIT = 256 << 20
AMPLIFICATION_LIMIT = 1.02
DIGEST_LIMIT = 0.4

Options = Mapping[str, Any]
# A group's jobs have one source: (name, options, limits for one and two threads).
Job = tuple[str, Options, tuple[float, float] | None]


def groups(root: Path, gib: float) -> Iterator[tuple[str, Path, int, float, list[Job]]]:
    """Each source in turn: name, folder, bytes, bytes out per byte in, and its jobs.

    One lies on disk at a time, so that all of it stays in the page cache.
    """
    made = llama(root / "hf", gib)
    plain = without_config(made, root / "plain")
    shard = f"{made.num_bytes // 4 // 1000}KB"
    torch_dist = {"to": "torch_dist", "pp": 2}
    rename: Job = ("rename", {"rename": ["model.*=student.*"], "max_shard_size": shard}, CONTIGUOUS)
    yield "rename", plain, made.num_bytes, 1, [rename]
    hf: list[Job] = [
        ("HF → torch_dist PP2", torch_dist, CONTIGUOUS),
        ("HF → torch_dist PP2, --digest none", {**torch_dist, "digest": "none"}, None),
        ("HF → torch_dist PP2, --digest all", {**torch_dist, "digest": "all"}, None),
        ("HF → torch_dist TP2, all of a model", {"to": "torch_dist", "tp": 2}, None),
    ]
    yield "HF → torch_dist", made.folder, made.num_bytes, 1, hf
    shutil.rmtree(plain)
    shutil.rmtree(made.folder)
    cut = cut_over_ranks(root, gib, ROWS, tp=4)
    every = {"select": ["*"]}  # a part of a model: these tensors alone
    job = "torch_dist TP4 → TP2, tensors cut by rows"
    yield "rows", root / "cut", cut.num_bytes, 1, [(job, {**every, "tp": 2}, CONTIGUOUS)]
    shutil.rmtree(root / "cut")
    for before, after in ((4, 2), (2, 4)):
        cut = cut_over_ranks(root, gib, COLUMNS, tp=before)
        job = f"torch_dist TP{before} → TP{after}, tensors cut by columns"
        yield "columns", root / "cut", cut.num_bytes, 1, [(job, {**every, "tp": after}, STRIDED)]
        shutil.rmtree(root / "cut")
    made = llama(root / "hf", gib, dtype="float32")
    options = {"dtype": "bf16", "max_shard_size": f"{made.num_bytes // 8 // 1000}KB"}
    casts: list[Job] = [
        ("HF fp32 → bf16", options, CAST),
        ("HF fp32 → bf16, torch imported before", {**options, "preload": "torch"}, CAST),
    ]
    yield "cast", made.folder, made.num_bytes, 0.5, casts
    shutil.rmtree(made.folder)


def cut_over_ranks(root: Path, gib: float, parts: tuple[str, ...], *, tp: int) -> Synthetic:
    """Write a torch_dist checkpoint of some of a model's tensors to `root/cut`."""
    made = llama(root / "whole", gib, only=parts)
    options = {
        "source": str(made.folder),
        "destination": str(root / "cut"),
        "to": "torch_dist",
        "tp": tp,
        "select": ["*"],
    }
    run_job("reshard", options)
    shutil.rmtree(made.folder)
    return made


def measure(given: argparse.Namespace, root: Path) -> list[Table]:
    """All races, with and without fsync."""
    modes = {"no": (False,), "yes": (True,), "both": (False, True)}[given.fsync]
    tables = [speed_table(durable) for durable in modes]
    moved = Table(
        title="Bytes moved and anonymous memory",
        head=("job", "digest", "threads", "(read + written) / payload", "limit", "MiB", "limit"),
    )
    for name, source, num_bytes, share, jobs in groups(root, given.gib):
        if given.only and given.only not in name:
            continue
        for durable, table in zip(modes, tables, strict=True):
            entrants = [
                entrant(job, threads, durable, int(num_bytes * (1 + share)))
                for job in jobs
                for threads in (1, 2)
            ]
            found = race(entrants, source, root / "scratch", rounds=given.rounds, fsync=durable)
            for result in found:
                add_speed(table, result)
            add_digest_cost(table, found)
            if durable == modes[0]:
                for result in found:
                    add_moved(moved, result)
    return [*tables, moved]


def entrant(job: Job, threads: int, durable: bool, ideal_bytes: int) -> Entrant:
    """A job at a number of threads."""
    name, options, limits = job
    return Entrant(
        name=name,
        options={**options, "threads": threads, "fsync": durable},
        ideal_bytes=ideal_bytes,
        limit=limits[threads - 1] if limits else None,
    )


def speed_table(durable: bool) -> Table:
    """An empty table of times."""
    what = "with fsync on both sides" if durable else "without fsync"
    head = ("job", "digest", "threads", "s", "cp s", "x cp (min/min)", "limit", "x cp (median)")
    return Table(title=f"Time, {what}", head=(*head, "spread", "whole process s"))


def add_speed(table: Table, result: Result) -> None:
    """A row of times."""
    job = result.entrant
    table.add(
        job.name,
        job.options.get("digest", "buffered"),
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
        copies=[*result.before, *result.after],
    )


def add_digest_cost(table: Table, found: list[Result]) -> None:
    """Rows with what `--digest all` adds to `none`, for each number of threads."""
    by_digest = {(r.entrant.options.get("digest"), r.entrant.options["threads"]): r for r in found}
    for threads in (1, 2):
        pair = by_digest.get(("all", threads)), by_digest.get(("none", threads))
        if pair[0] and pair[1]:
            least = pair[0].least - pair[1].least
            cost = verdict(least, DIGEST_LIMIT)
            median = times(pair[0].median - pair[1].median)
            name = "what --digest all adds to none"
            cells = (name, "all", str(threads), "", "", times(least), cost, median, "", "")
            table.add(*cells, job=name, threads=threads, least=least)


def add_moved(table: Table, result: Result) -> None:
    """A row of what a job moved and held."""
    job = result.entrant
    peak = result.watched.peak_bytes() if result.watched else 0
    table.add(
        job.name,
        job.options.get("digest", "buffered"),
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
        "the same, --digest all": {"to": "torch_dist", "tp": 2, "digest": "all"},
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
    options.add_argument("--only", help="races whose group holds this word; no memory over size")
    options.add_argument("--fsync", choices=("no", "yes", "both"), default="both")
    options.add_argument("--sizes", default="1,4,16", help="GiB of the checkpoints of holes")
    given = options.parse_args()
    with workplace(given) as folder:
        root = Path(folder)
        tables = measure(given, root)
        if not given.only:
            tables.append(grow(given, root))
        note = (
            "Random bytes, files in the page cache. `s` is the fastest `reshard()` in a fresh "
            "process; cp is `cp -r --reflink=never` just before and just after."
        )
        show(given, root, tables, note)


if __name__ == "__main__":
    main()
