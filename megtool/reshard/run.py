"""A whole reshard in one call: open, plan, write, commit, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megtool.console import Progress, silent
from megtool.options.execution import ExecutionOptions
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions
from megtool.plan.copies import ReshardPlan
from megtool.process.gc_pause import paused_collection
from megtool.reshard.execute import execute, fill_in, plan_reshard
from megtool.reshard.open_selected import open_sources
from megtool.reshard.report import ReshardReport
from megtool.reshard.target import check_target
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files


def reshard_checkpoint(
    path: Path,
    selection: SourceSelection,
    target: TargetOptions,
    execution: ExecutionOptions,
    *,
    check_source: Callable[[CheckpointSource], object] | None = None,
    check: Callable[[ReshardPlan], object] | None = None,
    progress: Progress = silent,
    files: Files | None = None,
) -> ReshardReport:
    """Write the checkpoint at `path` to `target.destination`.

    `check_source` is called with the opened source, `check` with the plan before anything is
    staged; what they raise is raised.

    Raises:
        MegtoolError: see `megtool.errors`; nothing is left at the destination.
    """
    start = time.monotonic()
    check_target(target)
    execution = fill_in(execution, path, target.destination, *selection.average)
    with paused_collection():
        sources = open_sources(path, selection, target, check_source)
        job = plan_reshard(sources, target, execution)
    if check is not None:
        check(job.plan)
    return execute(job, execution, files or Files(), progress, start=start)
