"""Job: a reshard planned and carried out: written, digested, committed and reported."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megtool import __version__
from megtool.checkpoint.commit import Stage
from megtool.checkpoint.copy import CopyReport
from megtool.checkpoint.digest import (
    SIDECAR,
    DigestMode,
    Sidecar,
    TensorDigest,
    write_sidecar,
)
from megtool.checkpoint.plan import Dropped, Op, Plan, Source
from megtool.checkpoint.plan_summary import PlanSummary, summarize
from megtool.checkpoint.planner import build
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress
from megtool.errors import CoverageError
from megtool.reshard.average import Average, dropped_optimizers, sources_of
from megtool.reshard.inventory import Account, account_of
from megtool.reshard.megatron.optimizer import NONE
from megtool.reshard.open_source import CheckpointSource
from megtool.reshard.report import ReshardReport
from megtool.reshard.staged_write import write_staged
from megtool.reshard.target import Request, Target, make_target
from megtool.tensors.placement import Placement

if TYPE_CHECKING:
    from megtool.reshard.constant_feed import Given


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """How a job is carried out, whatever it is.

    All buffers of all threads take `memory_bytes` at most. `strict` refuses to drop anything.
    """

    threads: int
    memory_bytes: int
    digest: DigestMode
    strict: bool
    overwrite: bool
    dry_run: bool
    fsync: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is read, what is to be written, the plan between them, and what becomes of it all."""

    opened: CheckpointSource
    average: Average | None
    target: Target
    plan: Plan
    account: Account
    destination: Path

    @property
    def all_opened(self) -> list[CheckpointSource]:
        """The source, and the checkpoints that are averaged with it."""
        return [self.opened, *(self.average.others if self.average else ())]


def plan_job(
    opened: CheckpointSource,
    average: Average | None,
    request: Request,
    manner: ExecutionOptions,
    *,
    made: Mapping[str, NDArray[np.float32]] | None = None,
) -> Job:
    """Plan a reshard, of the mean of several checkpoints if `average` says so.

    `made` are new values of small stored tensors, in the place of the source's own of the same
    names, whose dtypes and shapes they take.

    Raises:
        MegtoolError: see `make_target` and `planner.build`.
        CoverageError: with `manner.strict`, something would be dropped.
    """
    target = make_target(opened, request)
    others = average.others if average else ()
    dropped = list(target.dropped)
    if average and request.optimizer != NONE:
        dropped += dropped_optimizers([opened, *others])
    feeds: list[Given] = []
    if made:
        feeds = [_given(target, made)]
        dropped += [Dropped(name=n, reason="its values are made anew", is_lost=False) for n in made]
    copies = {n: opened.repeats.get(c, c) for n, c in target.copies.items()}
    copies |= {n: held for n, held in opened.repeats.items() if n in target.side.placements}
    plan = build(
        [
            Source(catalogue=opened.catalogue, placements=placements_read(opened, target)),
            *sources_of(opened, others),
        ],
        target.destination,
        target.side.placements,
        fills=target.fills,
        dropped=dropped,
        copies=copies,
        shares=average.shares if average else (),
        feeds=feeds,
        options=repr((__version__, manner.digest.value, request.amax)),
    )
    account = account_of(opened, target, plan)
    if manner.strict and (lost := [d for d in account.all_dropped if d.is_lost]):
        raise CoverageError(
            f"{len(lost)} things would be dropped, the first because {lost[0].reason}",
            tensor=lost[0].name,
            hint="without --strict they are dropped and listed",
        )
    return Job(
        opened=opened,
        average=average,
        target=target,
        plan=plan,
        account=account,
        destination=request.destination,
    )


def _given(target: Target, made: Mapping[str, NDArray[np.float32]]) -> Given:
    """The feed of tensors with new values, which the target then takes from nowhere else."""
    from megtool.quant.packed_tensors.modelopt_tensors import in_dtype
    from megtool.reshard.constant_feed import Given

    held = target.destination.catalogue
    placements = {n: p for n, p in target.side.placements.items() if p.stored not in made}
    target.side = replace(target.side, placements=placements)
    values = [(held[name], in_dtype(value, held[name].dtype)) for name, value in made.items()]
    return Given(values=tuple(values))


