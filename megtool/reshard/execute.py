"""Plan and execute a reshard: write, digest, commit and report."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megtool import __version__
from megtool.console import Progress
from megtool.convert.identity import is_optimizer_state
from megtool.digests.crc32c import TOOL, Sidecar, TensorDigest
from megtool.errors import CoverageError, DigestError, FormatError, UsageError
from megtool.fp8_state.transfer import resolve_amax
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.options.target import TargetOptions
from megtool.plan.copies import DroppedItem, Op, PlanSource, ReshardPlan
from megtool.plan.execute import CopyReport
from megtool.plan.flows import sum_flows
from megtool.plan.planner import build_plan
from megtool.plan.summary import PlanSummary, summarize
from megtool.process.worker_identity import WorkerIdentity, parse_worker
from megtool.reshard.inventory import Inventory, take_inventory
from megtool.reshard.open_selected import ReshardSources
from megtool.reshard.readback import check_readable
from megtool.reshard.report import ReshardReport
from megtool.reshard.staged_write import make_stage, write_staged
from megtool.reshard.target import make_target
from megtool.reshard.writers.target_spec import Target
from megtool.reshard.written_digests import write_digests
from megtool.run_state.optimizer import NONE
from megtool.source.average import averaged_sources, dropped_optimizers
from megtool.source.checkpoint import CheckpointSource
from megtool.source.merge import check_merge, collect_updates
from megtool.source.subset.widths import describe_kept
from megtool.staging.stage import Stage
from megtool.storage.files import Files
from megtool.storage.location.path import find_copying_store
from megtool.tensors.placement import Placement
from megtool.transport.reading.parallel_scan import default_threads

if TYPE_CHECKING:
    from megtool.reshard.readback_compare import ReadbackReport
    from megtool.transport.constant_feed import ConstantFeed

_LOG = logging.getLogger(__name__)

LEAST_THREAD_BYTES = 384 << 10
"""The least memory for the buffers of one thread."""


def fill_in(execution: ExecutionOptions, *locations: Path) -> ExecutionOptions:
    """Return the options with what they leave open: the number of threads, and what is digested.

    There are as many threads as there are cores and memory for (at most 8); with `locations` in
    stores, for which threads wait, 8 whatever the cores.

    Raises:
        UsageError: too little memory for the buffers of all threads, or no such worker.
    """
    requested, memory_bytes = execution.threads, execution.memory_bytes
    most = memory_bytes // LEAST_THREAD_BYTES
    if most < (requested or 1):
        raise UsageError(
            f"memory of {memory_bytes:,} bytes is too little"
            + (f" for {requested} threads" if requested and requested > 1 else ""),
            hint=f"a thread needs at least {LEAST_THREAD_BYTES >> 10} KiB"
            + (f": --threads {most}, or more memory" if most else ""),
        )
    parse_worker(execution.worker)
    threads = requested or min(default_threads(None, *locations), most)
    return replace(execution, threads=threads, digest=execution.digest_mode.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardJob:
    """A planned reshard: its sources, its target, the plan, and an inventory of what becomes of
    everything in the source."""

    sources: ReshardSources
    target: Target
    plan: ReshardPlan
    inventory: Inventory
    destination: Path


def plan_reshard(
    sources: ReshardSources,
    options: TargetOptions,
    execution: ExecutionOptions,
    *,
    constants: Mapping[str, NDArray[np.float32]] | None = None,
) -> ReshardJob:
    """Plan a reshard.

    `constants` are new values of small stored tensors, which replace the source's tensors of the
    same names and take their dtypes and shapes.

    Raises:
        MegtoolError: see `make_target`, `check_merge` and `planner.build_plan`.
        CoverageError: with `execution.strict`, something would be dropped.
    """
    source, average, merges = sources.source, sources.average, sources.merges
    if average or merges:
        source = replace(source, pruning=None)  # the result equals no part of another model
    amax = resolve_amax(options)
    for merge in merges:
        check_merge(source, merge, amax)
    target = make_target(source, options)
    if source.pruning is not None and target.is_file:
        _LOG.warning("a single file has no record of what was pruned: write a folder to verify it")
    others = sources.others
    dropped = list(target.dropped)
    if average and options.optimizer_format != NONE:
        dropped += dropped_optimizers([source, *others], "the mean of several checkpoints")
    if merges and options.optimizer_format != NONE:
        dropped += dropped_optimizers([source], "a model with a merged adapter")
    settings = source.model.dropped_record if source.model else None
    feeds: list[ConstantFeed] = []
    if constants:
        feeds = [_constant_feed(target, constants)]
        dropped += [
            DroppedItem(name=n, reason="its values are computed again", is_lost=False)
            for n in constants
        ]
    copies = {n: source.repeats.get(c, c) for n, c in target.copies.items()}
    copies |= {n: first for n, first in source.repeats.items() if n in target.side.placements}
    plan = build_plan(
        [
            PlanSource(
                catalogue=source.catalogue,
                placements=placements_read(source, target),
                updates=collect_updates(merges),
            ),
            *averaged_sources(source, others),
        ],
        target.destination,
        target.side.placements,
        fills=target.fills,
        dropped=dropped,
        copies=copies,
        parts=target.parts,
        shares=average.shares if average else (),
        feeds=feeds,
        options=repr((__version__, execution.digest_mode.value, amax, source.pruning, settings)),
        worker=_planning_worker(source, others, target, options.destination, execution),
    )
    inventory = take_inventory(source, target, plan)
    if execution.strict and (lost := [d for d in inventory.all_dropped if d.is_lost]):
        raise CoverageError(
            f"{len(lost)} things would be dropped, the first because {lost[0].reason}",
            tensor=lost[0].name,
            hint="without --strict they are dropped and listed"
            + (_WEIGHTS_ALONE if any(is_optimizer_state(d.name) for d in lost) else ""),
        )
    return ReshardJob(
        sources=replace(sources, source=source),
        target=target,
        plan=plan,
        inventory=inventory,
        destination=options.destination,
    )


_WEIGHTS_ALONE = "; --optimizer-format none asks for the weights alone"


def _planning_worker(
    source: CheckpointSource,
    others: Sequence[CheckpointSource],
    target: Target,
    destination: Path,
    execution: ExecutionOptions,
) -> WorkerIdentity | None:
    """The worker whose share is planned alone; None where everybody needs the plan of all.

    That is so where a store copies, which decides how all files are cut, and where files are
    encoded after all data are there.
    """
    if execution.worker_identity is None or execution.dry_run or target.finish is not None:
        return None
    is_tiled = execution.digest_mode is DigestMode.ALL  # all bytes are read here
    store = None if is_tiled else find_copying_store(destination)
    if store is not None:
        from megtool.staging.store.part_plan import can_copy_from

        if can_copy_from(store, [s.catalogue for s in (source, *others)]):
            return None
    return execution.worker_identity


def _constant_feed(target: Target, constants: Mapping[str, NDArray[np.float32]]) -> ConstantFeed:
    """The feed of tensors with new values, which the target then reads from nowhere else."""
    from megtool.transport.constant_feed import ConstantFeed, round_to_dtype

    catalogue = target.destination.catalogue
    placements = {n: p for n, p in target.side.placements.items() if p.stored not in constants}
    target.side = replace(target.side, placements=placements)
    values = [
        (catalogue[name], round_to_dtype(value, catalogue[name].dtype))
        for name, value in constants.items()
    ]
    return ConstantFeed(values=tuple(values))


def execute(
    job: ReshardJob, execution: ExecutionOptions, files: Files, progress: Progress, *, start: float
) -> ReshardReport:
    """Execute a planned reshard, or with `execution.dry_run` check that it can be executed.

    `start` is the time on the monotonic clock from which the report counts seconds.

    Raises:
        MegtoolError: see `Stage` and `plan.execute.execute`; nothing is left at the
            destination.
    """
    plan = job.plan
    summary = summarize(plan, threads=execution.num_threads, memory_bytes=execution.memory_bytes)
    stage = make_stage(
        execution,
        job.destination,
        files=files,
        fingerprint=plan.fingerprint,
        is_file=job.target.is_file,
        sources=job.sources.paths,
        rewrites_data=job.target.finish is not None,
        plan=plan,
    )
    if execution.dry_run:
        stage.check()
        return _report(job, summary, dry_run=True, flows=sum_flows(plan))
    stages = {"open and plan": time.monotonic() - start}
    results = _write(job, stage, execution, progress, stages)
    return _report(
        job,
        summary,
        dry_run=False,
        flows=sum_flows(plan),
        stages=stages,
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak_rss_bytes(),
        warnings=tuple(stage.messages),
        **results,
    )


def _write(
    job: ReshardJob,
    stage: Stage,
    execution: ExecutionOptions,
    progress: Progress,
    stages: dict[str, float],
) -> dict[str, Any]:
    """Write the plan and commit it; the fields of the report about that, seconds in `stages`."""
    source, target, plan = job.sources.source, job.target, job.plan
    readbacks: list[ReadbackReport] = []

    began = time.monotonic()

    def end_stage(name: str) -> None:
        nonlocal began
        stages[name], began = time.monotonic() - began, time.monotonic()

    def finish(copied: CopyReport) -> None:
        end_stage("copy")
        if target.finish is not None:
            target.finish(stage, execution.num_threads)
        write_target_digests(source, target, plan, copied, stage, execution)
        end_stage("digests")
        if execution.verify:
            readbacks.append(verify_staged(source, target, plan, stage, execution, progress))
        check_staged(source, target, plan, stage)
        end_stage("check")

    copied = write_staged(
        plan,
        stage,
        execution,
        verb="reshard",
        progress=progress,
        expected=expected_digests(source),
        finish=finish,
    )
    end_stage("publish")
    computed = sum(n not in target.copies for n in copied.digests.complete())
    sidecar = stage.sidecar or Sidecar(names="stored", tool=TOOL, tensors={})
    placed = len(target.side.placements) - len(target.copies)
    inherited = 0 if target.is_file else len(sidecar.tensors) - computed
    if target.is_file:  # of its stored tensors, those the kernel copied included
        computed = placed if sidecar.stored_tensors else 0
    return {
        "worker": copied.worker,
        "kernel_bytes": stage.count_copied(copied.kernel_bytes),
        "resumed_units": copied.verified,
        "repaired_units": copied.repaired,
        "digested": computed,
        "inherited": inherited,
        "unverified": placed - computed - inherited,
        "digested_files": int(computed > 0) if target.is_file else len(sidecar.files),
        "peak_buffer_bytes": copied.peak_buffer_bytes,
        "overflowed": dict(copied.overflowed),
        "verified": readbacks[0].num_tensors if readbacks else None,
    }


def check_staged(source: CheckpointSource, target: Target, plan: ReshardPlan, stage: Stage) -> None:
    """Check that what is staged can be opened and holds all that was planned.

    Raises:
        FormatError: it does not; the staged data is discarded.
    """
    try:
        check_readable(source, target, plan, stage.path("") if target.is_file else stage.tree)
    except FormatError:
        stage.discard()
        raise


def verify_staged(
    source: CheckpointSource,
    target: Target,
    plan: ReshardPlan,
    stage: Stage,
    execution: ExecutionOptions,
    progress: Progress,
) -> ReadbackReport:
    """Read the staged checkpoint back, and compare it with its source.

    Raises:
        DigestError: it differs; the staged data is discarded.
    """
    from megtool.reshard.readback_compare import compare_with_source

    tree = stage.path("") if target.is_file else stage.tree
    try:
        return compare_with_source(
            source,
            target,
            plan,
            tree,
            threads=execution.num_threads,
            progress=lambda done, total: progress("verify", done, total),
        )
    except DigestError:
        stage.discard()
        raise


def _report(job: ReshardJob, summary: PlanSummary, **facts: Any) -> ReshardReport:
    source, target, plan = job.sources.source, job.target, job.plan
    parallel = target.parallel
    layout = {k: getattr(parallel, k) for k in _AXES} if parallel else {}
    return ReshardReport(
        source=str(source.path),
        destination=str(job.destination),
        source_format=source.format,
        target_format=target.format,
        family=source.family_name,
        layout=layout,
        tensors=len(plan.target.catalogue.tensors),
        num_bytes=plan.target.catalogue.num_bytes,
        plan=summary,
        inventory=job.inventory,
        left_out=source.left_out,
        replicated=tuple(target.replicated),
        shares=_shares(job.sources),
        merges=tuple(job.sources.merges),
        pruned=tuple(describe_kept(source.pruning)) if source.pruning else (),
        amax=target.amax,
        **facts,
    )


def _shares(sources: ReshardSources) -> tuple[tuple[str, float], ...]:
    """The checkpoints that are averaged, and the share of each."""
    if sources.average is None:
        return ()
    paths = [str(s.path) for s in sources.checkpoints]
    return tuple(zip(paths, sources.average.shares, strict=True))


_AXES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")


def placements_read(source: CheckpointSource, target: Target) -> Mapping[str, Placement]:
    """The source's placements that the target needs, each under the name by which it is read."""
    names = {source.repeats.get(n, n) for n in target.side.placements}
    return {n: p for n, p in source.view.placements.items() if n in names}


