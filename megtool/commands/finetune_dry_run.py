"""Finetune plan: the data and the sizes of a run, and what `--dry-run` says of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.commands.finetune_report import FinetunePlan
from megtool.commands.finetune_resume import batch_before, check_loaded, with_batch
from megtool.commands.finetune_setup import check_beside
from megtool.config import ParallelConfig
from megtool.console import Progress, silent
from megtool.inference.runtime import usual_device
from megtool.options.groups import SourceOptions
from megtool.reshard.open_source import open_source
from megtool.reshard.source import CheckpointSource
from megtool.train.config import TrainConfig

if TYPE_CHECKING:
    from megtool.parallel.process_groups import Group
    from megtool.train.datasets import TrainDatasets
    from megtool.train.run_plan import RunPlan

LESS_MEMORY = (
    "a smaller --micro-batch-size or --seq-length, --recompute-granularity full, or more processes "
    "(torchrun, --tp)"
)
"""What training needs less memory with."""


def open_feeds(
    runnable: CheckpointSource,
    settings: TrainConfig,
    cache: Path | None,
    world: Group,
    progress: Progress = silent,
) -> TrainDatasets:
    """The data of a run, encoded with the model's tokenizer, on every rank."""
    from megtool.train.datasets import open_datasets
    from megtool.train.run_plan import row_length

    return open_datasets(
        settings,
        runnable.tokenizer(settings.tokenizer),
        vocab_size=runnable.config.vocab_size,
        seq_length=row_length(settings, runnable.config.max_positions),
        cache=settings.data_cache_path or cache,
        world=world,
        progress=progress,
    )


def run_plan(
    runnable: CheckpointSource, settings: TrainConfig, feeds: TrainDatasets, layout: ParallelConfig
) -> RunPlan:
    """How much a run at a layout does on these data.

    Raises:
        LayoutError: replicas and micro batches do not divide the global batch, or ranks the rows.
        UsageError: there is no sample, or the learning rate has no such course in so many steps.
    """
    from megtool.train.run_plan import make_lr_schedule

    plan = _plan(runnable, settings, len(feeds.train), layout)
    make_lr_schedule(settings, plan)
    return plan


def check_plan(runnable: CheckpointSource, settings: TrainConfig, layout: ParallelConfig) -> None:
    """Refuse before data are read what `run_plan` would with any.

    Raises:
        MegtoolError: see `run_plan`.
    """
    from megtool.train.run_plan import make_lr_schedule

    plan = _plan(runnable, settings, 1, layout)
    if settings.train_iters is not None:
        make_lr_schedule(settings, plan)


def _plan(
    runnable: CheckpointSource, settings: TrainConfig, num_samples: int, layout: ParallelConfig
) -> RunPlan:
    from megtool.train.run_plan import plan_run, row_length

    return plan_run(
        settings,
        seq_length=row_length(settings, runnable.config.max_positions),
        num_samples=num_samples,
        replicas=layout.dp,
        stages=layout.pp,
        cp=layout.cp,
        tp=layout.tp,
    )


def plan_only(
    runnable: CheckpointSource, folder: Path, settings: TrainConfig, begun: Path | None
) -> FinetunePlan:
    """What `finetune` would do, from headers and data alone.

    Raises:
        LayoutError: the layout does not divide the model, or fill the processes there are.
        MegtoolError: what LoRA, FP8, rounding or a teacher need is not there, as in the run.
    """
    from megtool.parallel.process_groups import ALONE, fit
    from megtool.train.checkpointing.retention import RunIdentity
    from megtool.train.memory_estimate import estimate_rank_memory

    world = int(os.environ.get("WORLD_SIZE", settings.layout.world_size))
    layout = fit(settings.layout, world)
    before = RunIdentity.read(folder)
    found = None
    if begun is not None:
        found = open_source(begun, SourceOptions(family=settings.family, like=settings.like))
    old_batch = batch_before(None if before is None else before.curve, found)
    settings = with_batch(settings, old_batch)
    check_plan(runnable, settings, layout)
    feeds = open_feeds(runnable, settings, None, ALONE)
    plan = run_plan(runnable, settings, feeds, layout)
    if found is not None and begun == settings.load:
        check_loaded(runnable, found, plan.train_iters)
    device = settings.device or usual_device()
    dtype = dtype_of(settings, device.partition(":")[0])
    sizes = estimate_rank_memory(runnable, settings, layout, dtype)
    teacher_bytes, rounded_bytes = check_beside(runnable, settings, layout, dtype, device)
    return FinetunePlan(
        source=str(runnable.path),
        destination=str(folder),
        format=runnable.format,
        family=runnable.family_name,
        goes_on_from=None if begun is None else str(begun),
        layout=sizes_said(layout),
        dtype=dtype,
        num_parameters=num_parameters(runnable),
        rank_parameters=sizes.parameters,
        rank_trained=sizes.trained,
        weight_bytes=sizes.weight_bytes,
        gradient_bytes=sizes.gradient_bytes,
        optimizer_bytes=sizes.optimizer_bytes,
        teacher_bytes=teacher_bytes,
        rounded_bytes=rounded_bytes,
        adapter_bytes=sizes.adapter_bytes,
        samples=len(feeds.train),
        eval_samples=0 if feeds.evaluation is None else len(feeds.evaluation),
        counts=feeds.counts,
        seq_length=plan.seq_length,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        tokens_per_step=plan.tokens,
        train_iters=plan.train_iters,
    )


def dtype_of(settings: TrainConfig, device: str) -> str:
    """What the model computes in."""
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        if getattr(settings, name):
            return kind
    return "float32" if device == "cpu" else "bfloat16"


def sizes_said(layout: ParallelConfig) -> dict[str, int]:
    """A layout by its axes, as reports have it."""
    return {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}


def num_parameters(runnable: CheckpointSource) -> int:
    """Parameters of the whole model."""
    side = runnable.view
    return sum(t.numel for n, t in side.canonical.items() if ":" not in n)
