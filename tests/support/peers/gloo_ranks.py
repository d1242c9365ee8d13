"""Ranks of a peer's program: processes of this machine that meet over gloo."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(work: Callable[..., None], world: int, *args: Any, method: str = "fork") -> None:
    """Call `work(rank, *args)` in `world` processes, whose default group is that of all.

    Raises:
        ProcessRaisedException: one of them failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(_enter, (work, world, store.port, args), world, start_method=method)


def _enter(
    rank: int, work: Callable[..., None], world: int, port: int, args: tuple[Any, ...]
) -> None:
    warnings.filterwarnings("ignore")
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
    }
    dist.init_process_group("gloo", rank=rank, world_size=world)
    work(rank, *args)
