"""Reshard: any format and layout to any other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.plan import Plan
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, silent
from megtool.dtypes import DTYPES, DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import FormatError, UsageError
from megtool.reshard.execute import ExecutionOptions, execute, plan_job
from megtool.reshard.fp8_state.transfer import wish_of
from megtool.reshard.megatron.optimizer import NONE
from megtool.reshard.parse_size import parse_size
from megtool.reshard.report import ReshardReport
from megtool.reshard.source_options import Selection
from megtool.reshard.target import Request

LEAST_THREAD_BYTES = 384 << 10
"""The buffers of one thread are no smaller."""


def reshard(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    cp: int | None = None,
    dp: int | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    pipeline_layout: str | None = None,
    optimizer: str | None = None,
    optimizer_only: bool = False,
    layers: str | None = None,
    average: Sequence[str | Path] = (),
    weights: str | None = None,
    prove_all: bool = False,
    amax: str = "keep",
    te: int | float | str | None = None,
    amax_history: int | None = None,
    core_version: str | None = None,
    bridge: bool = False,
    dtype: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    max_shard_size: str | None = None,
    compress: str | None = None,
    threads: int | None = None,
    memory: str = "128MiB",
    digest: str = "buffered",
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    iteration: str | None = None,
    check: Callable[[Plan], object] | None = None,
    progress: Progress = silent,
    files: Files | None = None,
) -> ReshardReport:
    """Write the checkpoint `source` to `destination` in another format, layout or dtype.

    `to` is a format (default: the source's own, `hf` for GGUF). Axes of the layout that are None
    stay as the source has them, 1 where it does not say; how layers go to pipeline stages is said
    as in `ParallelConfig`. `optimizer` is the format of optimizer state (`fully_reshardable`,
    `dp_reshardable`, `legacy`, or `none`), by default what the target can always be loaded from;
    state in buckets is decoded, and proved by its master weights (all of them with `prove_all`).
    `dtype` casts model weights, never optimizer state. `select` and `exclude` are globs on the
    source's names, `rename` patterns `OLD=NEW` on the target's. `layers` (`0-15`, or `0-3,8`) are
    those kept, numbered anew. `average` are checkpoints of the same model: what is written is the
    mean of their weights and the source's, in proportions `weights` (`0.5,0.3,0.2`, the source's
    first), computed in float32 and rounded once; nobody's optimizer state is.
    FP8's delayed scaling state is merged over ranks and kept (`amax` `keep`), rebuilt where the
    weights contradict it (`rebuild`), or left out where it holds nothing (`strip`); `te` is
    the release of Transformer Engine to write for: 1, 2, or 2.2 and 2.3, between which it changed
    how it lays out those of grouped experts. `amax_history` is the steps of histories.
    `max_shard_size` is for `hf` (5GB unless given), `zarr` and `tensorstore` (1GiB); `compress`
    (`zstd`, `blosc`) for the latter two. `check` is called with the plan before anything is staged;
    what it raises is raised.
    A run that was interrupted resumes when it is called again with the same arguments.

    Raises:
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    began = time.monotonic()
    chosen = Selection(
        iteration=iteration,
        family=family,
        like=None if like is None else Path(like),
        select=select,
        exclude=exclude,
        optimizer=optimizer != NONE,
        optimizer_only=optimizer_only,
        layers=layers,
        prove_all=prove_all,
        for_format=to or "dcp",
        average=[Path(path) for path in average],
        weights=weights,
    )
    opened = chosen.open(Path(source))
    layout: dict[str, Any] = dict(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, cp=cp, dp=dp)
    layout |= dict(first_stage_layers=first_stage_layers, last_stage_layers=last_stage_layers)
    layout |= dict(account_for_embedding=account_for_embedding, account_for_loss=account_for_loss)
    request = Request(
        to=to,
        layout=layout | dict(pipeline_layout=pipeline_layout),
        optimizer=optimizer,
        prove_all=prove_all,
        core_version=core_version,
        bridge=bridge,
        dtype=None if dtype is None else _target_dtype(dtype),
        max_shard_bytes=parse_size(max_shard_size, "max shard size") if max_shard_size else None,
        compress=compress,
        renames=tuple(rename),
        destination=Path(destination),
        amax=wish_of(amax, te, amax_history),
    )
    memory_bytes = parse_size(memory, "memory")
    manner = ExecutionOptions(
        threads=_num_threads(threads, memory_bytes),
        memory_bytes=memory_bytes,
        digest=_digest_mode(digest),
        strict=strict,
        overwrite=overwrite,
        dry_run=dry_run,
        fsync=fsync,
    )
    job = plan_job(opened, chosen.open_others(opened), request, manner)
    if check is not None:
        check(job.plan)
    return execute(job, manner, files or Files(), progress, began=began)


def _num_threads(asked: int | None, memory_bytes: int) -> int:
    """The threads asked for, or as many as there are cores and room for their buffers."""
    if asked is not None and asked < 1:
        raise UsageError(f"threads is {asked}", hint="a positive number")
    most = memory_bytes // LEAST_THREAD_BYTES
    if most < (asked or 1):
        raise UsageError(
            f"memory of {memory_bytes:,} bytes is too little"
            + (f" for {asked} threads" if asked and asked > 1 else ""),
            hint=f"a thread needs {LEAST_THREAD_BYTES >> 10} KiB at least"
            + (f": --threads {most}, or more memory" if most else ""),
        )
    return asked or min(8, os.cpu_count() or 1, most)


def _target_dtype(text: str) -> DType:
    try:
        found = named_dtype(text)
    except FormatError as e:
        known = ", ".join(d.name for d in DTYPES if d.is_float and d.itemsize > 1)
        raise UsageError(f"dtype {text!r}", hint=f"one of {known}") from e
    if not found.is_float:
        raise UsageError(f"dtype {text!r} is no floating-point type", hint="for example bfloat16")
    if found.itemsize == 1:
        raise UsageError(
            f"dtype {text!r} has 8 bits: weights need scales to fit into them, and a cast has none",
            hint="for example --dtype bfloat16; to quantize is for the framework that will load it",
        )
    return found


def _digest_mode(text: str) -> DigestMode:
    try:
        return DigestMode(text)
    except ValueError as e:
        known = ", ".join(DigestMode)
        raise UsageError(f"digest mode {text!r}", hint=f"one of {known}") from e
