"""Low-rank updates of a checkpoint's weights, their sums, and a reshard that adds them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megtool.console import silent
from megtool.options.execution import ExecutionOptions
from megtool.options.layout import LayoutOptions
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions
from megtool.reshard.execute import execute, plan_reshard
from megtool.reshard.open_selected import ReshardSources, open_selected
from megtool.reshard.report import ReshardReport
from megtool.source.merge import AdapterMerge
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.weight_update import WeightUpdate

EXECUTION = ExecutionOptions(fsync=False, threads=1)


def random_update(
    shape: tuple[int, ...], *, rank: int = 4, seed: int = 0, scale: float = 2.0
) -> WeightUpdate:
    """An update about as large as the weights of small models."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, shape[1], generator=generator).mul(0.1).bfloat16()
    up = torch.randn(shape[0], rank, generator=generator).mul(0.1)
    return WeightUpdate(down, up, scale)


def random_updates(folder: Path, globs: Iterable[str], **options: Any) -> dict[str, WeightUpdate]:
    """Updates of the canonical weights of a checkpoint that match a glob."""
    tensors = open_source(folder, optimizer=False).view.canonical
    names = [n for n in tensors if any(fnmatch(n, glob) for glob in globs)]
    return {n: random_update(tensors[n].shape, seed=k, **options) for k, n in enumerate(names)}


def add_update(weight: torch.Tensor, update: WeightUpdate) -> torch.Tensor:
    """A weight with its update, computed in float64 and rounded to float32 and to its dtype."""
    up, down = (np.asarray(f.double()) for f in (update.up, update.down))
    total = np.asarray(weight.double()) + update.scale * (up @ down)
    return torch.from_numpy(total).float().to(weight.dtype)


def merge(
    source: Path,
    destination: Path,
    updates: dict[str, WeightUpdate],
    *,
    execution: ExecutionOptions = EXECUTION,
    files: Files | None = None,
    optimizer: str | None = None,
    dtype: Any = None,
    to: str | None = None,
    **layout: int,
) -> ReshardReport:
    """Reshard a checkpoint with `updates` added to its weights."""
    target = TargetOptions(
        destination=destination,
        to=to,
        dtype=None if dtype is None else dtype.name,
        optimizer_format=optimizer,
        layout=LayoutOptions(**layout),
    )
    opened = replace(target, optimizer_format=optimizer or "none")
    checkpoint = open_selected(source, SourceSelection(), opened)
    sources = ReshardSources(source=checkpoint, merges=[AdapterMerge(updates=updates)])
    job = plan_reshard(sources, target, execution)
    return execute(job, execution, files or Files(), silent, start=time.monotonic())
