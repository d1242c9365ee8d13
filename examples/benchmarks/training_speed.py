"""A training step by megtool and by what its users have today, in turn: time, optimizer memory.

python examples/benchmarks/training_speed.py [--processes 2] [--tokens 512] [--steps 8] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.table import Table, parser, show, times

SCRIPT = Path(__file__).resolve().parent / "bench" / "training.py"
# How fast megtool has to be, by the peer; and its share of the peer's optimizer memory.
LEAST = {
    "torch DDP + fused AdamW": 0.95,
    "torch FSDP2 + fused AdamW": 1.1,
    "transformers Trainer": 1.0,
}


def run_world(processes: int, given: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of `bench/training.py` says.

    Raises:
        RuntimeError: it failed; with what it wrote to stderr.
    """
    options = {
        name: getattr(given, name) for name in ("tokens", "steps", "rounds", "threads", "bucket")
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *(launch if processes > 1 else []), str(SCRIPT), json.dumps(options)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(given.threads), "TOKENIZERS_PARALLELISM": "false"},
    )
    if done.returncode:
        raise RuntimeError(f"{processes} processes failed:\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows(table: Table, processes: int, found: dict[str, Any]) -> None:
    """A row for each engine, over the first of megtool's."""
    names = sorted(found["seconds"], key=lambda name: (not name.startswith("megtool"), name))
    own = found["seconds"][names[0]]
    for name in names:
        theirs = found["seconds"][name]
        ratios = [min(t[kind] for t in theirs) / min(t[kind] for t in own) for kind in (0, 1)]
        median = statistics.median(t[0] / o[0] for t, o in zip(theirs, own, strict=True))
        held = found["bytes"].get(name)
        share = found["bytes"][names[0]] / held if held else None
        least = LEAST.get(name)
        limit = "-" if least is None else f"≥ {least:g} {'✓' if ratios[0] >= least else '✗'}"
        table.add(
            str(processes),
            name,
            f"{min(t[0] for t in theirs) * 1e3:.0f}",
            f"{min(t[1] for t in theirs) * 1e3:.0f}",
            times(ratios[0]),
            limit,
            times(median),
            times(ratios[1]),
            "-" if held is None else f"{held / 2**20:.1f}",
            "-" if share is None else times(share),
            processes=processes,
            engine=name,
            cpu_seconds=min(t[0] for t in theirs),
            wall_seconds=min(t[1] for t in theirs),
            speedup=ratios[0],
            median_speedup=median,
            optimizer_bytes=held,
            memory_share=share,
        )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--processes", default="2,1", help="numbers of processes, with commas")
    options.add_argument("--tokens", type=int, default=512, help="tokens of a step and a rank")
    options.add_argument("--steps", type=int, default=8, help="steps of an engine's turn")
    options.add_argument("--threads", type=int, default=1, help="threads of a process")
    options.add_argument("--bucket", type=int, default=1_000_000, help="elements, if overlapped")
    given = options.parse_args()
    head = ("processes", "engine", "CPU ms", "wall ms", "CPU over ours (min/min)", "limit")
    head = (*head, "(median)", "wall over ours", "optimizer MiB a rank", "our share")
    table = Table(title="A training step of a Llama of 6.5 M parameters, fp32", head=head)
    for processes in map(int, given.processes.split(",")):
        rows(table, processes, found=run_world(processes, given))
    note = (
        f"{given.tokens} tokens a step and a rank, {given.steps} steps a turn, AdamW, gradients "
        "clipped at a norm of 1; engines take turns in the same processes, and a ratio is the "
        "fastest of their turns over the fastest of ours. CPU is the processes' own time, the mean "
        "over ranks: what a step costs where cores are shared. torch's engines train megtool's "
        "decoder, Trainer its own Llama of the same sizes, and counts from the beginning of a step "
        "to its end alone."
    )
    show(given, Path(tempfile.gettempdir()), [table], note)


if __name__ == "__main__":
    main()
