"""Resharding within an S3 store: against copies by obstore, torch DCP, and by more workers.

python examples/benchmarks/store_speed.py [--gib 1] [--dir DIR] [--rounds 3] [--group NAME]...

The server is SeaweedFS on loopback. It needs `pip install 'megtool[test]' s3fs`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.stores import (
    Bench,
    SizedStore,
    reshard,
    run,
    run_together,
    run_watched,
    start,
    upload,
)
from bench.synthetic import LARGE, LARGER, llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

NOTE = (
    "Random bytes, one process per worker. The times are of whole processes, start included; the "
    "fastest of the rounds counts, and rounds of both sides alternate."
)
COPY_LIMIT, WORKERS_LIMIT, DCP_LIMIT, DCP_MEMORY_LIMIT = 1.3, 7.0, 5.0, 0.1
SERVER_LIMIT, ROWS_LIMIT, READ_LIMIT, MEMORY_LIMIT = 0.05, 0.25, 1.02, 256 << 20
LATENCY, BANDWIDTH = 0.02, 1024
"""Of the limited store: seconds a request, and KiB per second of a connection."""


COPIER = """
import asyncio, sys
import obstore
from obstore.store import S3Store
bucket, source, target = sys.argv[1:]
store = S3Store(bucket, client_options={"allow_http": True, "timeout": "300s"})
async def copy(path, gate):
    async with gate:
        data = (await obstore.get_async(store, path)).stream(min_chunk_size=8 << 20)
        name = target + path[len(source):]
        await obstore.put_async(store, name, data, chunk_size=8 << 20, max_concurrency=4)
async def main():
    gate = asyncio.Semaphore(4)
    paths = [meta["path"] for batch in obstore.list(store, prefix=source) for meta in batch]
    await asyncio.gather(*(copy(path, gate) for path in paths))
