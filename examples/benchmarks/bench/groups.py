"""Groups: the jobs that race in reshard_speed.py, by the source they share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.race import run_job
from bench.synthetic import COLUMNS, ROWS, llama, without_config
from bench.trained import trained

SHARED, CONTIGUOUS, STRIDED, CAST = (1.05, 0.6), (1.5, 1.0), (1.5, 1.0), (1.5, 1.5)
OPTIMIZER = (2.0, 1.5)
"""Limits as multiples of `cp`, for one and two threads; `SHARED` of what the kernel copies."""

Options = Mapping[str, Any]
Made = tuple[Path, int]  # a checkpoint's folder and the bytes of its tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `reshard` is asked for, and the limits for one and two threads.

    With `num_files`, shards are as large as makes that many of them.
    """

    name: str
    options: Options
    kind: str = "reshard"
    limits: tuple[float, float] | None = None
    num_files: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs with one source, which `make` writes below a folder at a size in GiB.

    `share` is how many bytes are written per byte read.
    """

    name: str
    make: Callable[[Path, float], Made]
    jobs: tuple[Job, ...]
    share: float = 1


def hf(root: Path, gib: float, *, dtype: str = "bfloat16") -> Made:
    """A Hugging Face folder."""
    made = llama(root / "hf", gib, dtype=dtype)
    return made.folder, made.num_bytes


def hf_fp32(root: Path, gib: float) -> Made:
    """The same of float32."""
    return hf(root, gib, dtype="float32")


def nameless(root: Path, gib: float) -> Made:
    """A folder that does not say what model it holds."""
    made = llama(root / "hf", gib)
    return without_config(made, root / "plain"), made.num_bytes


def by_rows(root: Path, gib: float) -> Made:
    """TP4, of tensors cut in their first dimension."""
    return cut_over_ranks(root, gib, ROWS, tp=4)


def by_columns(root: Path, gib: float) -> Made:
    """TP4, of tensors cut in their second dimension."""
    return cut_over_ranks(root, gib, COLUMNS, tp=4)


def by_fewer_columns(root: Path, gib: float) -> Made:
    """TP2, of tensors cut in their second dimension."""
    return cut_over_ranks(root, gib, COLUMNS, tp=2)


def cut_over_ranks(root: Path, gib: float, parts: tuple[str, ...], *, tp: int) -> Made:
    """A torch_dist checkpoint of some of a model's tensors."""
    made = llama(root / "whole", gib, only=parts)
    options = {
        "source": str(made.folder),
        "destination": str(root / "cut"),
        "to": "torch_dist",
        "tp": tp,
        "select": ["*"],
    }
    run_job("reshard", options)
    shutil.rmtree(made.folder)
    return root / "cut", made.num_bytes


def buckets(root: Path, gib: float) -> Made:
    """Megatron's default: the optimizer in buckets, of two data-parallel ranks."""
    return trained(root, gib, to="torch_dist", optimizer="dp_reshardable", dp=2)


def rank_files(root: Path, gib: float) -> Made:
    """The legacy format: a folder of `.pt` files for each of two tensor-parallel ranks."""
    return trained(root, gib, to="megatron", optimizer="legacy", tp=2)


TORCH_DIST = {"to": "torch_dist", "pp": 2}
PART = {"select": ["*"]}  # a part of a model: these tensors alone
GROUPS = (
    Group(
        name="rename",
        make=nameless,
        jobs=(
            Job(
                name="rename",
                options={"rename": ["model.*=student.*"]},
                limits=CONTIGUOUS,
                num_files=4,
            ),
        ),
    ),
    Group(
        name="hf",
        make=hf,
        jobs=(
            Job(name="HF → torch_dist PP2", options=TORCH_DIST, limits=CONTIGUOUS),
            Job(
                name="HF → torch_dist PP2, --digest none",
                options={**TORCH_DIST, "digest": "none"},
            ),
            Job(
                name="HF → torch_dist PP2, --digest buffered",
                options={**TORCH_DIST, "digest": "buffered"},
                limits=SHARED,
            ),
            Job(
                name="HF → torch_dist TP2, all of a model",
                options={"to": "torch_dist", "tp": 2},
            ),
        ),
    ),
    Group(
        name="rows",
        make=by_rows,
        jobs=(
            Job(
                name="torch_dist TP4 → TP2, tensors cut by rows",
                options={**PART, "tp": 2},
                limits=CONTIGUOUS,
            ),
        ),
    ),
    Group(
        name="columns",
        make=by_columns,
        jobs=(
            Job(
                name="torch_dist TP4 → TP2, tensors cut by columns",
                options={**PART, "tp": 2},
                limits=STRIDED,
            ),
            Job(
                name="the same, --digest none",
                options={**PART, "tp": 2, "digest": "none"},
            ),
            Job(name="floor: plain read and write of 256 KiB", options={}, kind="through_buffer"),
        ),
    ),
    Group(
        name="more-columns",
        make=by_fewer_columns,
        jobs=(
            Job(
                name="torch_dist TP2 → TP4, tensors cut by columns",
                options={**PART, "tp": 4},
                limits=STRIDED,
            ),
        ),
    ),
    Group(
        name="cast",
        make=hf_fp32,
        share=0.5,
        jobs=(Job(name="HF fp32 → bf16", options={"dtype": "bf16"}, limits=CAST, num_files=4),),
    ),
    Group(
        name="buckets",
        make=buckets,
        jobs=(
            Job(
                name="dp_reshardable TP1 → fully_reshardable PP2",
                options={"optimizer_format": "fully_reshardable", "pp": 2},
                limits=OPTIMIZER,
            ),
            Job(
                name="dp_reshardable TP1 → dp_reshardable TP2 PP2",
                options={"optimizer_format": "dp_reshardable", "tp": 2, "pp": 2},
                limits=OPTIMIZER,
            ),
            Job(
                name="dp_reshardable TP1 → legacy TP2",
                options={"to": "megatron", "tp": 2},
                limits=OPTIMIZER,
            ),
        ),
    ),
    Group(
        name="rank-files",
        make=rank_files,
        jobs=(
            Job(
                name="legacy TP2 → fully_reshardable TP2",
                options={"to": "torch_dist"},
                limits=OPTIMIZER,
            ),
        ),
    ),
)
