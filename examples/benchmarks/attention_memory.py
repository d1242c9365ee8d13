"""Peak memory and time of attention over long rows, by megtool and by transformers.

python examples/benchmarks/attention_memory.py [--lengths 8,16,32,64,128] [--limit-gib 4]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import attention
from bench.race import Run, run_job
from bench.table import Table, mib, parser, show, workplace

ENGINES = {
    "causal": ("megtool", "sdpa", "eager"),
    "packed": ("megtool", "sdpa", "eager"),
    "soft caps and windows": ("megtool", "eager"),
}
"""Whose attention runs a case; by sdpa transformers leaves soft caps out."""


def extra_bytes(run: Run) -> int:
    """Anonymous memory that the pass adds."""
    began = run.phases["job"]["began"]
    before = [n for at, n in run.memory if at <= began][-1]
    return run.peak_bytes("job") - before


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--lengths", default="8,16,32,64,128", help="tokens in thousands (1024)")
    options.add_argument("--cases", default=",".join(attention.CASES))
    options.add_argument("--limit-gib", type=float, default=4.0, help="memory of a pass")
    options.set_defaults(rounds=1)
    given = options.parse_args()
    lengths = [round(float(n) * 1024) for n in given.lengths.split(",")]
    columns = [f"{n / 1024:g} k" for n in lengths]
    table = Table(
        title="Memory that a pass adds, MiB (seconds of the processor)",
        head=("case", "pass", "engine", *columns),
    )
    with workplace(given) as place:
        for case in given.cases.split(","):
            folder = Path(place) / case.replace(" ", "-")
            attention.save(case, folder)
            for backward in (False, True):
                for engine in ENGINES[case]:
                    how = {"case": case, "engine": engine, "backward": backward}
                    how |= {"folder": str(folder), "limit_bytes": int(given.limit_gib * 2**30)}
                    measure(table, how, lengths, given.rounds)
                    show(given, Path(place), [table], note(given))


def measure(table: Table, how: dict[str, Any], lengths: list[int], rounds: int) -> None:
    """Add the row of an engine; after a length that does not fit, longer ones are not tried."""
    cells, failed = [], ""
    for tokens in lengths:
        if failed:
            cells.append("no memory")
            continue
        runs = [run_job("attention", {**how, "tokens": tokens}, watch=True) for _ in range(rounds)]
        failed = str(runs[0].facts["failed"])
        seconds = min(float(run.facts["seconds"]) for run in runs)
        extra = max(extra_bytes(run) for run in runs)
        cells.append("no memory" if failed else f"{mib(extra)} ({seconds:.1f})")
        table.figures.append(
            {
                **how,
                "tokens": tokens,
                "failed": failed,
                "seconds": seconds,
                "extra_bytes": extra,
                "sum": runs[0].facts["sum"],
            }
        )
    passes = "forward + backward" if how["backward"] else "forward"
    table.rows.append((how["case"], passes, how["engine"], *cells))


def note(given: Any) -> str:
    """What is measured."""
    return (
        "One row in fp32, one thread, fresh processes; RssAnon, read from outside. Two layers, "
        "hidden size 64, 2 heads of 32, without the output layer. "
        f"`packed` has documents of {attention.DOCUMENT} tokens; "
        "`soft caps and windows` is Gemma 2 with windows of 512. `sdpa` and `eager` are "
        f"transformers'. `no memory`: more than {given.limit_gib:g} GiB."
    )


if __name__ == "__main__":
    main()
