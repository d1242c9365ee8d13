"""Fine-tune any checkpoint, and save Megatron checkpoints."""

from __future__ import annotations

import logging
import os
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megtool.commands.options.finetune import FinetuneOptions
from megtool.commands.reports.finetune import FinetunePlan, FinetuneReport
from megtool.console import Progress, silent
from megtool.errors import MissingPackageError, OutOfMemoryError, RunInterrupted, UsageError
from megtool.formats.save_folder import folder_name
from megtool.inference.runtime import on_ranks, usual_device
from megtool.options.execution import ExecutionOptions
from megtool.options.groups import AdaptedSource
from megtool.options.layout import ParallelConfig
from megtool.options.selection import SourceSelection
from megtool.options.target import TargetOptions
from megtool.reshard.foreign_objects import screen_source
from megtool.reshard.run import reshard_checkpoint
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import EVERYTHING, WITHOUT_QUANTIZERS, open_decoder
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import LOG_FILE, read_log

if TYPE_CHECKING:
    from megtool.model.stacks.decoder import Decoder
    from megtool.parallel.process_groups import ProcessGroups
    from megtool.train.run import RunResult

_LOG = logging.getLogger(__name__)

EXPORT_FOLDER = "hf"
"""The folder in DST that `--to hf` writes."""

LESS_MEMORY = (
    "a smaller --micro-batch-size or --seq-length, --recompute-granularity full, or more processes "
    "(torchrun, --tp)"
)
"""What makes training need less memory."""


def finetune(
    options: FinetuneOptions, *, progress: Progress = silent
) -> FinetuneReport | FinetunePlan:
    """Train the model in `source` on `data`, and save it in `destination`, a Megatron save folder.

    If `destination` holds checkpoints of the same run, training resumes from the newest. On several
    processes, each of them calls this. After SIGINT or SIGTERM the step that is under way ends, and
    the run is saved; the report's exit status is 130.

    Raises:
        RunInterrupted: SIGINT or SIGTERM came before the first step, or a second time.
        TrainingError: a loss or a gradient is NaN or Inf, or `destination` holds another run.
        MegtoolError: the checkpoint, the data, the layout or an option cannot be used.
    """
    from megtool.train.preflight import check_run
    from megtool.train.resume_point import check_folders, find_checkpoint
    from megtool.train.run import TrainRun

    settings, folder = options.train, options.destination
    if not settings.data:
        raise UsageError("there is nothing to train on", hint="--data FILE")
    _check_other_runs(options.report_against)
    source, _ = screen_source(
        open_decoder(
            options.source,
            settings.source,
            encoders=True,
            two_stacks=True,
            labels=True,
            tensors=WITHOUT_QUANTIZERS if settings.keeps_quantizers else EVERYTHING,
        ),
        drop=options.drop_objects,
    )
    check_folders(options.source, folder)
    checkpoint = find_checkpoint(folder, settings)
    check_run(source, settings)
    if options.dry_run:
        return _plan(source, folder, settings, checkpoint)
    ranks = on_ranks(
        settings,
        less=LESS_MEMORY,
        num_instances=settings.sharding.num_distributed_optimizer_instances,
        orders_kernels=not settings.sharding.is_fully_sharded,
    )
    with _says_what_is_saved(folder), ranks as groups:
        result = TrainRun(source, folder, settings, checkpoint, groups, progress).run()
        report = _report(source, folder, settings, result, groups, progress)
        return replace(report, against=tuple(map(str, options.report_against)))


@contextmanager
def _says_what_is_saved(folder: Path) -> Iterator[None]:
    """Interrupt on SIGTERM as on SIGINT, and say of an interrupted run what is saved of it.

    Raises:
        RunInterrupted: the run was interrupted, and not at the end of a step.
    """
    is_usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    takes_signals = is_usual and threading.current_thread() is threading.main_thread()
    if takes_signals:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    from megtool.train.checkpointing.retention import find_newest_iteration

    try:
        yield
    except KeyboardInterrupt as e:
        newest = find_newest_iteration(folder)
        if newest is None:
            hint = f"nothing is saved in {folder}: the same command starts from the beginning"
        else:
            hint = f"iteration {newest} is saved in {folder}: the same command resumes from it"
        raise RunInterrupted(hint) from e
    finally:
        if takes_signals:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_other_runs(folders: Sequence[Path]) -> None:
    """Refuse runs without a log before anything is trained.

    Raises:
        UsageError: a folder of --report-against has no log of `finetune`.
    """
    for folder in folders:
        if not read_log(folder / LOG_FILE):
            raise UsageError(
                f"{str(folder / LOG_FILE)!r} has no lines, or is missing",
                hint="--report-against takes save folders of `megtool finetune`",
            )


