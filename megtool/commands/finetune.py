"""Finetune: short continued training of any checkpoint, kept as Megatron keeps it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.checkpoint.formats.save_folder import folder_name
from megtool.commands.finetune_dry_run import (
    LESS_MEMORY,
    check_plan,
    dtype_of,
    num_parameters,
    open_feeds,
    plan_only,
    run_plan,
    sizes_said,
)
from megtool.commands.finetune_outputs import draw, export
from megtool.commands.finetune_report import FinetunePlan, FinetuneReport
from megtool.commands.finetune_resume import (
    CACHE_FOLDER,
    batch_before,
    begun_of,
    check_apart,
    check_loaded,
    rescaled,
    tell_of_tracker,
    with_batch,
)
from megtool.commands.finetune_setup import beside_of, check_early
from megtool.console import Progress, silent
from megtool.errors import DestinationError, UsageError
from megtool.inference.runtime import on_ranks
from megtool.options.groups import RuntimeOptions, SourceOptions
from megtool.reshard.open_source import open_decoder, open_source, require_decoder
from megtool.reshard.source import CheckpointSource
from megtool.train.config import TrainConfig
from megtool.train.config_file import load_train_config

if TYPE_CHECKING:
    import torch

    from megtool.model.decoder import Decoder
    from megtool.optim.optimizer import Optimizer
    from megtool.parallel.process_groups import ProcessGroups
    from megtool.train.checkpointing.retention import RunIdentity
    from megtool.train.datasets import TrainDatasets
    from megtool.train.run_plan import RunPlan
    from megtool.train.train_state import TrainState

_LOG = logging.getLogger(__name__)


def finetune(
    source: str | Path,
    destination: str | Path,
    *,
    config: str | Path | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> FinetuneReport | FinetunePlan:
    """Train the model in `source` on `data`, and keep it in `destination`, a Megatron save folder.

    `options` are the fields of `TrainSettings`, and `config` a YAML file of them, over which they
    win. Where `destination` holds checkpoints of the same run, it goes on from the newest. On
    several processes, each of them calls this.

    Raises:
        TrainingError: a loss or a gradient is no finite number, or the run in `destination` is
            another one.
        MegtoolError: the checkpoint, the data, the layout or an option is no good.
    """
    settings = load_train_config(options, config)
    if not settings.data:
        raise UsageError("nothing to learn from", hint="--data FILE")
    runnable = open_decoder(
        Path(source),
        SourceOptions(iteration=settings.iteration, family=settings.family, like=settings.like),
    )
    folder = Path(destination)
    check_apart(Path(source), folder)
    begun = begun_of(folder, settings)
    check_early(runnable, settings)
    if dry_run:
        return plan_only(runnable, folder, settings, begun)
    manner = RuntimeOptions(
        device=settings.device, kernels=settings.kernels, threads=settings.threads
    )
    with on_ranks(manner, settings.layout, less=LESS_MEMORY) as groups:
        return _Run(runnable, folder, settings, begun, groups, progress).go()


@dataclass(slots=True)
class _Run:
    """A run on one of its ranks."""

    runnable: CheckpointSource
    folder: Path
    settings: TrainConfig
    begun: Path | None
    groups: ProcessGroups
    progress: Progress

    def go(self) -> FinetuneReport:
        """Prepare everything, train, and say what came of it."""
        from megtool.train.checkpointing.retention import RunIdentity
        from megtool.train.checkpointing.save import TorchDistSaver
        from megtool.train.features.lora import LoraSaver
        from megtool.train.features.protocol import Further
        from megtool.train.loop import TrainJob, train
        from megtool.train.run_log import RunLog
        from megtool.train.run_plan import make_optimizer, make_lr_schedule

        settings, groups, folder = self.settings, self.groups, self.folder
        before = RunIdentity.read(folder)
        found = None if self.begun is None else self.open_begun(self.begun)
        old_batch = batch_before(None if before is None else before.curve, found)
        settings = self.settings = with_batch(settings, old_batch)
        check_plan(self.runnable, settings, groups.parallel)
        feeds = open_feeds(
            self.runnable, settings, folder / CACHE_FOLDER, groups.world, self.progress
        )
        plan = run_plan(self.runnable, settings, feeds, groups.parallel)
        identity = self.identity(feeds, plan, before)
        if found is not None and self.begun == settings.load:
            check_loaded(self.runnable, found, plan.train_iters)
        opened = self.runnable if found is None or settings.lora_rank else found
        stored = opened
        stages = self.load(stored)
        beside = beside_of(self.runnable, settings, stages, plan, self.progress)
        further = Further.of(stages, settings, groups, beside)
        optimizer = make_optimizer(stages, settings, plan, groups)
        if further.lora is not None and self.begun is not None:
            standing = further.lora.restore(self.begun, optimizer)
        else:
            standing = self.stand(stored, stages, optimizer, old_batch or plan.global_batch_size)
        standing = self.rescale(standing, old_batch, plan)
        if found is not None:
            further.load(found.catalogue)
        template = self.template(opened, stages, optimizer)
        further.names = [t.name for t in template.tensors]
        with ExitStack() as stack:
            plain_saver = stack.enter_context(
                TorchDistSaver(
                    folder,
                    template,
                    groups,
                    optimizer_format="none" if further.lora else settings.dist_ckpt_optim_format,
                    fsync=settings.fsync,
                )
            )
            self.enter(identity)
            log = stack.enter_context(
                RunLog(
                    folder if groups.rank == 0 else None,
                    iteration=standing.iteration,
                    tensorboard=settings.tensorboard,
                )
            )
            saver = plain_saver if further.lora is None else LoraSaver(plain_saver, further.lora)
            saver.prepare(stages, optimizer, asynchronous=settings.async_save)
            job = TrainJob(
                stages=stages,
                optimizer=optimizer,
                dataset=feeds.train,
                eval_dataset=feeds.evaluation,
                plan=plan,
                settings=settings,
                schedule=make_lr_schedule(settings, plan),
                log=log,
                saver=saver,
                folder=folder,
                features=further,
                args=_megatron_args(settings, plan, stages[0].dtype, optimizer)
                | ({} if further.balancing is None else further.balancing.megatron_args),
            )
            begun_at = standing.iteration
            outcome = train(job, standing, progress=self.progress)
            losses, evaluations = log.losses(), log.evaluations()
        plot = hf = None
        if groups.rank == 0:
            plot = draw(folder, losses, evaluations)
            hf = export(folder, outcome.saved_iteration, settings, self.progress)
        return FinetuneReport(
            source=str(self.runnable.path),
            destination=str(folder),
            format=self.runnable.format,
            family=self.runnable.family_name,
            device=str(groups.device),
            dtype=str(stages[0].dtype).removeprefix("torch."),
            layout=sizes_said(groups.parallel),
            num_parameters=num_parameters(self.runnable),
            train_iters=plan.train_iters,
            begun_at=begun_at,
            iteration=outcome.state.iteration,
            reason=outcome.stop_reason,
            saved=outcome.saved_iteration,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            stall_seconds=outcome.stall_seconds,
            skipped=outcome.skipped,
            first_loss=losses[0][1] if losses else None,
            last_loss=losses[-1][1] if losses else None,
            evaluations=tuple(evaluations),
            counts=feeds.counts,
            seq_length=plan.seq_length,
            peak_bytes=_peak(groups),
            plot=plot,
            hf=hf,
            adapter=None
            if further.lora is None
            else further.lora.place(folder, outcome.saved_iteration),
        )

    def enter(self, identity: RunIdentity) -> None:
        """Say in the folder which run it is, once no other run can write there.

        Raises:
            DestinationError: another run has gone on in it meanwhile.
        """
        from megtool.train.checkpointing.retention import find_newest_iteration

        newest = find_newest_iteration(self.folder)
        begun = self.settings.load if newest is None else self.folder / folder_name(newest)
        if begun != self.begun:
            raise DestinationError(
                "another iteration is the newest in it than when this run began",
                file=self.folder,
                hint="the same command again goes on from it",
            )
        if self.groups.rank == 0:
            identity.write(self.folder)

    def identity(
        self, feeds: TrainDatasets, plan: RunPlan, before: RunIdentity | None
    ) -> RunIdentity:
        """What this run is; held against what the folder's run was.

        Raises:
            TrainingError: it is another one.
        """
        from megtool.train.checkpointing.fingerprint import sample_fingerprint
        from megtool.train.checkpointing.retention import RunIdentity

        settings, opened = self.settings, self.runnable
        curve = {
            "train_iters": plan.train_iters,
            "global_batch_size": plan.global_batch_size,
            "dtype": dtype_of(settings, self.groups.device.type),
            "eval_data": None if feeds.evaluation is None else feeds.evaluation.fingerprint,
        }
        mine = RunIdentity.from_config(
            self.runnable.config,
            feeds.identity,
            settings,
            curve,
            # On every rank where a change is an error, and not told by the first alone.
            source=""
            if self.groups.rank and not settings.lora_rank
            else sample_fingerprint(opened.catalogue, opened.view),
        )
        if before is not None:
            for changed in mine.find_changes(before, self.folder):
                if self.groups.rank == 0:
                    _LOG.warning("the run goes on, and something has changed: %s", changed)
        return mine

    def open_begun(self, begun: Path) -> CheckpointSource:
        """The checkpoint to go on from, with its optimizer."""
        settings = self.settings
        if self.groups.rank == 0:
            _LOG.info("goes on from %s", begun)
            tell_of_tracker(self.folder, begun)
        opened = open_source(begun, SourceOptions(family=settings.family, like=settings.like))
        require_decoder(opened)
        return opened

    def load(self, stored: CheckpointSource) -> list[Decoder]:
        """The model on this rank, in training mode, with what the settings do to it."""
        from megtool.model.recompute import recompute
        from megtool.train.build_model import load_for_training
        from megtool.train.run_plan import freeze

        settings, groups = self.settings, self.groups
        stages = load_for_training(
            stored,
            groups,
            dtype=dtype_of(settings, groups.device.type),
            sequence_parallel=settings.sequence_parallel,
            threads=settings.threads,
            progress=self.progress,
        )
        freeze(stages, settings.freeze)
        if settings.recompute_granularity is not None:
            recompute(stages, settings.recompute_granularity, settings.recompute_num_layers)
        return stages

    def stand(
        self, stored: CheckpointSource, stages: Sequence[Decoder], optimizer: Optimizer, batch: int
    ) -> TrainState:
        """Where the run is: at its beginning, or where its checkpoint was written.

        Where that does not count samples, there were `batch` in each step.
        """
        from megtool.train.checkpointing.resume import resume
        from megtool.train.train_state import TrainState

        if self.begun is None:
            return TrainState()
        found = resume(
            stored, stages, optimizer, threads=self.settings.threads, progress=self.progress
        )
        if not found.has_optimizer and self.groups.rank == 0:
            _LOG.warning("%s has no optimizer state: moments begin at zero", self.begun)
        scheduler: Mapping[str, Any] = found.scheduler or {}
        return TrainState(
            iteration=found.iteration,
            consumed_samples=found.consumed_train_samples or found.iteration * batch,
            num_steps=int(scheduler.get("num_steps", found.iteration * batch)),
        )

    def rescale(self, standing: TrainState, before: int | None, plan: RunPlan) -> TrainState:
        """Where the run is, counted in steps as large as they are from now on."""
        now = plan.global_batch_size
        if before not in (None, now) and standing.iteration and self.groups.rank == 0:
            _LOG.warning(
                "steps had %d rows so far, and have %d from now on: the learning rate goes on from "
                "the same step",
                before,
                now,
            )
        return rescaled(standing, before, now)

    def template(
        self, opened: CheckpointSource, stages: Sequence[Decoder], optimizer: Optimizer
    ) -> Any:
        """What saved iterations are but their values."""
        from megtool.dtypes import dtype
        from megtool.train.checkpointing.megatron_template import make_save_template

        kind = dtype(str(stages[0].dtype).removeprefix("torch."))
        return make_save_template(
            opened,
            self.groups.parallel,
            kind,
            bucket_size=optimizer.bucket_size,
            grad_dtype="float32" if optimizer.sums_in_fp32 else kind.name,
        )


def _megatron_args(
    settings: TrainConfig, plan: RunPlan, dtype: torch.dtype, optimizer: Optimizer
) -> dict[str, Any]:
    """What the run knows of Megatron's args, as checkpoints keep them."""
    own: tuple[str, ...] = (
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_warmup_iters",
        "lr_warmup_fraction",
        "weight_decay",
        "clip_grad",
        "seed",
        "optimizer",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "sequence_parallel",
        "hidden_dropout",
        "attention_dropout",
    )
    if settings.fp8_recipe is not None:
        own += ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
        own += ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_param_gather")
    kind = str(dtype).removeprefix("torch.")
    return {name: getattr(settings, name) for name in own} | {
        "train_iters": plan.train_iters,
        "seq_length": plan.seq_length,
        "micro_batch_size": plan.micro_batch_size,
        "global_batch_size": plan.global_batch_size,
        "bf16": kind == "bfloat16",
        "fp16": kind == "float16",
        "finetune": False,
        "overlap_grad_reduce": optimizer.bucket_size is not None,
        "ddp_bucket_size": settings.ddp_bucket_size,
        "accumulate_allreduce_grads_in_fp32": optimizer.sums_in_fp32,
        "fp8": settings.fp8_format if settings.fp8_recipe else None,
    }


def _peak(groups: ProcessGroups) -> int:
    """Most memory used: on a GPU there, else of the process."""
    if groups.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(groups.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
