"""The loss of a linear head over a large vocabulary with its gradients: peak memory and time.

python examples/benchmarks/cross_entropy_memory.py [--vocab 131072] [--tokens 1024] [--hidden 256]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from bench.race import Run, run_job
from bench.table import Table, mib, parser, show, times, verdict

WAYS = ("torch", "torch in chunks", "megtool")
REPEAT = 2

MOST_MEMORY = 0.35
"""What the job adds to inputs and gradients, over what torch's two calls add."""

MOST_TIME = 1.5
"""Over torch's two calls: at most a fourth matrix product to their three, and noise."""


def ways() -> list[str]:
    """What this torch can do."""
    chunks = hasattr(torch.nn, "LinearCrossEntropyOptions")
    return [way for way in WAYS if chunks or way != "torch in chunks"]


def extra_bytes(run: Run, options: dict[str, Any]) -> int:
    """Memory beyond the inputs and their gradients: on the device, or anonymous during the job."""
    item = torch.empty((), dtype=getattr(torch, options["dtype"])).element_size()
    fixed = 2 * item * options["hidden"] * (options["tokens"] + options["vocab"])
    if run.facts["on_device"]:
        return int(run.facts["on_device"]) - fixed
    before = [n for at, n in run.memory if at <= run.phases["job"]["began"]][-1]
    return run.peak_bytes("job") - before - fixed // 2  # the inputs are there before


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--vocab", type=int, default=1 << 17)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--threads", type=int, default=1)
    options.set_defaults(rounds=3)
    given = options.parse_args()
    head = ("device", "way", "s", "over torch", "limit", "peak MiB", "beyond inputs and gradients")
    table = Table(title="Linear head and cross entropy", head=(*head, "over torch", "limit"))
    devices = [("cpu", "float32")] + [("cuda", "bfloat16")] * torch.cuda.is_available()
    for device, dtype in devices:
        how: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "vocab": given.vocab,
            "tokens": given.tokens,
            "hidden": given.hidden,
            "threads": given.threads,
            "repeat": REPEAT if device == "cpu" else 10 * REPEAT,
        }
        # Rounds go through all ways in turn, so that a busy machine is busy for each.
        runs: dict[str, list[Run]] = {way: [] for way in ways()}
        for _ in range(given.rounds):
            for way in runs:
                runs[way].append(run_job("cross_entropy", {**how, "way": way}, watch=True))
        base_seconds = base_bytes = 0.0
        for way, done in runs.items():
            seconds = min(float(run.facts["seconds"]) for run in done)
            extra = max(extra_bytes(run, how) for run in done)
            peak = max(int(run.facts["on_device"]) or run.peak_bytes("job") for run in done)
            base_seconds, base_bytes = base_seconds or seconds, base_bytes or extra
            own = way == "megtool"
            table.add(
                f"{device} {dtype}",
                way,
                f"{seconds:.3f}",
                times(seconds / base_seconds),
                verdict(seconds / base_seconds, MOST_TIME if own else None),
                mib(peak),
                mib(extra),
                times(extra / base_bytes),
                verdict(extra / base_bytes, MOST_MEMORY if own else None),
                device=device,
                way=way,
                seconds=seconds,
                peak_bytes=peak,
                extra_bytes=extra,
                loss=done[0].facts["loss"],
                norms=done[0].facts["norms"],
            )
    note = (
        f"{given.tokens} tokens, hidden size {given.hidden}, vocabulary {given.vocab}, "
        f"{given.threads} threads; mean loss, gradients of inputs and weight; fresh processes, "
        "the fastest repetition (on the CPU its processor time), the largest memory. `torch` is "
        "F.linear and F.cross_entropy (in fp32), `torch in chunks` F.linear_cross_entropy with its "
        "default options. On the CPU memory is RssAnon, read from outside."
    )
    show(given, Path(tempfile.gettempdir()), [table], note)


if __name__ == "__main__":
    main()
