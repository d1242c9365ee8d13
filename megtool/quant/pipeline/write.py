"""Writes a Hugging Face folder in which quantized weights are codes and scales.

What is kept is copied as by a reshard; what is quantized is computed on the way, tile by tile, by
feeds of the same plan: one stage, one journal, one rename.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megtool import __version__
from megtool.checkpoint.commit import StagingFolder
from megtool.checkpoint.computed_tensors import TensorFeed
from megtool.checkpoint.copy import CopyReport
from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.formats.quantized import QUANT_FILE
from megtool.checkpoint.formats.safetensors import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    plan_safetensors_layout,
)
from megtool.checkpoint.parallel_scan import default_threads
from megtool.checkpoint.plan import PlanSource, ReshardPlan
from megtool.checkpoint.planner import build_plan
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, silent
from megtool.errors import MegtoolError
from megtool.quant.packed_tensors.hf_config import hf_quant_config, with_blocks, with_quantization
from megtool.quant.packed_tensors.modelopt_tensors import needs_amax
from megtool.quant.packed_tensors.pack import find_amaxes
from megtool.quant.pipeline.stored_layout import (
    StoredModule,
    StoredWeight,
    build_module_feeds,
    build_quantization_config,
    collect_weight_qparams,
    excluded_from_blocks,
    find_folded_norms,
    list_cache_scales,
    list_stored_modules,
    list_tensor_specs,
)
from megtool.quant.pipeline.weight_layout import check_places, make_quantized_target
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import find_fused_name
from megtool.reshard.constant_feed import ConstantFeed
from megtool.reshard.execute import (
    expected_digests,
    peak_rss_bytes,
    placements_read,
    source_paths,
    write_digests,
)
from megtool.reshard.source import CheckpointSource
from megtool.reshard.staged_write import WriteOptions, write_staged, written_files
from megtool.reshard.writers.target_spec import Target, TargetOptions
from megtool.tensors.sharded import GlobalTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What was written, or will be.

    `num_bytes` are those of all tensors, `source_bytes` of the source's. `files` are relative
    paths. `resumed_units` had been finished by an earlier run, and `repaired_units` of them were
    damaged since.
    """

    num_bytes: int
    source_bytes: int
    tensors: int
    files: tuple[str, ...]
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    peak_buffer_bytes: int = 0
    kernel_bytes: int = 0
    resumed_units: int = 0
    repaired_units: int = 0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class VerificationError(MegtoolError):
    """The staged result failed verification; it is removed, and another run would fail too."""

    exit_status = 7


def check_storable(source: CheckpointSource, decisions: Sequence[Decision]) -> None:
    """Refuse what a Hugging Face folder of this family cannot hold; reads headers only.

    Raises:
        MappingError: weights are stored transposed, interleaved with others or stacked with them,
            all of them told at once; or weights in one tensor are to have different formats.
        UsageError: groups do not divide a weight, or rows cannot be paired.
    """
    plain = {
        d.module.name: WeightQParams(module=d.module.name, format=d.format)
        for d in decisions
        if d.format is not None and d.format.algo
    }
    target = make_quantized_target(source, decisions, TargetOptions(to="hf"))
    check_places(decisions, target)
    for stored in list_stored_modules(source, decisions, plain, target):
        list_tensor_specs(stored, checked=False)


def write(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    qparams: QParams,
    destination: Path,
    *,
    threads: int | None = None,
    memory_bytes: int = 256 << 20,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    digest: DigestMode = DigestMode.ALL,
    files: Files | None = None,
    before_commit: Callable[[Path], None] | None = None,
    progress: Progress = silent,
) -> WriteReport:
    """Write the model of `source` with the formats of `decisions` and the quantization parameters
    `qparams`, in ModelOpt's layout.

    Atomic, resumed after a kill with the same bytes, whatever format and layout the source has; its
    files are not touched. Where a format needs the largest magnitude of whole weights, these are
    read once before (by `dry_run` they are not). `before_commit` is given the folder of the whole
    result before it takes its name; what it raises is raised, and nothing is at `destination`: on
    `VerificationError` nothing of it is kept for another run either. All that is kept is digested,
    so that the same files come of every layout.

    Raises:
        MappingError, UsageError: see `check_storable`; before any work.
        CalibrationError: a treatment is missing, or does not say what its format needs.
        FormatError: a weight holds NaN or infinity.
        StorageError, SourceChangedError, DestinationError: as of a reshard.
    """
    began = time.monotonic()
    count = default_threads(threads)
    system = files or Files()
    request = TargetOptions(to="hf", max_shard_bytes=max_shard_bytes, destination=destination)
    target = make_quantized_target(source, decisions, request)
    modules = list_stored_modules(
        source, decisions, collect_weight_qparams(decisions, qparams), target
    )
    for stored in modules:
        list_tensor_specs(stored)
    stage_of = partial(
        StagingFolder,
        destination,
        files=system,
        overwrite=overwrite,
        sources=source_paths(source),
    )
    first = stage_of(fingerprint="")
    if dry_run or system.lstat(first.staging) is None:  # what an earlier run left is sorted out
        first.check()
    if not dry_run:
        find_shared_amaxes(source, modules, system, threads=count, progress=progress)
    plan = _plan(source, decisions, qparams, modules, target, digest, max_shard_bytes)
    report = WriteReport(
        num_bytes=plan.target.catalogue.num_bytes,
        source_bytes=source.catalogue.num_bytes,
        tensors=len(plan.target.catalogue.tensors),
        files=written_files(plan),
        notes=tuple(qparams.notes),
    )
    if dry_run:
        return report
    stage = stage_of(fingerprint=plan.fingerprint)

    def finish(copied: CopyReport) -> None:
        write_digests(source, target, plan, copied, stage)
        if before_commit is not None:
            try:
                before_commit(stage.tree)
            except VerificationError:
                stage.discard()
                raise

    copied = write_staged(
        plan,
        stage,
        WriteOptions(threads=count, memory_bytes=memory_bytes, digest=digest, fsync=fsync),
        verb="quantize",
        progress=progress,
        expected=expected_digests(source),
        finish=finish,
    )
    return replace(
        report,
        seconds=time.monotonic() - began,
        peak_rss_bytes=peak_rss_bytes(),
        peak_buffer_bytes=copied.peak_buffer_bytes,
        kernel_bytes=copied.kernel_bytes,
        resumed_units=copied.verified,
        repaired_units=copied.repaired,
        warnings=tuple(stage.messages),
    )


