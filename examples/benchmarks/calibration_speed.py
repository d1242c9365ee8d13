"""Calibrating a small model, beside NVIDIA ModelOpt, and a large one in little memory.

python examples/benchmarks/calibration_speed.py [--gib 4] [--samples 16] [--dir DIR] [--rounds 3]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.race import Run, run_job
from bench.synthetic import SMOLLM2, llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

LEAST_SPEED = 1.0
"""Tokens a second, over those of ModelOpt."""

MOST_MEMORY = 0.5
"""Anonymous and shared memory of the process, over that of ModelOpt's."""

MOST_BYTES = 1536 << 20
"""The same memory where the model has 4 GiB."""


def rate(run: Run) -> float:
    """Tokens a second, loading left out."""
    part = run.phases["calibrate"]
    return float(run.facts["num_tokens"]) / (part["ended"] - part["began"])


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--samples", type=int, default=16, help="rows of tokens")
    options.add_argument("--length", type=int, default=512, help="tokens of a row")
    options.add_argument("--small-gib", type=float, default=0.25, help="size of the small model")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--no-peer", action="store_true", help="without ModelOpt")
    given = options.parse_args()
    head = ("job", "tokens/s", "over ModelOpt", "limit", "RssAnon MiB", "RssShmem MiB")
    table = Table(title="Calibration", head=(*head, "of ModelOpt's", "limit"))
    with workplace(given) as folder:
        root = Path(folder)
        small = llama(root / "small", given.small_gib, shape=SMOLLM2, finite=True)
        how = {"samples": given.samples, "seq_length": given.length, "threads": given.threads}
        both: dict[str, Any] = {**how, "source": str(small.folder), "recipe": "fp8"}
        jobs = [
            ("ModelOpt, float32", "peer_calibrate", "float32"),
            ("megtool, float32", "calibrate", "float32"),
        ]
        peers: dict[str, tuple[float, int]] = {}
        for name, kind, dtype in jobs:
            if given.no_peer and kind == "peer_calibrate":
                continue
            runs = [run_job(kind, {**both, "dtype": dtype}) for _ in range(given.rounds)]
            watched = run_job(kind, {**both, "dtype": dtype}, watch=True)
            speed, (anonymous, shared) = max(map(rate, runs)), watched.peak_of_both()
            taken = anonymous + shared
            if kind == "peer_calibrate":
                peers[dtype] = speed, taken
            peer = peers.get(dtype)
            is_ours = kind == "calibrate" and peer is not None
            faster = speed / peer[0] if peer else float("nan")
            share = taken / peer[1] if peer else float("nan")
            told = "" if not is_ours else "ok" if faster >= LEAST_SPEED else "MISSED"
            table.add(
                name,
                f"{speed:.0f}",
                times(faster),
                told,
                mib(anonymous),
                mib(shared),
                times(share),
                verdict(share, MOST_MEMORY if is_ours else None),
                job=name,
                tokens_per_second=speed,
                over_peer=faster,
                memory_share=share,
                peak_bytes=taken,
                amax=watched.facts["amax"],
            )
        large = llama(root / "large", given.gib, finite=True)
        size = {**how, "seq_length": min(256, given.length), "dtype": "float32", "recipe": "fp8"}
        watched = run_job("calibrate", {**size, "source": str(large.folder)}, watch=True)
        anonymous, shared = watched.peak_of_both()
        name = f"megtool, float32, {mib(large.num_bytes)} MiB of weights"
        table.add(
            name,
            f"{rate(watched):.0f}",
            "-",
            "",
            mib(anonymous),
            mib(shared),
            "-",
            "ok" if anonymous + shared <= MOST_BYTES else "MISSED",
            job="large",
            tokens_per_second=rate(watched),
            peak_bytes=anonymous + shared,
            num_bytes=large.num_bytes,
        )
        note = (
            f"{small.num_layers} layers of SmolLM2's sizes, {given.samples} x {given.length} "
            f"random tokens, {given.threads} threads; FP8 with a scale a tensor. Loading the model "
            "is left out of ModelOpt's time; megtool reads weights layer by layer while it runs, "
            "and that counts. Both see all inputs of the linear layers; megtool counts them in "
            "histograms besides, and computes no logits. The last row has rows of 256 tokens at "
            "most; its limit is 1.5 GiB. Memory is that of the whole process when anonymous "
            "and shared memory together were most."
        )
        show(given, root, [table], note)


if __name__ == "__main__":
    main()
