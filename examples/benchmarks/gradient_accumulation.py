"""Backward passes whose products go straight into the sums of gradients: time and peak memory.

python examples/benchmarks/gradient_accumulation.py [--hidden 2048] [--tokens 128] [--passes 4]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.race import Run, run_job
from bench.table import Table, mib, parser, show, times, verdict

MOST_TIME = 1.0
MOST_MEMORY = 1.0
"""What the passes hold beside model and sums, over that without fusion."""


def held(run: Run) -> int:
    """Anonymous memory of the passes beyond what was there before them."""
    before = [n for at, n in run.memory if at <= run.phases["job"]["began"]][-1]
    return run.peak_bytes("job") - before


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--hidden", type=int, default=2048)
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--tokens", type=int, default=128, help="of a micro-batch")
    options.add_argument("--passes", type=int, default=4, help="micro-batches of a step")
    options.add_argument("--threads", type=int, default=1)
    options.set_defaults(rounds=3)
    given = options.parse_args()
    head = (
        "dtype",
        "fusion",
        "CPU s",
        "over none",
        "limit",
        "peak MiB beside",
        "over none",
        "limit",
    )
    table = Table(title="Backward passes of a step", head=head)
    for dtype in ("float32", "bfloat16"):
        how: dict[str, Any] = {
            name: getattr(given, name)
            for name in ("hidden", "layers", "tokens", "passes", "threads")
        }
        runs: dict[bool, list[Run]] = {False: [], True: []}
        for _ in range(given.rounds):
            for fuse, done in runs.items():
                job = {**how, "dtype": dtype, "fuse": fuse, "repeat": 2}
                done.append(run_job("gradient_accumulation", job, watch=True))
        if any(run.facts["sums"] != runs[False][0].facts["sums"] for run in runs[True]):
            raise SystemExit(f"{dtype}: the sums differ")
        seconds = {f: min(float(r.facts["seconds"]) for r in done) for f, done in runs.items()}
        memory = {f: max(held(r) for r in done) for f, done in runs.items()}
        for fuse in runs:
            time_ratio = seconds[fuse] / seconds[False]
            memory_ratio = memory[fuse] / memory[False]
            table.add(
                dtype,
                "yes" if fuse else "no",
                f"{seconds[fuse]:.2f}",
                times(time_ratio),
                verdict(time_ratio, MOST_TIME if fuse else None),
                mib(memory[fuse]),
                times(memory_ratio),
                verdict(memory_ratio, MOST_MEMORY if fuse else None),
                dtype=dtype,
                fuse=fuse,
                seconds=seconds[fuse],
                held_bytes=memory[fuse],
            )
    note = (
        f"A Llama of {given.layers} layers, hidden size {given.hidden}, feed-forward "
        f"{4 * given.hidden}, vocabulary {8 * given.hidden}; {given.passes} micro-batches of "
        f"{given.tokens} tokens. Time is the process's own in the backward passes of a step, the "
        "fastest; memory what passes hold beside parameters and sums. The sums are compared."
    )
    show(given, Path(tempfile.gettempdir()), [table], note)


if __name__ == "__main__":
    main()
