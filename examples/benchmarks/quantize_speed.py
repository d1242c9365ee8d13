"""How long weights take to be quantized, as a multiple of `cp` of the bytes that are read.

python examples/benchmarks/quantize_speed.py [--gib 1] [--dir DIR] [--rounds 3] [--recipe NAME]...

Files to a quantized Hugging Face folder, by two threads, no data: decided, settled by weights
alone, searched for amax where a format needs that of whole weights, encoded and written.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from bench.race import Entrant, Result, race
from bench.synthetic import llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

LIMITS = {
    "fp8": 3.0,
    "fp8_per_channel": 3.0,
    "fp8_block128": 3.0,
    "int8_weight_only": 3.0,
    "int4_weight_only": 3.0,
    "mxfp8": 3.0,
    "mxfp4": 8.0,
    "w4a16_nvfp4": 8.0,
}
NOTE = (
    "bfloat16 Llama of normal numbers, files in the page cache, no fsync on either side; cp is "
    "`cp -r --reflink=never` of the source around each run. `s` is of `write()` alone in a fresh "
    "process that has opened the source; memory is anonymous, of the whole process, torch included."
)


def measure(given: argparse.Namespace, root: Path) -> None:
    """All recipes of one source."""
    made = llama(root / "source", given.gib, finite=True)
    head = ("recipe", "s", "GB/s read", "fastest cp s", "x fastest cp", "limit")
    table = Table(title="Time and memory, two threads", head=(*head, "x cp around it", "MiB"))
    wanted = given.recipe or list(LIMITS)
    entrants = [
        Entrant(
            name=name,
            kind="quantize",
            options={"recipe": name, "threads": 2},
            ideal_bytes=made.num_bytes,
            limit=LIMITS[name],
        )
        for name in wanted
    ]
    for result in race(entrants, made.folder, root / "scratch", rounds=given.rounds, fsync=False):
        add(table, result, made.num_bytes)
    shutil.rmtree(root / "source")
    show(given, root, [table], NOTE)


def add(table: Table, result: Result, num_bytes: int) -> None:
    """A row."""
    table.add(
        result.entrant.name,
        f"{min(result.seconds):.2f}",
        f"{num_bytes / min(result.seconds) / 1e9:.2f}",
        f"{result.copy_least:.2f}",
        times(result.least),
        verdict(result.least, result.entrant.limit),
        times(result.median),
        mib(result.peak_bytes),
        num_bytes=num_bytes,
        **result.figures,
    )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=1)
    options.add_argument("--recipe", action="append", choices=list(LIMITS), help="repeatable")
    given = options.parse_args()
    with workplace(given) as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
