"""How long training waits for a save: asynchronous against synchronous and against torch's own.

python examples/benchmarks/save_stall.py [--gib 0.05] [--dir DIR] [--rounds 5] [--no-fsync]

One process holds a Llama in bfloat16 with AdamW's float32 state (seven times the weights' bytes);
`torch DCP` saves the very same tensors, by `async_save` with its own threads and staging.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.synthetic import llama
from bench.table import Table, mib, parser, show, times, verdict, workplace

SYNC, OURS, DCP = "megtool, synchronous", "megtool, asynchronous", "torch DCP, async_save"
DCP_SYNC = "torch DCP, synchronous"
BEHIND = "megtool, copied behind a pass"
OF_SYNC, OF_DCP = 0.1, 0.5
NOTE = (
    "`waits` is what training waits for: until the call returns; `CPU` is the waiting thread's own "
    "time of that. Copied behind a pass, as `megtool finetune` does it, it is also what is left to "
    "wait for after a pass of matrix products, and what that takes longer than alone. The next "
    "entrant starts when all bytes of the one before are written. Times and shares are of the "
    "fastest of the rounds; every entrant has saved once before, and has what memory it keeps."
)

Times = tuple[float, float, float]


class Run:
    """A model with its optimizer, in one process, and the ways to save it."""

    def __init__(self, source: Path, folder: Path, *, fsync: bool) -> None:
        import torch
        import torch.distributed as dist

        from megtool.dtypes import dtype
        from megtool.optim.config import OptimizerConfig
        from megtool.optim.distributed import DistributedOptimizer
        from megtool.parallel.process_groups import ProcessGroups
        from megtool.source.open import open_source
        from megtool.train.checkpointing.megatron_template import make_save_template
        from megtool.train.checkpointing.save import TorchDistSaver
        from megtool.train.model.build import load_for_training

        if not dist.is_initialized():
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        opened = open_source(source)
        assert opened.model is not None
        held = opened
        groups = ProcessGroups.alone()
        self.stages = load_for_training(held, groups, dtype="bfloat16")
        self.optimizer = DistributedOptimizer(
            self.stages[0].named_parameters(), OptimizerConfig(), groups, chunks=self.stages
        )
        for segment in self.optimizer.segments:
            for state in segment.states.values():
                torch.nn.init.normal_(state)  # pages that were never written are read for nothing
        self.template = make_save_template(opened, groups.parallel, dtype("bfloat16"))
        self.folder, self.fsync = folder, fsync
        self.saver = TorchDistSaver(folder / "ours", self.template, groups, fsync=fsync)
        self.saver.prepare(self.stages, self.optimizer)
        self.number = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a saved iteration."""
        return sum(t.numel() * t.element_size() for t in self.state().values())

    def state(self) -> dict[str, Any]:
        """All tensors, by what a checkpoint calls them."""
        weights = self.stages[0].state_dict()
        states = {f"{p.state}.{p.parameter}": p.tensor for p in self.optimizer.pieces()}
        return {**weights, **states}

    def ours(self, *, asynchronous: bool) -> Times:
        """Seconds waited for, of the CPU, and until all is written."""
        from megtool.train.checkpointing.protocol import SaveMetadata

        self.number += 1
        began, used = time.perf_counter(), time.thread_time()
        self.saver.save(
            self.number, self.stages, self.optimizer, SaveMetadata(), asynchronous=asynchronous
        )
        waited, used = time.perf_counter() - began, time.thread_time() - used
        self.saver.finish()
        whole = time.perf_counter() - began
        shutil.rmtree(self.folder / "ours" / f"iter_{self.number:07d}")
        return waited, used, whole

    def behind(self) -> Times:
        """The same, copied while something is computed."""
        from megtool.train.checkpointing.protocol import SaveMetadata

        alone = min(self._compute() for _ in range(3))
        self.number += 1
        began, used = time.perf_counter(), time.thread_time()
        self.saver.save(
            self.number,
            self.stages,
            self.optimizer,
            SaveMetadata(),
            asynchronous=True,
            copy_behind=True,
        )
        waited = time.perf_counter() - began
        longer = self._compute() - alone
        waited += max(0.0, longer) + self.saver.wait_for_copy()
        used = time.thread_time() - used - alone
        self.saver.finish()
        whole = time.perf_counter() - began
        shutil.rmtree(self.folder / "ours" / f"iter_{self.number:07d}")
        return waited, max(0.0, used), whole

    def _compute(self) -> float:
        """Seconds of some matrix products, which take longer than the copy."""
        import torch

        began = time.perf_counter()
        x = torch.ones(768, 768)
        for _ in range(120):
            x = (x @ x).clamp_(max=1.0)
        return time.perf_counter() - began

    def dcp(self, *, asynchronous: bool) -> Times:
        """The same by torch's own."""
        import torch.distributed.checkpoint as dcp

        path = self.folder / "dcp"
        writer = dcp.FileSystemWriter(path, sync_files=self.fsync)
        state = self.state()
        began, used = time.perf_counter(), time.thread_time()
        if asynchronous:
            done = dcp.async_save(state, storage_writer=writer)
            waited, used = time.perf_counter() - began, time.thread_time() - used
            getattr(done, "upload_completion", done).result()
        else:
            dcp.save(state, storage_writer=writer)
            waited, used = time.perf_counter() - began, time.thread_time() - used
        whole = time.perf_counter() - began
        shutil.rmtree(path)
        return waited, used, whole


