"""Writes a Hugging Face folder in which quantized weights are codes and scales.

Unquantized tensors are copied as in a reshard. Codes and scales are computed tile by tile by feeds
of the same plan: one stage, one journal, one rename. With `torch_dist` as format the plan is that
of a Megatron checkpoint with ModelOpt's quantizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megtool import __version__
from megtool.console import Progress, silent
from megtool.errors import MegtoolError
from megtool.formats.safetensors.quantization_config import QUANT_FILE, TRANSFORMS_KEY
from megtool.formats.safetensors.reader import (
    DEFAULT_SHARD_BYTES,
    INDEX,
    plan_safetensors_layout,
)
from megtool.options.execution import ExecutionOptions
from megtool.options.layout import LayoutOptions
from megtool.options.target import TargetOptions
from megtool.plan.copies import PlanSource, ReshardPlan
from megtool.plan.execute import CopyReport
from megtool.plan.planner import build_plan
from megtool.quant.packed_tensors.hf_config import (
    hf_quant_config,
    with_blocks,
    with_quantization,
    with_transforms,
)
from megtool.quant.packed_tensors.modelopt_tensors import needs_amax
from megtool.quant.packed_tensors.pack import find_amaxes
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.recipes.match import Decision
from megtool.quant.recipes.modules import find_fused_name
from megtool.quantize.layout.stored_layout import (
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
from megtool.quantize.layout.weight_layout import check_places, make_quantized_target
from megtool.reshard.execute import (
    expected_digests,
    placements_read,
    write_target_digests,
)
from megtool.reshard.staged_write import make_stage, write_staged, written_files
from megtool.reshard.writers.target_spec import Target
from megtool.reshard.written_digests import DigestCount, count_digests
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.tensors.sharded import GlobalTensor
from megtool.transport.computed_tensors import TensorFeed
from megtool.transport.constant_feed import ConstantFeed

_NO_LAYOUT = LayoutOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """The written folder, or with `dry_run` the planned one.

    `num_bytes` are the bytes of all tensors, `files` relative paths. `copied` is None if nothing
    was.
    """

    num_bytes: int
    tensors: int
    files: tuple[str, ...]
    copied: CopyReport | None = None
    digests: DigestCount = field(default_factory=DigestCount)
    warnings: tuple[str, ...] = ()


class VerificationError(MegtoolError):
    """The staged result failed verification; it is removed, and another run would fail too."""

    exit_status = 7
    default_id = "verification"


def check_storable(source: CheckpointSource, decisions: Sequence[Decision]) -> None:
    """Refuse decisions that a Hugging Face folder of this family cannot store; reads headers only.

    Raises:
        MappingError: weights are stored transposed, interleaved or stacked (all are listed); or
            weights in one tensor have different formats.
        UsageError: groups do not divide a weight, or rows cannot be paired.
    """
    plain = {
        d.module.name: WeightQParams(module=d.module.name, format=d.format)
        for d in decisions
        if d.format is not None and d.format.algo
    }
    target = make_quantized_target(source, decisions, TargetOptions(destination=Path(), to="hf"))
    check_places(decisions, target)
    for stored in list_stored_modules(source, decisions, plain, target):
        list_tensor_specs(stored, checked=False)


def write(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    qparams: QParams,
    options: TargetOptions,
    execution: ExecutionOptions,
    *,
    files: Files | None = None,
    before_commit: Callable[[Path], None] | None = None,
    progress: Progress = silent,
) -> WriteReport:
    """Write a quantized Hugging Face folder in ModelOpt's layout, or a Megatron checkpoint with
    ModelOpt's quantizers if `options.to` is `torch_dist`.

    The write is atomic, and an interrupted one resumes with the same bytes. The bytes do not depend
    on the format and layout of the source, whose files are only read. If a format needs the amax of
    entire weights, they are read once before.

    Args:
        source: the checkpoint.
        decisions: the format of each module.
        qparams: the quantization parameters.
        options: format, layout, destination and size of shards.
        execution: threads, memory and digests; `dry_run` returns the report of the plan and reads
            no weights.
        files: the file system.
        before_commit: called with the staged folder before the rename. What it raises is raised,
            and `VerificationError` also removes the staged files.
        progress: reports bytes.

    Raises:
        MappingError, UsageError: see `check_storable`; before any work.
        CalibrationError: parameters of a module are missing or incomplete.
        FormatError: a weight has NaN or Inf.
        StorageError, SourceChangedError, DestinationError: as in a reshard.
    """
    system = files or Files()
    planned = None
    target = make_quantized_target(source, decisions, replace(options, to="hf", layout=_NO_LAYOUT))
    modules = list_stored_modules(
        source, decisions, collect_weight_qparams(decisions, qparams), target
    )
    for stored in modules:
        list_tensor_specs(stored)
    if options.to == "torch_dist":
        from megtool.quantize.layout.megatron_target import plan_megatron, plan_megatron_target

        planned = plan_megatron_target(source, decisions, qparams, options)
    stage_of = partial(
        make_stage,
        execution,
        options.destination,
        files=system,
        sources=source.paths,
    )
    first = stage_of(fingerprint="")
    if execution.dry_run or system.lstat(first.staging) is None:  # else `stage` checks it
        first.check()
    if not execution.dry_run:
        find_shared_amaxes(
            source, modules, system, threads=execution.num_threads, progress=progress
        )
    shard_bytes = options.max_shard_bytes or DEFAULT_SHARD_BYTES
    settings = (source.rotation or {}).get("settings")
    options_key = repr(
        (__version__, execution.digest_mode.value, *([settings] if settings else []))
    )
    if planned is None:
        plan = _plan(source, decisions, qparams, modules, target, shard_bytes, options_key)
    else:
        target = planned.target
        plan = plan_megatron(source, qparams, planned, modules, options_key)
    report = WriteReport(
        num_bytes=plan.target.catalogue.num_bytes,
        tensors=len(plan.target.catalogue.tensors),
        files=written_files(plan),
    )
    if execution.dry_run:
        return report
    stage = stage_of(fingerprint=plan.fingerprint, plan=plan)

    def finish(copied: CopyReport) -> None:
        write_target_digests(source, target, plan, copied, stage, execution)
        if before_commit is not None:
            try:
                before_commit(stage.tree)
            except VerificationError:
                stage.discard()
                source.catalogue.check_unchanged()  # or the proof compared with another source
                raise

    copied = write_staged(
        plan,
        stage,
        execution,
        verb="quantize",
        progress=progress,
        expected=expected_digests(source),
        finish=finish,
    )
    return replace(
        report,
        copied=copied,
        digests=count_digests(plan, stage),
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
    weights = [p for stored in modules for p in stored.weights]
    unknown = [p for p in weights if needs_amax(p.qparams)]
    total = sum(p.weight.row_bytes * p.weight.shape[0] for p in unknown)
    amaxes = find_amaxes(
        source.catalogue,
        [p.weight for p in unknown],
        files,
        threads=threads,
        progress=lambda n: progress("scan", n, total),
    )
    for p in weights:
        p.amax = p.qparams.global_amax
    for p, amax in zip(unknown, amaxes, strict=True):
        p.amax = amax
    of_tensor = [p for p in weights if p.qparams.format.algo == "FP8"]  # one scale per tensor
    for p in of_tensor:
        if p.qparams.amax is not None:
            p.amax = float(p.qparams.amax.max())
    stored_as = {p.qparams.module: stored.name for stored in modules for p in stored.weights}
    _take_largest(of_tensor, lambda p: stored_as[p.qparams.module])
    # Engines that run FP8 weights as one would else round all but one of them once more.
    _take_largest(unknown, lambda p: (p.qparams.format.algo, find_fused_name(p.decision.module)))


def _take_largest(weights: Sequence[StoredWeight], key: Callable[[StoredWeight], object]) -> None:
    """Give weights with the same key the largest of their amaxes."""
    largest: dict[object, float] = defaultdict(float)
    for p in weights:
        largest[key(p)] = max(largest[key(p)], p.amax)
    for p in weights:
        p.amax = largest[key(p)]


def _plan(
    source: CheckpointSource,
    decisions: Sequence[Decision],
    qparams: QParams,
    modules: Sequence[StoredModule],
    target: Target,
    shard_bytes: int,
    options_key: str,
) -> ReshardPlan:
    """Plan the files, and the copies and feeds that fill them."""
    replacements: dict[str, list[GlobalTensor]] = {}
    feeds: list[TensorFeed] = []
    replaced: set[str] = set()
    for stored in modules:
        specs = list_tensor_specs(stored)
        replacements[stored.tensor.name] = [s.tensor for s in specs]
        feeds += build_module_feeds(stored, specs)
        replaced.update(f"{p.decision.module.name}.weight" for p in stored.weights)
    folded = find_folded_norms(source, qparams, target)
    feeds += folded
    written = {f.tensor.name for f in folded}
    replaced.update(n for n, p in target.side.placements.items() if p.stored in written)
    kv_scales = list_cache_scales(decisions, qparams)
    values = tuple((s.tensor, s.value) for s in kv_scales if s.value is not None)
    if values:
        feeds.append(ConstantFeed(values=values))
    tensors = [n for t in target.side.tensors for n in replacements.get(t.name, [t])]
    tensors += [s.tensor for s in kv_scales]
    small = {n: data for n, data in target.destination.small_files.items() if n != INDEX}
    small |= _quantization_config(decisions, modules, target, small)
    transforms = (source.rotation or {}).get(TRANSFORMS_KEY)
    if isinstance(transforms, dict) and "config.json" in small:
        small["config.json"] = with_transforms(small["config.json"], transforms)
    destination = plan_safetensors_layout(tensors, max_shard_bytes=shard_bytes, small_files=small)
    placements = {n: p for n, p in target.side.placements.items() if n not in replaced}
    return build_plan(
        [PlanSource(catalogue=source.catalogue, placements=placements_read(source, target))],
        destination,
        placements,
        fills=target.fills,
        dropped=target.dropped,
        copies={
            n: original
            for n, original in (target.copies | dict(source.repeats)).items()
            if n in placements
        },
        parts=target.parts,
        feeds=feeds,
        options=options_key,
    )
