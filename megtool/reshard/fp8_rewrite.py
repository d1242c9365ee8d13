"""Rewrite a checkpoint in its own format with other FP8 scaling state: `amax fix` and `strip`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megtool.console import Progress, silent
from megtool.errors import UsageError
from megtool.fp8_state.collect import (
    FP8ScalingState,
    collect_fp8_state,
    require_fp8_state,
    require_known_experts,
)
from megtool.fp8_state.modelopt_amax import Array, rebuild_buffers
from megtool.fp8_state.weight_amax import read_weight_amaxes
from megtool.megatron_state.extra_states.amax_report import (
    AmaxFinding,
    AmaxMode,
    AmaxReport,
)
from megtool.megatron_state.param_groups import DP_RESHARDABLE
from megtool.options.execution import ExecutionOptions
from megtool.options.groups import SourceOptions
from megtool.options.target import TargetOptions
from megtool.reshard.execute import execute, plan_reshard
from megtool.reshard.open_selected import ReshardSources
from megtool.reshard.report import ReshardReport
from megtool.run_state.optimizer import read_sharding_type
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source
from megtool.storage.files import Files

FORMATS = ("torch_dist", "megatron")


def rewrite_fp8_state(
    path: Path,
    destination: Path,
    mode: AmaxMode,
    reading: SourceOptions,
    execution: ExecutionOptions,
    *,
    drop_objects: bool = False,
    progress: Progress = silent,
) -> ReshardReport:
    """Write a checkpoint in its own format and layout, with its FP8 states rebuilt or stripped.

    `drop_objects` leaves out objects that name what no checkpoint needs.

    Raises:
        UsageError: it has no FP8 state, or its format is not Megatron's.
        CalibrationError: states to rebuild belong to several experts and cannot be told apart.
        MegtoolError: see `megtool.errors`; nothing is left at the destination.
    """
    start = time.monotonic()
    source = open_source(path, reading, lenient=True, for_format="torch_dist")
    scaling = collect_fp8_state(source)
    if not scaling.buffers:  # with buffers, all tensors keep their stored names
        source = open_source(path, reading, for_format="torch_dist")
    catalogue = source.catalogue
    if mode == "rebuild":
        require_known_experts(scaling, source)
        require_fp8_state(scaling, source)
    elif not (scaling.states or scaling.empty):
        raise UsageError(f"{path} has no extra states", hint="there is nothing to strip")
    if catalogue.format not in FORMATS:
        raise UsageError(
            f"{path} has format {catalogue.format!r}, and FP8 states can be rewritten only in "
            f"{' and '.join(FORMATS)}",
            hint=f"megtool reshard SRC DST --to torch_dist --amax {mode}",
        )
    constants, findings = _rebuild_buffers(source, scaling, mode, execution.num_threads)
    in_buckets = source.view.states and read_sharding_type(catalogue) == DP_RESHARDABLE
    keeps_buckets = in_buckets and catalogue.format == "torch_dist"
    target = TargetOptions(
        to=catalogue.format,
        optimizer_format="dp_reshardable" if keeps_buckets else None,
        destination=destination,
        amax=mode,
        drop_objects=drop_objects,
    )
    job = plan_reshard(ReshardSources(source=source), target, execution, constants=constants)
    if findings:
        job.target.amax = _add_findings(job.target.amax, mode, len(constants), findings)
    return execute(job, execution, Files(), progress, start=start)


def _rebuild_buffers(
    source: CheckpointSource, scaling: FP8ScalingState, mode: AmaxMode, threads: int
) -> tuple[dict[str, Array], list[AmaxFinding]]:
    """New values of ModelOpt's amax buffers that contradict their weights, and the findings.

    Raises:
        UsageError: they are in files per rank, which cannot be written without the model.
    """
    if mode != "rebuild" or not scaling.buffers:
        return {}, []
    if source.catalogue.format != "torch_dist":
        raise UsageError(
            f"{source.path} has ModelOpt's amax buffers in files per rank",
            hint="only those of torch_dist can be rebuilt: save the checkpoint in that format",
        )
    sites = {b.site for b in scaling.buffers if b.quantizer.startswith("weight_quantizer")}
    amaxes = read_weight_amaxes(source.catalogue, sites, threads=threads)
    return rebuild_buffers(source.catalogue, scaling.buffers, amaxes)


def _add_findings(
    report: AmaxReport | None, mode: AmaxMode, rebuilt: int, findings: Sequence[AmaxFinding]
) -> AmaxReport:
    """The report of extra states, if any, with the findings about buffers."""
    if report is not None:
        more = (*report.findings, *findings)
        return replace(report, rebuilt=report.rebuilt + rebuilt, findings=more)
    zero = dict.fromkeys(("modules", "stateless", "empty", "merged", "differing"), 0)
    return AmaxReport(
        mode=mode,
        **zero,
        ranks=1,
        source_release=None,
        release=None,
        source_history=0,
        history=0,
        rewritten=0,
        rebuilt=rebuilt,
        stripped=0,
        findings=tuple(findings),
    )