def expected_digests(source: CheckpointSource) -> dict[str, int]:
    """CRC-32C of the source's tensors from its sidecar, under the names that this run uses."""
    return {name: d.crc32c for name, d in _known_digests(source).items()}


def _known_digests(source: CheckpointSource) -> dict[str, TensorDigest]:
    sidecar = source.sidecar
    if sidecar is None or (sidecar.names == "canonical") != source.is_canonical:
        return {}
    out = {}
    for name, tensor in source.view.canonical.items():
        d = sidecar.tensors.get(name)
        if d is not None and d.shape == tensor.shape and d.dtype == tensor.dtype:
            out[name] = d
    return out


def write_target_digests(
    source: CheckpointSource,
    target: Target,
    plan: ReshardPlan,
    copied: CopyReport,
    stage: Stage,
    options: ExecutionOptions,
) -> None:
    """Write the digests of the target's tensors, by canonical name, and of its files."""
    write_digests(
        plan,
        stage,
        copied,
        options.digest_mode,
        tensors=_digest_tensors(source, target, plan, copied),
        folder=target.sidecar_folder,
        is_raw=target.finish is None,
        threads=options.num_threads,
    )


def _digest_tensors(
    source: CheckpointSource, target: Target, plan: ReshardPlan, copied: CopyReport
) -> Sidecar:
    """Digests of the target's tensors: computed while copying, or the source's where bytes are the
    same."""
    known = _known_digests(source)
    tensors: dict[str, TensorDigest] = {}
    for entry in plan.entries:
        if entry.op is Op.FILL or entry.canonical in target.copies:
            continue
        shape = source.view.canonical[entry.canonical].shape
        crc = copied.digests.get(entry.canonical)
        if crc is None and entry.op is Op.COPY and entry.canonical in known:
            crc = known[entry.canonical].crc32c
        if crc is not None:
            kind = plan.target_tensor(entry).dtype
            tensors[entry.canonical] = TensorDigest(crc32c=crc, dtype=kind, shape=shape)
    return Sidecar(
        names="canonical" if source.is_canonical else "stored",
        tool=TOOL,
        family=source.family_name if source.is_canonical else None,
        tensors=tensors,
        pruning=source.pruning,
        rotation=source.rotation,
        dropped_settings=source.model.dropped_record if source.model else None,
    )


def peak_rss_bytes() -> int:
    """The peak resident set of this process (not its parent's, which getrusage inherits)."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
