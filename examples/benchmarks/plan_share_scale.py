"""Planning ten million shards: everything in one process, and the share of one worker of many.

python examples/benchmarks/plan_share_scale.py [--layers 102] [--cuts 32] [--workers 64]

The headers are simulated: the arrays of a catalogue are built directly, as a reader of torch_dist
leaves them. They describe a mixture of experts of 2.1T parameters with optimizer state. From there
on it is what a run does up to its first byte: checks, the plan of the process, its summary, and its
units of work.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np
from bench.table import Table, parser, show, verdict

from megtool.dtypes import dtype
from megtool.plan.copies import PlanSource
from megtool.plan.planner import build_plan
from megtool.plan.share import plan_share_units
from megtool.plan.summary import summarize
from megtool.plan.work_units import plan_units
from megtool.process.worker_identity import WorkerIdentity
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards
from megtool.transport.shard_locator import ShardLocator

EXPERTS = 256
SHAPES = {"gate": (3840, 7168), "up": (3840, 7168), "down": (7168, 3840)}
STATES = {"weight": "bfloat16", "master": "float32", "m": "float32", "v": "float32"}
MOST_SECONDS, MOST_MIB = 60.0, 3072


def build_catalogue(layers: int, cuts: int, num_files: int) -> Catalogue:
    """Experts of all layers, each tensor cut by experts and its rows into `cuts`."""
    tensors = [
        GlobalTensor(name=f"{state}.{layer}.{name}", shape=(EXPERTS, *shape), dtype=dtype(kind))
        for layer in range(layers)
        for name, shape in SHAPES.items()
        for state, kind in STATES.items()
    ]
    per, count = EXPERTS * cuts, len(tensors)
    rows = np.array([t.shape[1] // cuts for t in tensors], np.int64)
    columns = np.repeat(np.array([t.shape[2] for t in tensors], np.int64), per)
    item = np.repeat(np.array([t.dtype.itemsize for t in tensors], np.int64), per)
    lo, hi = np.zeros((per * count, 3), np.int64), np.zeros((per * count, 3), np.int64)
    lo[:, 0] = np.tile(np.repeat(np.arange(EXPERTS), cuts), count)
    hi[:, 0] = lo[:, 0] + 1
    lo[:, 1] = np.tile(np.tile(np.arange(cuts), EXPERTS), count) * np.repeat(rows, per)
    hi[:, 1] = lo[:, 1] + np.repeat(rows, per)
    hi[:, 2] = columns
    length = np.repeat(rows, per) * columns * item
    file = np.tile((np.arange(per) % num_files).astype(np.int32), count)
    order = np.argsort(file, kind="stable")
    end = np.cumsum(length[order])
    sizes = np.bincount(file, length, num_files).astype(np.int64)
    offset = np.empty(len(file), np.int64)
    offset[order] = end - length[order]
    offset -= (np.cumsum(sizes) - sizes)[file]
    return Catalogue(
        format="torch_dist",
        root=Path("simulated"),
        files=[StoredFile(path=f"__{n}_0.distcp", size=s) for n, s in enumerate(sizes.tolist())],
        tensors=tensors,
        shards=Shards(np.repeat(np.arange(count, dtype=np.int32), per), Boxes(lo, hi), file),
        extents=Extents(file=file, offset=offset, length=length),
    )


def place(catalogue: Catalogue) -> dict[str, Placement]:
    """Every expert of every tensor by a canonical name."""
    return {
        f"{t.name}.{n}": Placement(
            canonical=f"{t.name}.{n}",
            stored=t.name,
            shape=t.shape[1:],
            dims=(1, 2),
            mults=(1, 1),
            base=(n, 0, 0),
        )
        for t in catalogue.tensors
        for n in range(EXPERTS)
    }


def measure(layers: int, cuts: int, workers: int) -> dict[str, float]:
    """Open and plan the share of one of `workers`; 1: everything."""
    began = time.monotonic()
    source, target = build_catalogue(layers, cuts, 2048), build_catalogue(layers, 4, 1024)
    shards = len(source.shards)
    source.check()
    opened = time.monotonic()
    placements = place(source)
    plan = build_plan(
        [PlanSource(catalogue=source, placements=placements)],
        Destination(catalogue=target, fragments=[]),
        placements,
        worker=WorkerIdentity(workers // 2, workers) if workers > 1 else None,
    )
    summarize(plan)
    locator = ShardLocator(target)
    units = (
        plan_units(plan, locator)
        if plan.share is None
        else plan_share_units(plan, locator, tiled_only=False)
    )
    return {
        "shards": shards,
        "units": len(units),
        "steps": len(plan.steps),
        "open": opened - began,
        "plan": time.monotonic() - opened,
        "cpu": time.process_time(),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.set_defaults(rounds=1)
    options.add_argument("--layers", type=int, default=102)
    options.add_argument("--cuts", type=int, default=32, help="cuts of each expert in the source")
    options.add_argument("--workers", type=int, default=64)
    given = options.parse_args()
    head = (
        *("plan of", "steps", "open s", "plan s", "both s", "limit", "CPU s"),
        *("peak MiB", "limit"),
    )
    table = Table(title="Planning ten million shards", head=head)
    shards = 0.0
    for workers in (1, given.workers):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(measure, (given.layers, given.cuts, workers))
        shards, seconds = result["shards"], result["open"] + result["plan"]
        table.add(
            "everything" if workers == 1 else f"one worker of {workers}",
            f"{result['steps']:,.0f}",
            f"{result['open']:.1f}",
            f"{result['plan']:.1f}",
            f"{seconds:.1f}",
            verdict(seconds, MOST_SECONDS),
            f"{result['cpu']:.1f}",
            f"{result['mib']:.0f}",
            verdict(result["mib"], MOST_MIB),
            workers=workers,
            **result,
        )
    show(given, Path(), [table], f"{shards:,.0f} shards of {given.layers} layers.")


if __name__ == "__main__":
    main()
