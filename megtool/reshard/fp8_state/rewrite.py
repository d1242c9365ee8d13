"""Rewrite: a checkpoint written again as it is, but for its FP8 scaling: `fix` and `strip`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from megtool.checkpoint.digest import DigestMode
from megtool.checkpoint.parallel_scan import usual_threads
from megtool.checkpoint.param_groups import BY_DP
from megtool.checkpoint.storage.files import Files
from megtool.console import Progress, silent
from megtool.errors import UsageError
from megtool.reshard.execute import ExecutionOptions, execute, plan_job
from megtool.reshard.fp8_state.collect import Scaling, require, require_told, scaling_of
from megtool.reshard.fp8_state.modelopt_amax import Array, rebuilt_buffers
from megtool.reshard.fp8_state.weight_amax import weight_amaxes
from megtool.reshard.megatron.amax_report import AmaxFinding, AmaxHow, AmaxReport, AmaxWish
from megtool.reshard.megatron.optimizer import sharding_type
from megtool.reshard.open_source import CheckpointSource, open_model
from megtool.reshard.parse_size import parse_size
from megtool.reshard.report import ReshardReport
from megtool.reshard.target import Request

FORMATS = ("torch_dist", "megatron")


class Options(TypedDict, total=False):
    """What `rewrite` takes besides; see `reshard` for all of them."""

    iteration: str | None
    family: str | None
    like: str | Path | None
    threads: int | None
    memory: str
    overwrite: bool
    dry_run: bool
    fsync: bool
    progress: Progress


def rewrite(
    source: Path,
    destination: Path,
    how: AmaxHow,
    *,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    threads: int | None = None,
    memory: str = "128MiB",
    overwrite: bool = False,
    dry_run: bool = False,
    fsync: bool = True,
    progress: Progress = silent,
) -> ReshardReport:
    """Write `source` to `destination` in its own format and layout, with its states as `how` says.

    Raises:
        UsageError: there is no FP8 state in it, or its format is not Megatron's.
        CalibrationError: states to be mended are of experts that cannot be told apart.
        MegtoolError: see `reshard`; nothing is left at the destination.
    """
    began = time.monotonic()
    named: dict[str, Any] = dict(
        iteration=iteration, family_name=family, like=None if like is None else Path(like)
    )
    opened = open_model(source, lenient=True, for_format="torch_dist", **named)
    scaling = scaling_of(opened)
    if not scaling.buffers:  # with them, all tensors keep the names they have
        opened = open_model(source, for_format="torch_dist", **named)
    catalogue = opened.catalogue
    if how == "rebuild":
        require_told(scaling, opened)
        require(scaling, opened)
    elif not (scaling.states or scaling.empty):
        raise UsageError(f"{source} holds no extra states", hint="there is nothing to strip")
    if catalogue.format not in FORMATS:
        raise UsageError(
            f"{source} is of format {catalogue.format!r}, and FP8 states are written again in "
            f"{' and '.join(FORMATS)}",
            hint=f"megtool reshard SRC DST --to torch_dist --amax {how}",
        )
    made, findings = _buffers(opened, scaling, how, threads)
    in_buckets = opened.side.states and sharding_type(catalogue) == BY_DP
    request = Request(
        to=catalogue.format,
        layout={},
        optimizer=BY_DP if in_buckets and catalogue.format == "torch_dist" else None,
        destination=destination,
        amax=AmaxWish(how=how),
    )
    manner = ExecutionOptions(
        threads=threads or min(8, os.cpu_count() or 1),
        memory_bytes=parse_size(memory, "memory"),
        digest=DigestMode("buffered"),
        strict=False,
        overwrite=overwrite,
        dry_run=dry_run,
        fsync=fsync,
    )
    job = plan_job(opened, None, request, manner, made=made)
    if findings:
        job.target.amax = _with(job.target.amax, how, len(made), findings)
    return execute(job, manner, Files(), progress, began=began)


def _buffers(
    opened: CheckpointSource, scaling: Scaling, how: AmaxHow, threads: int | None
) -> tuple[dict[str, Array], list[AmaxFinding]]:
    """New values of ModelOpt's buffers that weights contradict, and what was wrong.

    Raises:
        UsageError: they are in files per rank, which are not written without the model.
    """
    if how != "rebuild" or not scaling.buffers:
        return {}, []
    if opened.catalogue.format != "torch_dist":
        raise UsageError(
            f"{opened.path} holds ModelOpt's amax buffers in files per rank",
            hint="they are put right in torch_dist: save it so",
        )
    sites = {b.site for b in scaling.buffers if b.quantizer.startswith("weight_quantizer")}
    amaxes = weight_amaxes(opened.catalogue, sites, threads=usual_threads(threads))
    return rebuilt_buffers(opened.catalogue, scaling.buffers, amaxes)


def _with(
    report: AmaxReport | None, how: AmaxHow, rebuilt: int, findings: Sequence[AmaxFinding]
) -> AmaxReport:
    """The report of states, if any, with what was found of buffers."""
    if report is not None:
        more = (*report.findings, *findings)
        return replace(report, rebuilt=report.rebuilt + rebuilt, findings=more)
    zero = dict.fromkeys(("modules", "stateless", "empty", "merged", "differing"), 0)
    return AmaxReport(
        how=how,
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
