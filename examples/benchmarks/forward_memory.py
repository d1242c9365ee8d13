"""A forward pass of a model larger than the memory it is given, and loading it whole: memory, time.

python examples/benchmarks/forward_memory.py [--gib 4] [--tokens 16] [--dir DIR] [--rounds 3]
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bench.race import Run, copy_seconds, run_job
from bench.synthetic import llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

MOST_MEMORY = 0.3
"""On demand: anonymous and shared memory of the process, over the bytes of the weights."""

MOST_TIME = 1.0
"""From the path to the logits, over what transformers takes."""


def seconds(run: Run, part: str) -> float:
    """How long a part of a job took."""
    return run.phases[part]["ended"] - run.phases[part]["began"]


def best(kind: str, options: dict[str, Any], rounds: int) -> Run:
    """The fastest of some runs, by the time from the path to the logits."""
    return min((run_job(kind, options) for _ in range(rounds)), key=lambda run: run.seconds)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--tokens", type=int, default=16, help="how many the pass is over")
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    head = ("job", "load s", "x cp", "forward s", "both over the first row", "limit")
    head = (*head, "RssAnon MiB", "RssShmem MiB", "over size", "limit")
    table = Table(title="A forward pass", head=head)
    with workplace(given) as folder:
        root = Path(folder)
        made = llama(root / "hf", given.gib)
        copies = []
        for _ in range(given.rounds + 1):
            copies.append(copy_seconds(made.folder, root / "copy", fsync=False))
            shutil.rmtree(root / "copy")
        both = {"source": str(made.folder), "threads": given.threads, "tokens": given.tokens}
        jobs: list[tuple[str, str, dict[str, Any]]] = [
            ("transformers, copied", "peer_forward", {**both, "copied": True}),
            ("transformers, mapped", "peer_forward", {**both, "copied": False}),
            ("whole", "forward", {**both, "stream_layers": False}),
            ("on demand", "forward", {**both, "stream_layers": True}),
        ]
        peer = 0.0
        for name, kind, how in jobs:
            run = best(kind, how, given.rounds)
            watched = run_job(kind, how, watch=True)
            anonymous, shared = watched.peak_of_both()
            began = watched.phases["load"]["began"]
            base = max((n for at, n in watched.memory if at <= began), default=0)
            peer = peer or run.seconds
            share, time_share = (anonymous + shared) / made.num_bytes, run.seconds / peer
            load = seconds(run, "load")
            table.add(
                name,
                f"{load:.2f}",
                times(load / min(copies)) if name == "whole" else "-",
                f"{seconds(run, 'forward'):.2f}",
                times(time_share),
                verdict(time_share, MOST_TIME if name == "whole" else None),
                mib(anonymous),
                mib(shared),
                times(share),
                verdict(share, MOST_MEMORY if name == "on demand" else None),
                job=name,
                num_bytes=made.num_bytes,
                load_seconds=load,
                cp_ratio=load / min(copies),
                seconds=run.seconds,
                over_transformers=time_share,
                anonymous_bytes=anonymous,
                shared_bytes=shared,
                base_bytes=base,
                memory_share=share,
            )
        shutil.rmtree(made.folder)
        note = (
            f"{mib(made.num_bytes)} MiB of bfloat16 in {made.num_layers} layers, {given.tokens} "
            f"tokens, {given.threads} threads; `cp` of the same files {min(copies):.2f} s. Each "
            "job in a fresh process; seconds count from the path, without the imports of torch "
            "and transformers. Memory is that of the whole process when anonymous and shared "
            "memory together were most. `from_pretrained` maps the files: nothing is read until "
            "it is used, and what is mapped is neither; `copied` reads every weight into memory, "
            "as a model that is to stay does, and ratios are over that."
        )
        show(given, root, [table], note)


if __name__ == "__main__":
    main()