def _report(
    source: CheckpointSource,
    folder: Path,
    settings: TrainConfig,
    result: RunResult,
    groups: ProcessGroups,
    progress: Progress,
) -> FinetuneReport:
    """The report of a run; rank 0 plots the loss and exports the model, too."""
    outcome, losses = result.outcome, result.losses
    plot = hf = None
    notes: tuple[str, ...] = ()
    if groups.rank == 0:
        plot = _plot(folder, losses, result.evaluations)
        if outcome.stop_reason != "interrupt":  # which should end soon
            hf = _export(
                folder,
                outcome.saved_iteration,
                settings,
                progress,
                has_quantizers=result.has_quantizers,
            )
        notes = tuple(_note_export(folder, outcome.saved_iteration))
    return FinetuneReport(
        source=str(source.path),
        destination=str(folder),
        format=source.format,
        family=source.family_name,
        device=str(groups.device),
        dtype=result.dtype,
        layout=_layout_sizes(groups.parallel),
        num_parameters=_num_parameters(source),
        train_iters=result.plan.train_iters,
        start_iteration=result.start_iteration,
        outcome=outcome,
        first_loss=losses[0][1] if losses else None,
        last_loss=losses[-1][1] if losses else None,
        evaluations=tuple(result.evaluations),
        counts=result.counts,
        seq_length=result.plan.seq_length,
        peak_bytes=_peak_bytes(groups),
        plot=plot,
        hf=hf,
        adapter=result.saved_paths.get("adapter"),
        draft_head=result.saved_paths.get("eagle"),
        notes=notes,
    )


def _plan(
    source: CheckpointSource, folder: Path, settings: TrainConfig, checkpoint: Path | None
) -> FinetunePlan:
    """Plan a run from headers and data alone.

    Raises:
        LayoutError: the layout does not divide the model, or fill the processes.
        MegtoolError: a feature's input is missing, as in the run.
    """
    from megtool.parallel.process_groups import fit
    from megtool.train.datasets import open_datasets
    from megtool.train.features.fp8 import describe_precisions, mark_fp8_weights
    from megtool.train.features.registry import add_feature_parameters, estimate_feature_memory
    from megtool.train.features.te_layers import TeChoice
    from megtool.train.features.te_modules import choose_for_run, describe_te_run
    from megtool.train.model.memory_estimate import estimate_rank_memory
    from megtool.train.preflight import check_plan
    from megtool.train.resume_point import (
        check_loaded,
        open_checkpoint,
        saved_batch_size,
        with_batch_size,
    )
    from megtool.train.run_identity import RunIdentity
    from megtool.train.run_plan import (
        freeze,
        plan_run,
        resolve_dtype,
    )

    world_size = int(os.environ.get("WORLD_SIZE", settings.layout.world_size))
    layout = fit(settings.layout, world_size)
    resumed = None if checkpoint is None else open_checkpoint(checkpoint, settings)
    previous_batch = saved_batch_size(RunIdentity.read(folder), resumed)
    settings = with_batch_size(settings, previous_batch)
    check_plan(source, settings, layout)
    datasets = open_datasets(settings, source, cache=settings.rows.data_cache_path)
    plan = plan_run(
        settings,
        seq_length=datasets.train.length,
        num_samples=len(datasets.train),
        target_length=datasets.train.target_length,
        layout=layout,
    )
    plan.make_lr_schedule(settings.optimizer)
    if resumed is not None and checkpoint == settings.load:
        check_loaded(source, resumed, plan.train_iters)
    device = settings.device or usual_device()
    dtype = resolve_dtype(settings, device.partition(":")[0])

    te_choices: list[TeChoice] = []

    def prepare(stages: Sequence[Decoder]) -> None:
        freeze(stages, settings.freeze)
        add_feature_parameters(settings, stages)
        mark_fp8_weights(settings, source, stages)
        if settings.kernels == "te":
            te_choices.extend(choose_for_run(settings, stages, source))

    memory = estimate_rank_memory(source, settings, layout, dtype, prepare)
    feature_bytes = estimate_feature_memory(settings, source, layout, dtype, device)
    return FinetunePlan(
        source=str(source.path),
        destination=str(folder),
        format=source.format,
        family=source.family_name,
        resumes_from=None if checkpoint is None else str(checkpoint),
        layout=_layout_sizes(layout),
        dtype=dtype,
        num_parameters=_num_parameters(source),
        rank_parameters=memory.parameters,
        rank_trainable=memory.trained,
        weight_bytes=memory.weight_bytes,
        gradient_bytes=memory.gradient_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        adapter_bytes=memory.adapter_bytes,
        samples=len(datasets.train),
        eval_samples=0 if datasets.evaluation is None else len(datasets.evaluation),
        counts=datasets.counts,
        seq_length=plan.seq_length,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        tokens_per_step=plan.tokens,
        train_iters=plan.train_iters,
        precisions=describe_precisions(settings, source),
        te_modules=describe_te_run(settings, te_choices) if settings.kernels == "te" else {},
        **cast(dict[str, Any], feature_bytes),
    )