def _quantization_config(
    decisions: Sequence[Decision],
    modules: Sequence[StoredModule],
    target: Target,
    small: Mapping[str, bytes],
) -> dict[str, bytes]:
    """The config files that describe the quantization to loaders."""
    config = small.get("config.json")
    if (excluded := excluded_from_blocks(decisions, modules, target)) is not None:
        return {} if config is None else {"config.json": with_blocks(config, excluded)}
    section = build_quantization_config(decisions, modules, target)
    out = {} if config is None else {"config.json": with_quantization(config, section)}
    return out | {QUANT_FILE: hf_quant_config(section)}


def find_shared_amaxes(
    source: CheckpointSource,
    modules: Sequence[StoredModule],
    files: Files,
    *,
    threads: int,
    progress: Progress = silent,
) -> None:
    """Set the shared amax of weights that engines run as one."""
    pieces = [p for stored in modules for p in stored.pieces]
    unknown = [p for p in pieces if needs_amax(p.qparams)]
    total = sum(p.weight.row_bytes * p.weight.shape[0] for p in unknown)
    amaxes = find_amaxes(
        source.catalogue,
        [p.weight for p in unknown],
        files,
        threads=threads,
        progress=lambda n: progress("scan", n, total),
    )
    together: dict[tuple[str, str], float] = defaultdict(float)
    stored_as = {p.qparams.module: stored.name for stored in modules for p in stored.pieces}

    def key(p: StoredWeight) -> tuple[str, str]:
        # FP8 siblings have scales of their own (engines bring them together), scales of scales not.
        algo = p.qparams.format.algo
        alone = algo == "FP8"
        return stored_as[p.qparams.module] if alone else find_fused_name(p.decision.module), algo

    for p, amax in zip(unknown, amaxes, strict=True):
        together[key(p)] = max(together[key(p)], amax)
    for p in pieces:
        if needs_amax(p.qparams):
            p.amax = together[key(p)]
        elif p.qparams.format.algo == "FP8" and p.qparams.amax is not None:
            p.amax = float(p.qparams.amax.max())
        else:
            p.amax = p.qparams.global_amax


def _plan(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    qparams: QParams,
    modules: Sequence[StoredModule],
    target: Target,
    digest: DigestMode,
    max_shard_bytes: int | None,
) -> ReshardPlan:
    """Everything laid out, and the copies and feeds that fill it."""
    becomes: dict[str, list[GlobalTensor]] = {}
    feeds: list[TensorFeed] = []
    gone: set[str] = set()
    for stored in modules:
        specs = list_tensor_specs(stored)
        becomes[stored.tensor.name] = [h.tensor for h in specs]
        feeds += build_module_feeds(stored, specs)
        gone.update(f"{p.decision.module.name}.weight" for p in stored.pieces)
    folded = find_folded_norms(source, qparams, target)
    feeds += folded
    written = {f.tensor.name for f in folded}
    gone.update(n for n, p in target.side.placements.items() if p.stored in written)
    caches = list_cache_scales(decisions, qparams)
    values = tuple((h.tensor, h.value) for h in caches if h.value is not None)
    if values:
        feeds.append(ConstantFeed(values=values))
    tensors = [n for t in target.side.tensors for n in becomes.get(t.name, [t])]
    tensors += [h.tensor for h in caches]
    small = {n: data for n, data in target.destination.small_files.items() if n != INDEX}
    small |= _quantization_config(decisions, modules, target, small)
    laid_out = plan_safetensors_layout(
        tensors, max_shard_bytes=max_shard_bytes or DEFAULT_SHARD_BYTES, small_files=small
    )
    placements = {n: p for n, p in target.side.placements.items() if n not in gone}
    return build_plan(
        [
            PlanSource(catalogue=source.catalogue, placements=placements_read(source, target)),
        ],
        laid_out,
        placements,
        fills=target.fills,
        dropped=target.dropped,
        copies={n: specs for n, specs in source.repeats.items() if n in placements},
        feeds=feeds,
        options=repr((__version__, digest.value)),
    )
