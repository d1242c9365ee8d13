"""Quantizing, distilling and training a draft head, beside NVIDIA ModelOpt: time and memory.

python examples/benchmarks/post_training_speed.py [--gib 0.25] [--rows 8] [--length 256]
    [--steps 4] [--job NAME]... [--dir DIR] [--rounds 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bench.race import Run, run_job
from bench.synthetic import SMALL, Synthetic, llama
from bench.table import Table, mib, parser, show, times, workplace

from megtool.data.indexed import IndexedWriter

JOBS: Mapping[str, tuple[str, str, str, Mapping[str, Any]]] = {
    "megatron": (
        "FP8, a Megatron checkpoint (ModelOpt in Megatron-Core)",
        "peer_quantize_megatron",
        "quantize_megatron",
        {"recipe": "fp8", "config": "FP8_DEFAULT_CFG", "dtype": "bfloat16"},
    ),
    "backend": (
        "FP8, a Hugging Face folder (ModelOpt on transformers' model; `--backend modelopt`)",
        "peer_quantize_folder",
        "quantize_folder",
        {
            "recipe": "fp8",
            "config": "FP8_DEFAULT_CFG",
            "dtype": "float32",
            "backend": "modelopt",
        },
    ),
    "distill": (
        "distillation of logits (ModelOpt on transformers' models)",
        "peer_distillation",
        "finetune",
        {"more": {"distill_weight": 1.0}},  # the divergence alone, as ModelOpt's loss
    ),
    "eagle": (
        "an EAGLE-3 head (ModelOpt on transformers' model; `--eagle`)",
        "peer_draft_head",
        "finetune",
        {"more": {"eagle": "default"}},
    ),
}


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=0.25)
    options.add_argument("--rows", type=int, default=8, help="of tokens: all, or in a step")
    options.add_argument("--length", type=int, default=256, help="tokens of a row")
    options.add_argument("--steps", type=int, default=4, help="of training")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--job", action="append", choices=list(JOBS), help="repeatable")
    given = options.parse_args()
    head = ("job", "ModelOpt s", "megtool s", "megtool faster (min/min)", "(median)")
    head = (*head, "ModelOpt MiB", "megtool MiB", "megtool's share")
    table = Table(title="Post-training", head=head)
    with workplace(given) as folder:
        root = Path(folder)
        made = llama(root / "hf", given.gib, shape=SMALL, finite=True)
        for name in given.job or JOBS:
            duel(table, name, made, root, given)
        note = (
            f"{made.num_layers} layers of {made.shape.hidden} channels, {given.rows} rows of "
            f"{given.length} random tokens (in each of {given.steps} steps of training), "
            f"{given.threads} threads. "
            "Each job in a fresh process, in turn; seconds are from the path of the checkpoint to "
            "what is written, without imports; trained models are written with optimizer state. "
            "MiB is anonymous and shared memory of the whole process when it had most."
        )
        show(given, root, [table], note)


def duel(table: Table, name: str, made: Synthetic, root: Path, given: argparse.Namespace) -> None:
    """A row: the peer's time and memory, and ours."""
    title, peer, ours, more = JOBS[name]
    source = made.folder
    if name == "megatron":
        source = root / "megatron"
        places = {"source": str(made.folder), "destination": str(source)}
        run_job("reshard", {**places, "to": "torch_dist", "tp": 2})
        source /= "release"
    given_tokens = {n: getattr(given, n) for n in ("length", "steps", "threads")}
    job = {
        "source": str(source),
        "sizes": {**dataclasses.asdict(made.shape), "layers": made.num_layers},
        "samples": given.rows,
        **given_tokens,
        **more,
    }
    if ours == "finetune":
        job["data"] = str(write_tokens(root / "tokens", made.shape.vocab, given))
    if name == "distill":
        teacher = root / "teacher"
        if not teacher.exists():
            llama(teacher, given.gib, shape=SMALL, finite=True, seed=1)
        job |= {"teacher": str(teacher), "more": {**more["more"], "teacher": str(teacher)}}
    runs: tuple[list[Run], list[Run]] = ([], [])
    for number in range(given.rounds + 1):  # the last for memory
        for kind, done in zip((peer, ours), runs, strict=True):
            target = root / "out"
            done.append(
                run_job(kind, {**job, "destination": str(target)}, watch=number == given.rounds)
            )
            shutil.rmtree(target)
    seconds = [[r.seconds for r in done[:-1]] for done in runs]
    peaks = [sum(done[-1].peak_of_both()) for done in runs]
    faster = min(seconds[0]) / min(seconds[1])
    median = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    table.add(
        title,
        *(f"{min(s):.1f}" for s in seconds),
        times(faster),
        times(median),
        *map(mib, peaks),
        times(peaks[1] / peaks[0]),
        job=name,
        seconds=seconds,
        speedup=faster,
        peak_bytes=peaks,
        facts=[dict(done[-1].facts) for done in runs],
    )
    if source != made.folder:
        shutil.rmtree(source.parent)


def write_tokens(prefix: Path, vocab: int, given: argparse.Namespace) -> Path:
    """A data set of random rows, as many as the steps take, in Megatron's form."""
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.int32) as data:
        for _ in range(given.rows * given.steps):
            data.add(draw.integers(0, vocab, given.length + 1, np.int32))
            data.end_document()
    return prefix


if __name__ == "__main__":
    main()
