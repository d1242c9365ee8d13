"""Reshard: any format and layout to any other."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megtool import __version__
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.copy import CopyReport, execute
from megtool.checkpoint.digest import (
    SIDECAR,
    DigestMode,
    Sidecar,
    TensorDigest,
    write_sidecar,
)
from megtool.checkpoint.plan import Op, Plan, Source
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.summary import PlanSummary, summarise
from megtool.commands.megatron.optimizer import NONE
from megtool.commands.opened import Opened, open_model, selector
from megtool.commands.reshard_report import ReshardReport
from megtool.commands.sizes import parse_size
from megtool.commands.target import Request, Target, make_target
from megtool.convert.dialects import is_optimizer_state
from megtool.dtypes import DTYPES, DType
from megtool.dtypes import dtype as named_dtype
from megtool.errors import CoverageError, FormatError, UsageError
from megtool.log import Progress, silent

_LOG = logging.getLogger(__name__)


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
    prove_all: bool = False,
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
    progress: Progress = silent,
    files: Files | None = None,
) -> ReshardReport:
    """Write the checkpoint `source` to `destination` in another format, layout or dtype.

    `to` is a format (default: the source's own, `hf` for GGUF). Axes of the layout that are None
    stay as the source has them, 1 where it does not say; how layers go to pipeline stages is said
    as in `ParallelConfig`. `optimizer` is the format of optimizer state (`fully_reshardable`,
    `dp_reshardable`, `legacy`, or `none`), by default what the target can always be loaded from;
    state in buckets is decoded, and proved by its master weights (all of them with `prove_all`).
    `dtype` casts model weights, never
    optimizer state. `select` and `exclude` are globs on the source's names,
    `rename` patterns `OLD=NEW` on the target's. `max_shard_size` is for `hf` (5GB
    unless given), `zarr` and `tensorstore` (1GiB); `compress` (`zstd`, `blosc`) for the latter two.
    A run that was interrupted resumes when it is called again with the same arguments.

    Raises:
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    began = time.monotonic()
    files = files or Files()
    destination = Path(destination)
    opened = open_model(
        Path(source),
        iteration=iteration,
        family_name=family,
        like=None if like is None else Path(like),
        keep=_kept(selector(select, exclude), optimizer_only),
        optimizer=optimizer != NONE,
        prove_all=prove_all,
        for_format=to or "dcp",
    )
    layout = {
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "ep": ep,
        "etp": etp,
        "cp": cp,
        "dp": dp,
        "first_stage_layers": first_stage_layers,
        "last_stage_layers": last_stage_layers,
        "account_for_embedding": account_for_embedding,
        "account_for_loss": account_for_loss,
        "pipeline_layout": pipeline_layout,
    }
    request = Request(
        to=to,
        layout=layout,
        optimizer=optimizer,
        core_version=core_version,
        bridge=bridge,
        dtype=None if dtype is None else _target_dtype(dtype),
        max_shard_bytes=(
            None if max_shard_size is None else parse_size(max_shard_size, "max shard size")
        ),
        compress=compress,
        renames=tuple(rename),
        destination=destination,
    )
    mode = _digest_mode(digest)
    target = make_target(opened, request)
    plan = build(
        [Source(catalogue=opened.catalogue, placements=_used(opened, target))],
        target.destination,
        target.side.placements,
        fills=target.fills,
        dropped=target.dropped,
        copies=target.copies,
        options=repr((__version__, mode.value)),
    )
    if strict and (lost := [d for d in plan.dropped if d.is_lost]):
        raise CoverageError(
            f"{len(lost)} tensors or objects would be dropped, the first because {lost[0].reason}",
            tensor=lost[0].name,
            hint="without --strict they are dropped and listed",
        )
    if threads is None:
        threads = min(8, os.cpu_count() or 1)
    elif threads < 1:
        raise UsageError(f"threads is {threads}", hint="a positive number")
    memory_bytes = parse_size(memory, "memory")
    summary = summarise(plan, threads=threads, memory_bytes=memory_bytes)
    stage = Stage(
        destination,
        files=files,
        fingerprint=plan.fingerprint,
        overwrite=overwrite,
        is_file=target.is_file,
        sources=_source_places(opened),
    )
    if dry_run:
        stage.check()
        return _report(opened, target, plan, summary, destination, dry_run=True)
    try:
        written = _write(opened, target, plan, stage, mode, threads, memory_bytes, fsync, progress)
    except BaseException:
        if stage.describe_resume() in stage.messages:  # something was kept
            _LOG.warning("%s", stage.describe_resume())
        raise
    return _report(
        opened,
        target,
        plan,
        summary,
        destination,
        dry_run=False,
        seconds=time.monotonic() - began,
        peak_rss_bytes=_peak_rss_bytes(),
        warnings=tuple(stage.messages),
        **written,
    )