def _plot(
    folder: Path, losses: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]
) -> str | None:
    """Plot the loss if matplotlib is installed and fits into memory; returns the path."""
    from megtool.train.loss_plot import PLOT_FILE, plot_loss

    path = folder / PLOT_FILE
    try:
        plot_loss(path, losses, evaluations, title=folder.name)
    except (MissingPackageError, OutOfMemoryError) as e:
        _LOG.warning("%s: %s", e.message, e.hint)
        return None
    return str(path)


def _export(
    folder: Path,
    iteration: int | None,
    settings: TrainConfig,
    progress: Progress,
    *,
    has_quantizers: bool,
) -> str | None:
    """Write DST/hf if options ask for it, quantized if the run has quantizers; returns the path."""
    if settings.to != "hf" or iteration is None:
        return None
    from megtool.train.run_identity import RunIdentity

    saved, written = folder / folder_name(iteration), folder / EXPORT_FOLDER
    execution = ExecutionOptions(overwrite=True, fsync=settings.fsync)
    if has_quantizers:
        from megtool.export.hf.quantized_folder import EngineFolder
        from megtool.export.hf.quantized_megatron import export_quantized_megatron

        export_quantized_megatron(
            saved,
            written,
            replace(settings.source, iteration=None),
            EngineFolder(to="unified"),
            execution=execution,
            progress=progress,
        )
    else:
        reshard_checkpoint(
            saved,
            SourceSelection(
                reading=AdaptedSource(family=settings.source.family, like=settings.source.like)
            ),
            TargetOptions(to="hf", optimizer_format="none", destination=written),
            execution,
            progress=progress,
        )
    if identity := RunIdentity.read(folder):
        replace(identity, exported_iteration=iteration).write(folder)
    return str(written)


def _note_export(folder: Path, iteration: int | None) -> Iterator[str]:
    """A note if DST/hf was not written from the newest iteration."""
    from megtool.train.run_identity import RunIdentity

    if iteration is None or not (folder / EXPORT_FOLDER).exists():
        return
    identity = RunIdentity.read(folder)
    exported = None if identity is None else identity.exported_iteration
    if exported != iteration:
        which = "another iteration" if exported is None else f"iteration {exported:,}"
        yield (
            f"{EXPORT_FOLDER}/ is of {which}, and the newest is {iteration:,}: "
            "--to hf writes it again"
        )


def _layout_sizes(layout: ParallelConfig) -> dict[str, int]:
    """The sizes of a layout by axis."""
    return {axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}


def _num_parameters(source: CheckpointSource) -> int:
    return sum(t.numel for n, t in source.view.canonical.items() if ":" not in n)


def _peak_bytes(groups: ProcessGroups) -> int:
    """Peak memory: of the GPU if there is one, else of the process."""
    if groups.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(groups.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