asyncio.run(main())
"""
"""Streams four objects at a time, so that its memory does not grow with their sizes."""


def measure_copy(bench: Bench) -> Table:
    """A reshard, and copies of the same bytes through this machine by obstore."""
    head = ("job", "s", "copy s", "x copy", "limit")
    table = Table(title="One worker, S3 on loopback, against copies by obstore", head=head)
    # Of random bytes most float16 numbers are infinite, and SeaweedFS would compress the result.
    made = llama(bench.root / "source", bench.given.gib, finite=True)
    upload(bench, made.folder, "source")
    shutil.rmtree(made.folder)
    jobs = {
        "HF → HF, one file": ("--max-shard-size", "100GB"),
        "HF → torch_dist TP2": ("--to", "torch_dist", "--tp", "2"),
        "HF bf16 → fp16": ("--dtype", "fp16"),
    }
    environment = bench.environment()
    for name, options in jobs.items():
        ours, copies = [], []
        for _ in range(bench.given.rounds):
            bench.empty("copy/")
            command = [sys.executable, "-c", COPIER, bench.bucket.name, "source", "copy"]  # type: ignore[attr-defined]
            copies.append(run(command, environment))
            bench.empty("out/")
            ours.append(run(reshard(bench.url("source"), bench.url("out"), *options), environment))
        ratio = min(ours) / min(copies)
        limit = verdict(ratio, COPY_LIMIT)
        cells = (name, f"{min(ours):.2f}", f"{min(copies):.2f}", times(ratio), limit)
        table.add(*cells, job=name, seconds=ours, copies=copies)
    return table


def measure_server_copies(bench: Bench) -> Table:
    """How much of the payload passes through the host when the store can copy it itself."""
    from tests.support.stores.fault_proxy import FaultProxy

    head = ("job", "payload MiB", "through the host", "limit")
    table = Table(title="Bytes through the host, within one store", head=head)
    made = llama(bench.root / "server", bench.given.gib)
    upload(bench, made.folder, "hf")
    run(
        reshard(bench.url("hf"), bench.url("pp2"), "--to", "torch_dist", "--pp", "2"),
        bench.environment(),
    )
    rows = ("--to", "torch_dist", "--tp", "2")
    jobs = {
        "HF files cut anew": ("hf", ("--max-shard-size", "300MB"), SERVER_LIMIT),
        "torch_dist PP2 → PP1": ("pp2", ("--pp", "1"), SERVER_LIMIT),
        "HF → torch_dist TP2 (rows and columns)": ("hf", rows, ROWS_LIMIT),
    }
    for name, (source, options, limit) in jobs.items():
        bench.empty("out/")
        with FaultProxy(bench.server.endpoint) as proxy:  # type: ignore[attr-defined]
            environment = bench.environment(proxy.endpoint)
            run(reshard(bench.url(source), bench.url("out"), *options), environment)
            moved = max(proxy.bytes_in(), proxy.bytes_out())
        share = moved / made.num_bytes
        cells = (name, mib(made.num_bytes), times(share), verdict(share, limit))
        table.add(*cells, job=name, moved=moved, payload=made.num_bytes)
    return table


def measure_sizes(bench: Bench) -> Table:
    """The same shares for models of real sizes, in a store that keeps no bytes."""
    from megtool import reshard as reshard_in_process
    from megtool.storage.stores.connect import register_store

    head = ("shapes", "layers", "payload GiB", "job", "through the host")
    table = Table(title="Bytes through the host, by the size of matrices", head=head)
    jobs: dict[str, dict[str, Any]] = {
        "HF files cut anew": {"max_shard_size": "4GB"},
        "HF → torch_dist PP2": {"to": "torch_dist", "pp": 2},
        "HF → torch_dist TP2": {"to": "torch_dist", "tp": 2},
    }
    for name, (shape, gib) in {"8B": (LARGE, 13.5), "70B": (LARGER, 17)}.items():
        made = llama(bench.root / name, gib, shape=shape, sparse=True)
        for number, (job, options) in enumerate(jobs.items()):
            store = SizedStore(f"memory://{name.lower()}-{number}", made.folder)
            register_store(store)
            reshard_in_process(f"{store.url}/source", f"{store.url}/out", **options)
            moved = max(store.uploaded_bytes, store.read_bytes)
            size = f"{made.num_bytes / 2**30:.1f}"
            share = f"{moved / made.num_bytes:.4f}"
            table.add(name, str(made.num_layers), size, job, share, moved=moved, job=job, of=name)
    return table


def measure_workers(bench: Bench) -> Table:
    """One worker and eight, against a store of limited latency and bandwidth."""
    from tests.support.stores.fault_proxy import FaultProxy

    head = ("job", "1 worker s", "8 workers s", "x", "limit")
    title = (
        f"Workers, {LATENCY * 1000:.0f} ms a request, {bench.given.bandwidth} KiB/s a connection"
    )
    table = Table(title=title, head=head)
    made = llama(bench.root / "workers", bench.given.gib)
    upload(bench, made.folder, "workers")
    shutil.rmtree(made.folder)
    options = ("--dtype", "fp16")
    found: dict[int, list[float]] = {1: [], 8: []}
    limits = {"latency": LATENCY, "bandwidth": bench.given.bandwidth << 10}
    with FaultProxy(bench.server.endpoint, **limits) as proxy:  # type: ignore[attr-defined]
        for _ in range(bench.given.rounds):
            for count, seconds in found.items():
                bench.empty("out/")
                commands = [
                    reshard(
                        *(bench.url("workers"), bench.url("out"), *options),
                        *(("--worker", f"{i}/{count}") if count > 1 else ()),
                    )
                    for i in range(count)
                ]
                seconds.append(run_together(commands, bench.environment(proxy.endpoint)))
    one, eight = min(found[1]), min(found[8])
    limit = "≥ 7 " + ("✓" if one / eight >= WORKERS_LIMIT else "✗")
    cells = ("HF bf16 → fp16", f"{one:.1f}", f"{eight:.1f}", times(one / eight), limit)
    table.add(*cells, one=found[1], eight=found[8])
    return table


DCP = """
import json, os, resource, sys, time
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
source, target = sys.argv[1:]
client = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
reader = FsspecReader(source, client_kwargs=client)
found = reader.read_metadata().state_dict_metadata
state = {
    name: torch.empty(held.size, dtype=held.properties.dtype)
    for name, held in found.items()
    if isinstance(held, TensorStorageMetadata)
}
dcp.load(state, storage_reader=reader, no_dist=True)
dcp.save(state, storage_writer=FsspecWriter(target, client_kwargs=client), no_dist=True)
"""


def measure_dcp(bench: Bench) -> Table:
    """torch DCP with fsspec and s3fs: a DCP checkpoint loaded and saved again."""
    head = ("job", "s", "DCP + s3fs s", "x faster", "limit", "MiB", "its MiB", "limit")
    table = Table(title="One worker against torch DCP with s3fs", head=head)
    made = llama(bench.root / "dcp", bench.given.gib)
    run(reshard(str(made.folder), str(bench.root / "as-dcp"), "--to", "dcp"), bench.environment())
    shutil.rmtree(made.folder)
    upload(bench, bench.root / "as-dcp", "as-dcp")
    shutil.rmtree(bench.root / "as-dcp")
    ours, theirs, memory = [], [], [0, 0]
    for _ in range(bench.given.rounds):
        for number, (command, found) in enumerate(
            (
                (reshard(bench.url("as-dcp"), bench.url("out"), "--to", "dcp"), ours),
                ([sys.executable, "-c", DCP, bench.url("as-dcp"), bench.url("out2")], theirs),
            )
        ):
            bench.empty("out")
            seconds, peak = run_watched(command, bench.environment())
            found.append(seconds)
            memory[number] = max(memory[number], peak)
    faster, share = min(theirs) / min(ours), memory[0] / memory[1]
    table.add(
        "DCP → DCP",
        f"{min(ours):.2f}",
        f"{min(theirs):.2f}",
        times(faster),
        "≥ 5 " + ("✓" if faster >= DCP_LIMIT else "✗"),
        mib(memory[0]),
        mib(memory[1]),
        verdict(share, DCP_MEMORY_LIMIT),
        ours=ours,
        theirs=theirs,
        memory=memory,
    )
    return table


GROUPS: dict[str, Callable[[Bench], Table]] = {
    "copy": measure_copy,
    "server": measure_server_copies,
    "sizes": measure_sizes,
    "workers": measure_workers,
    "dcp": measure_dcp,
}


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=1)
    options.add_argument("--group", action="append", choices=list(GROUPS), help="repeatable")
    options.add_argument(
        "--bandwidth",
        type=int,
        default=BANDWIDTH,
        metavar="KIB",
        help="KiB/s of a connection to the limited store of --group workers",
    )
    given = options.parse_args()
    tables: list[Table] = []
    with workplace(given) as folder:
        for name in given.group or GROUPS:
            root = Path(folder) / name
            root.mkdir()
            with start(given, root) as bench:
                tables.append(GROUPS[name](bench))
            show(given, Path(folder), tables, NOTE)


if __name__ == "__main__":
    main()