def measure(given: argparse.Namespace, root: Path) -> None:
    """All entrants in turn."""
    import torch

    torch.set_num_threads(given.threads)
    source = llama(root / "source", given.gib, finite=True)
    run = Run(source.folder, root, fsync=given.fsync)
    entrants: dict[str, Callable[[], Times]] = {
        SYNC: lambda: run.ours(asynchronous=False),
        OURS: lambda: run.ours(asynchronous=True),
        BEHIND: run.behind,
        DCP: lambda: run.dcp(asynchronous=True),
        DCP_SYNC: lambda: run.dcp(asynchronous=False),
    }
    found: dict[str, list[Times]] = {name: [] for name in entrants}
    for number in range(given.rounds + 1):
        for name, save in entrants.items():
            seconds = save()
            if number:
                found[name].append(seconds)
    best = {n: [min(t[i] for t in seconds) for i in range(3)] for n, seconds in found.items()}
    head = ("save", "waits ms", "CPU ms", "written ms", "of synchronous", "limit", "of DCP's")
    size = mib(run.num_bytes)
    table = Table(
        title=f"What training waits for a save of {size} MiB", head=(*head, "limit", "CPU of DCP's")
    )
    for name, seconds in found.items():
        waited, used, whole = best[name]
        of_sync, of_dcp = waited / best[SYNC][0], waited / best[DCP][0]
        limits = (OF_SYNC if name == BEHIND else None, OF_DCP if name in (OURS, BEHIND) else None)
        table.add(
            name,
            f"{waited * 1e3:.0f}",
            f"{used * 1e3:.0f}",
            f"{whole * 1e3:.0f}",
            times(of_sync),
            verdict(of_sync, limits[0]),
            times(of_dcp),
            verdict(of_dcp, limits[1]),
            times(used / best[DCP][1]),
            save=name,
            seconds=seconds,
            of_sync=of_sync,
            of_dcp=of_dcp,
            cpu_of_dcp=used / best[DCP][1],
        )
    run.saver.close()
    show(given, root, [table], NOTE)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=0.05)
    options.add_argument("--no-fsync", dest="fsync", action="store_false", help="leave it to Linux")
    options.add_argument("--threads", type=int, default=1, help="torch's threads")
    given = options.parse_args()
    with workplace(given) as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
