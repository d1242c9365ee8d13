"""Start trained_world.py, and read what it saved by torch alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.peers.forked_worlds import run_forked

ITERATION = "iter_0000007"


def run_world(action: str, *, core: Path | None = None, **options: Any) -> str:
    """Run an action, of the megatron-core in the folder `core` or of the one that is installed."""
    return run_forked("trained_world.py", action, json.dumps(options), core=core)


def read_with_torch(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by torch alone."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    out: dict[str, Any] = {}
    _load_state_dict(
        out,
        storage_reader=FileSystemReader(folder / ITERATION),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return {k: v for k, v in out.items() if isinstance(v, torch.Tensor)}