def execute(
    job: Job, manner: ExecutionOptions, files: Files, progress: Progress, *, began: float
) -> ReshardReport:
    """Do a planned job, or with `manner.dry_run` find out whether it can be done.

    `began` is when all that the report's seconds count did, on the monotonic clock.

    Raises:
        MegtoolError: see `Stage` and `execute`; nothing is left at the destination.
    """
    plan = job.plan
    summary = summarize(plan, threads=manner.threads, memory_bytes=manner.memory_bytes)
    stage = Stage(
        job.destination,
        files=files,
        fingerprint=plan.fingerprint,
        overwrite=manner.overwrite,
        is_file=job.target.is_file,
        sources=[place for opened in job.all_opened for place in places_of(opened)],
    )
    if manner.dry_run:
        stage.check()
        return _report(job, summary, dry_run=True)
    written = _write(job, stage, manner, progress)
    return _report(
        job,
        summary,
        dry_run=False,
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
        warnings=tuple(stage.messages),
        **written,
    )


def _write(job: Job, stage: Stage, manner: ExecutionOptions, progress: Progress) -> dict[str, Any]:
    """Carry out the plan and commit it; what the report says of that."""
    opened, target, plan = job.opened, job.target, job.plan
    written: list[Sidecar] = []

    def finish(copied: CopyReport) -> None:
        if target.finish is not None:
            target.finish(stage, manner.threads)
        written.append(write_digests(opened, target, plan, copied, stage))

    copied = write_staged(
        plan,
        stage,
        what="reshard",
        threads=manner.threads,
        memory_bytes=manner.memory_bytes,
        digest=manner.digest,
        fsync=manner.fsync,
        progress=progress,
        expected=expected_digests(opened),
        finish=finish,
    )
    (sidecar,) = written
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
        "overflowed": dict(copied.overflowed),
    }


def _report(job: Job, summary: PlanSummary, **facts: Any) -> ReshardReport:
    opened, target, plan = job.opened, job.target, job.plan
    parallel = target.parallel
    layout = {k: getattr(parallel, k) for k in _AXES} if parallel else {}
    return ReshardReport(
        source=str(opened.path),
        destination=str(job.destination),
        source_format=opened.catalogue.format,
        target_format=target.format,
        family=opened.family_name,
        layout=layout,
        tensors=len(plan.target.catalogue.tensors),
        num_bytes=plan.target.catalogue.num_bytes,
        plan=summary,
        account=job.account,
        left_out=opened.left_out,
        shares=_shares(job),
        amax=target.amax,
        **facts,
    )


def _shares(job: Job) -> tuple[tuple[str, float], ...]:
    """The checkpoints that are averaged, and the share of each."""
    if job.average is None:
        return ()
    paths = [str(o.path) for o in job.all_opened]
    return tuple(zip(paths, job.average.shares, strict=True))


_AXES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")


def places_of(opened: CheckpointSource) -> list[Path]:
    """Files and folders that the destination must neither be in nor hold."""
    catalogue = opened.catalogue
    if opened.path.is_dir():
        return [opened.path, catalogue.root]
    return [opened.path, *(catalogue.path(i) for i in range(len(catalogue.files)))]


def placements_read(opened: CheckpointSource, target: Target) -> Mapping[str, Placement]:
    """The source's placements that the target asks for, under the one name they are read by."""
    wanted = {opened.repeats.get(n, n) for n in target.side.placements}
    return {n: p for n, p in opened.side.placements.items() if n in wanted}


def expected_digests(opened: CheckpointSource) -> dict[str, int]:
    """Digests the source is known to have, under the names this run uses."""
    return {name: d.crc32c for name, d in _known(opened).items()}


def _known(opened: CheckpointSource) -> dict[str, TensorDigest]:
    sidecar = opened.sidecar
    if sidecar is None or (sidecar.names == "canonical") != opened.is_canonical:
        return {}
    out = {}
    for name, tensor in opened.side.canonical.items():
        d = sidecar.tensors.get(name)
        if d is not None and d.shape == tensor.shape and d.dtype == tensor.dtype:
            out[name] = d
    return out


def write_digests(
    opened: CheckpointSource, target: Target, plan: Plan, copied: CopyReport, stage: Stage
) -> Sidecar:
    """Put the digests of what was written beside it, if there are any, and return them."""
    sidecar = _sidecar_of(opened, target, plan, copied)
    if sidecar.tensors:
        stage.write(str(Path(target.sidecar_folder) / SIDECAR), write_sidecar(sidecar))
    return sidecar


def _sidecar_of(
    opened: CheckpointSource, target: Target, plan: Plan, copied: CopyReport
) -> Sidecar:
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
    return Sidecar(
        names="canonical" if opened.is_canonical else "stored",
        tool=f"megtool {__version__}",
        family=opened.family_name if opened.is_canonical else None,
        tensors=tensors,
    )


def peak_rss_bytes() -> int:
    """This process's largest resident set so far (not its parent's, which getrusage inherits)."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
