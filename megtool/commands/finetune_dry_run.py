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
from megtool.inference.runtime import Runnable, usual_device
from megtool.reshard.open_source import CheckpointSource, open_model
from megtool.train.config import TrainSettings

if TYPE_CHECKING:
    from megtool.inference.rank_weights import Source as Stored
    from megtool.parallel.process_groups import Group
    from megtool.train.datasets import Feeds
    from megtool.train.run_plan import RunPlan

LESS_MEMORY = (
    "a smaller --micro-batch-size or --seq-length, --recompute-granularity full, or more processes "
    "(torchrun, --tp)"
)
"""What training needs less memory with."""


def open_feeds(
    runnable: Runnable,
    settings: TrainSettings,
    cache: Path | None,
    world: Group,
    progress: Progress = silent,
) -> Feeds:
    """The data of a run, encoded with the model's tokenizer, on every rank."""
    from megtool.train.datasets import feeds_of
    from megtool.train.run_plan import row_length

    return feeds_of(
        settings,
        runnable.tokenizer(settings.tokenizer),
        vocab_size=runnable.config.vocab_size,
        seq_length=row_length(settings, runnable.config.max_positions),
        cache=settings.data_cache_path or cache,
        world=world,
        progress=progress,
    )


def stored_of(opened: CheckpointSource) -> Stored:
    """An open checkpoint as loaders take it."""
    from megtool.inference.rank_weights import Source as Stored

    config = opened.side.config or (opened.model.config if opened.model else None)
    return Stored(catalogue=opened.catalogue, side=opened.side, config=config)


def run_plan(
    runnable: Runnable, settings: TrainSettings, feeds: Feeds, layout: ParallelConfig
) -> RunPlan:
    """How much a run at a layout does on these data.

    Raises:
        LayoutError: replicas and micro batches do not divide the global batch, or ranks the rows.
        UsageError: there is no sample, or the learning rate has no such course in so many steps.
    """
    from megtool.train.run_plan import schedule_of

    plan = _plan(runnable, settings, len(feeds.train), layout)
    schedule_of(settings, plan)
    return plan


def check_plan(runnable: Runnable, settings: TrainSettings, layout: ParallelConfig) -> None:
    """Refuse before data are read what `run_plan` would with any.

    Raises:
        MegtoolError: see `run_plan`.
    """
    from megtool.train.run_plan import schedule_of

    plan = _plan(runnable, settings, 1, layout)
    if settings.train_iters is not None:
        schedule_of(settings, plan)


def _plan(
    runnable: Runnable, settings: TrainSettings, num_samples: int, layout: ParallelConfig
) -> RunPlan:
    from megtool.train.run_plan import plan_of, row_length

    return plan_of(
        settings,
        seq_length=row_length(settings, runnable.config.max_positions),
        num_samples=num_samples,
        replicas=layout.dp,
        stages=layout.pp,
        cp=layout.cp,
        tp=layout.tp,
    )


def plan_only(
    runnable: Runnable, folder: Path, settings: TrainSettings, begun: Path | None
) -> FinetunePlan:
    """What `finetune` would do, from headers and data alone.

    Raises:
        LayoutError: the layout does not divide the model, or fill the processes there are.
        MegtoolError: what LoRA, FP8, rounding or a teacher need is not there, as in the run.
    """
    from megtool.parallel.process_groups import ALONE, fit
    from megtool.train.checkpointing.retention import Identity
    from megtool.train.memory_estimate import sizes_of

    world = int(os.environ.get("WORLD_SIZE", settings.layout.world_size))
    layout = fit(settings.layout, world)
    before = Identity.read(folder)
    found = None
    if begun is not None:
        found = open_model(begun, family_name=settings.family, like=settings.like)
    old_batch = batch_before(None if before is None else before.curve, found)
    settings = with_batch(settings, old_batch)
    check_plan(runnable, settings, layout)
    feeds = open_feeds(runnable, settings, None, ALONE)
    plan = run_plan(runnable, settings, feeds, layout)
    if found is not None and begun == settings.load:
        check_loaded(runnable, found, plan.train_iters)
    device = settings.device or usual_device()
    dtype = dtype_of(settings, device.partition(":")[0])
    sizes = sizes_of(stored_of(runnable.opened), settings, layout, dtype)
    teacher_bytes, rounded_bytes = check_beside(runnable, settings, layout, dtype, device)
    return FinetunePlan(
        source=str(runnable.opened.path),
        destination=str(folder),
        format=runnable.format,
        family=runnable.family,
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


def dtype_of(settings: TrainSettings, device: str) -> str:
    """What the model computes in."""
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        if getattr(settings, name):
            return kind
    return "float32" if device == "cpu" else "bfloat16"


def sizes_said(layout: ParallelConfig) -> dict[str, int]:
    """A layout by its axes, as reports have it."""
    return {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}


def num_parameters(runnable: Runnable) -> int:
    """Parameters of the whole model."""
    side = runnable.opened.side
    return sum(t.numel for n, t in side.canonical.items() if ":" not in n)
