"""A whole reshard in one call: open, plan, write, commit, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megtool.console import Progress, silent
from megtool.plan.copies import ReshardPlan
from megtool.process.gc_pause import paused_collection
from megtool.reshard.execute import ExecutionOptions, execute, plan_reshard
from megtool.reshard.report import ReshardReport
from megtool.reshard.source_options import SelectionOptions
from megtool.reshard.writers.target_spec import TargetOptions
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files


def reshard_checkpoint(
    path: Path,
    selection: SelectionOptions,
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
    with paused_collection():
        source = selection.open(path, target)
        if check_source is not None:
            check_source(source)
        average = selection.open_average(source, target)
        merges = selection.open_merges(source)
        job = plan_reshard(source, average, target, execution, merges=merges)
    if check is not None:
        check(job.plan)
    return execute(job, execution, files or Files(), progress, start=start)