def _write(
    opened: Opened,
    target: Target,
    plan: Plan,
    stage: Stage,
    mode: DigestMode,
    threads: int,
    memory_bytes: int,
    fsync: bool,
    progress: Progress,
) -> dict[str, int]:
    """Carry out the plan and commit it; what the report says of that."""
    total = plan.target.catalogue.num_bytes
    with stage:
        for message in stage.messages:
            _LOG.info("%s", message)
        stage.require_space(sum(f.size for f in plan.target.catalogue.files))
        progress("reshard", 0, total)
        copied = execute(
            plan,
            stage,
            files=stage.files,
            threads=threads,
            memory_bytes=memory_bytes,
            digest=mode,
            progress=lambda n: progress("reshard", n, total),
            expected=_expected(opened),
        )
        if target.finish is not None:
            target.finish(stage, threads)
        sidecar = _sidecar(opened, target, plan, copied)
        if sidecar.tensors:
            stage.write(str(Path(target.sidecar_folder) / SIDECAR), write_sidecar(sidecar))
        stage.commit(fsync=fsync, threads=threads)
    complete = [n for n in copied.digests.complete() if n not in target.copies]
    digested = 0 if target.is_file else len(complete)
    return {
        "kernel_bytes": copied.kernel_bytes,
        "resumed_units": copied.verified,
        "repaired_units": copied.repaired,
        "digested": digested,
        "inherited": len(sidecar.tensors) - digested,
        "unverified": len(target.side.placements) - len(target.copies) - len(sidecar.tensors),
        "peak_buffer_bytes": copied.peak_buffer_bytes,
    }


def _report(
    opened: Opened,
    target: Target,
    plan: Plan,
    summary: PlanSummary,
    destination: Path,
    **facts: Any,
) -> ReshardReport:
    parallel = target.parallel
    layout = {k: getattr(parallel, k) for k in _AXES} if parallel else {}
    found = opened.model.family if opened.model else None
    return ReshardReport(
        source=str(opened.path),
        destination=str(destination),
        source_format=opened.catalogue.format,
        target_format=target.format,
        family=found.name if found else None,
        layout=layout,
        tensors=len(plan.target.catalogue.tensors),
        num_bytes=plan.target.catalogue.num_bytes,
        plan=summary,
        dropped=tuple(plan.dropped),
        left_out=opened.left_out,
        **facts,
    )


def _kept(keep: Callable[[str], bool] | None, optimizer_only: bool) -> Callable[[str], bool] | None:
    """Which stored tensors are wanted."""
    if not optimizer_only:
        return keep
    return lambda name: is_optimizer_state(name) and (keep is None or keep(name))


_AXES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")


def _source_places(opened: Opened) -> list[Path]:
    """Files and folders that the destination must neither be in nor hold."""
    catalogue = opened.catalogue
    if opened.path.is_dir():
        return [opened.path, catalogue.root]
    return [opened.path, *(catalogue.path(i) for i in range(len(catalogue.files)))]


def _used(opened: Opened, target: Target) -> Mapping[str, Any]:
    """The source's placements that the target asks for."""
    return {n: p for n, p in opened.side.placements.items() if n in target.side.placements}


def _expected(opened: Opened) -> dict[str, int]:
    """Digests the source is known to have, under the names this run uses."""
    return {name: d.crc32c for name, d in _known(opened).items()}


def _known(opened: Opened) -> dict[str, TensorDigest]:
    sidecar = opened.sidecar
    if sidecar is None or (sidecar.names == "canonical") != opened.is_canonical:
        return {}
    out = {}
    for name, tensor in opened.side.canonical.items():
        d = sidecar.tensors.get(name)
        if d is not None and d.shape == tensor.shape and d.dtype == tensor.dtype:
            out[name] = d
    return out


def _sidecar(opened: Opened, target: Target, plan: Plan, copied: CopyReport) -> Sidecar:
    """Digests of what was written: computed on the way, or the source's for unchanged bytes."""
    known = {} if target.is_file else _known(opened)
    tensors: dict[str, TensorDigest] = {}
    for entry in plan.entries:
        if (
            entry.op is Op.FILL or entry.canonical in target.copies or target.is_file
        ):  # a bare file has nowhere to keep digests
            continue
        shape = opened.side.canonical[entry.canonical].shape
        crc = copied.digests.get(entry.canonical)
        if crc is None and entry.op is Op.COPY and entry.canonical in known:
            crc = known[entry.canonical].crc32c
        if crc is not None:
            kind = plan.target_tensor(entry).dtype
            tensors[entry.canonical] = TensorDigest(crc32c=crc, dtype=kind, shape=shape)
    found = opened.model.family if opened.model and opened.is_canonical else None
    return Sidecar(
        names="canonical" if opened.is_canonical else "stored",
        tool=f"megtool {__version__}",
        family=found.name if found else None,
        tensors=tensors,
    )


def _target_dtype(text: str) -> DType:
    try:
        found = named_dtype(text)
    except FormatError as e:
        known = ", ".join(d.name for d in DTYPES if d.is_float)
        raise UsageError(f"dtype {text!r}", hint=f"one of {known}") from e
    if not found.is_float:
        raise UsageError(f"dtype {text!r} is no floating-point type", hint="for example bfloat16")
    return found


def _peak_rss_bytes() -> int:
    """This process's largest resident set so far (not its parent's, which getrusage inherits)."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _digest_mode(text: str) -> DigestMode:
    try:
        return DigestMode(text)
    except ValueError as e:
        known = ", ".join(DigestMode)
        raise UsageError(f"digest mode {text!r}", hint=f"one of {known}") from e
