"""Reshard a checkpoint: any format and parallel layout to any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megtool.commands.options.reshard import ReshardOptions
from megtool.console import Progress, silent
from megtool.formats import ARRAY_FORMATS
from megtool.options.effects import check_effects
from megtool.options.target import TargetFacts, TargetOptions
from megtool.plan.copies import ReshardPlan
from megtool.reshard.report import ReshardReport
from megtool.reshard.run import reshard_checkpoint
from megtool.reshard.target import MEGATRON, choose_format
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.storage.location.path import find_copying_store, is_in_store


def reshard(
    options: ReshardOptions,
    *,
    check: Callable[[ReshardPlan], object] | None = None,
    progress: Progress = silent,
    files: Files | None = None,
) -> ReshardReport:
    """Write the checkpoint `source` to `destination` in another format, layout or dtype.

    Optimizer state in buckets is decoded, and checked against its master weights. Several
    checkpoints are averaged in float32 and rounded once, without optimizer state. Adapters are
    added to the weights in float64 and rounded to float32 and the dtype to write, without optimizer
    state. FP8's delayed
    scaling state is merged over ranks. Sizes, such as `hidden_size`, leave out the parts of the
    model with the lowest of the `pruning_scores`. `check` is called with the plan before anything
    is staged; what it raises is raised. An interrupted run resumes when it is called again with the
    same options.

    Raises:
        UsageError: an option has no effect here, or no such value.
        MegtoolError: see `megtool.errors`; nothing is left at `destination`.
    """
    check_effects(options)
    selection, target, execution = options.selection, options.target, options.execution
    if execution.digest is None and _is_within_store(options.source, target.destination):
        execution = replace(execution, digest="buffered")
    return reshard_checkpoint(
        options.source,
        selection,
        target,
        execution,
        check_source=lambda source: check_effects(options, _learn_facts(target, source)),
        check=check,
        progress=progress,
        files=files,
    )


def _is_within_store(source: Path, destination: Path) -> bool:
    """Return whether the store copies within itself; digests would have to read everything."""
    store = find_copying_store(destination)
    return store is not None and is_in_store(source, store)


def _learn_facts(target: TargetOptions, source: CheckpointSource) -> TargetFacts:
    format_name = choose_format(source.catalogue, target.to)
    return TargetFacts(
        format=format_name,
        is_sharded=format_name in ("hf", *ARRAY_FORMATS),
        is_array=format_name in ARRAY_FORMATS,
        is_megatron=format_name in MEGATRON,
    )
