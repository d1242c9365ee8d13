"""Worlds of real gloo processes on this machine, for tests of everything parallel.

The processes are forked from a server that has imported torch once, so a world costs a fraction of
a second. A world runs one function of a test module (found by its name) on every rank:

    def sums(rank: int, size: int, scale: float) -> float: ...

    results = run_world(sums, 4, 2.0)   # one result for each rank
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

PRELOADED = [
    "torch.distributed.pipelining",
    "pytest",
    "hypothesis",
    "megtool.model.stacks.pipeline",
]


class WorldError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run_world(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 300.0
) -> list[Any]:
    """`function(rank, size, *args)` on `size` ranks with torchrun's environment; their results.

    Nothing is initialized: the function calls `ProcessGroups.start`. What it returns is pickled.

    Raises:
        WorldError: a rank failed, or they took longer than `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # As under torchrun, the store is there before the ranks, at a port that nobody else can take.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends: dict[Connection, int] = {}
    processes = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        numbers = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": store.port}
        process = context.Process(target=_rank, args=(there, function, numbers, args))
        process.start()
        there.close()
        ends[here] = rank
        processes.append(process)
    results: dict[int, Any] = {}
    failures: list[str] = []
    try:
        while len(results) < size and not failures:
            ready = wait([end for end, rank in ends.items() if rank not in results], timeout_s)
            if not ready:
                failures.append(f"ranks {sorted(set(range(size)) - set(results))} hang")
            for end in ready:
                rank = ends[end]
                try:
                    ok, value = pickle.loads(end.recv_bytes())
                except EOFError:
                    ok, value = False, "died"
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
    finally:
        for process in processes:
            if failures:
                process.kill()
            process.join()
    if failures:
        raise WorldError("\n".join(failures))
    return [results[rank] for rank in range(size)]


def _rank(
    end: Connection,
    function: Callable[..., Any],
    numbers: dict[str, int],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    os.environ.update({name: str(n) for name, n in numbers.items()}, LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        said = pickle.dumps((True, function(rank, size, *args)))
    except BaseException:  # whatever it was, the test has to see it
        said = pickle.dumps((False, traceback.format_exc()))
    end.send_bytes(said)
    end.close()
    if dist.is_initialized():
        dist.destroy_process_group()
