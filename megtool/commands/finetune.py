"""Finetune: short continued training of any checkpoint, kept as Megatron keeps it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.checkpoint.formats.save_folder import folder_name
from megtool.commands.finetune_plan import (
    dtype_of,
    num_parameters,
    open_feeds,
    plan_only,
    run_plan,
    sizes_said,
    stored_of,
)
from megtool.commands.finetune_report import FinetunePlan, FinetuneReport
from megtool.commands.opened import Opened, open_model
from megtool.commands.running import Manner, Runnable, Source, on_ranks, open_runnable, runnable_of
from megtool.errors import DestinationError, MissingPackageError, UsageError
from megtool.log import Progress, silent
from megtool.train.settings import TrainSettings
from megtool.train.settings_file import settings_of

if TYPE_CHECKING:
    import torch

    from megtool.inference.weights import Source as Stored
    from megtool.model.decoder import Decoder
    from megtool.optim.optimizer import Optimizer
    from megtool.parallel.groups import Groups
    from megtool.train.feeds import Feeds
    from megtool.train.keeping import Identity
    from megtool.train.loop import Outcome
    from megtool.train.plan import RunPlan
    from megtool.train.standing import Standing

_LOG = logging.getLogger(__name__)

CACHE_FOLDER = "data"
"""Where encoded data is kept in DST."""


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
    settings = settings_of(options, config)
    if not settings.data:
        raise UsageError("nothing to learn from", hint="--data FILE")
    runnable = open_runnable(
        Source(
            path=Path(source),
            iteration=settings.iteration,
            family=settings.family,
            like=settings.like,
        )
    )
    folder = Path(destination)
    begun = _begun(folder, settings)
    if dry_run:
        return plan_only(runnable, folder, settings, begun)
    manner = Manner(device=settings.device, kernels=settings.kernels, threads=settings.threads)
    with on_ranks(manner, settings.layout) as groups:
        return _Run(runnable, folder, settings, begun, groups, progress).go()


def _begun(folder: Path, settings: TrainSettings) -> Path | None:
    """The checkpoint to go on from; None at the beginning of a run.

    Raises:
        DestinationError: the folder holds something else, or a run that is not to go on.
    """
    from megtool.train.keeping import RUN_FILE, newest_iteration

    newest = newest_iteration(folder)
    if newest is not None and not settings.resume:
        raise DestinationError(
            f"iteration {newest} of a run lies there, and --no-resume begins anew",
            file=folder,
            hint="give another DST, or remove this one",
        )
    known = (folder / RUN_FILE).exists()
    held = {p.name for p in folder.iterdir()} - {CACHE_FOLDER} if folder.is_dir() else set()
    if (held and not known) or (folder.exists() and not folder.is_dir()):
        raise DestinationError(
            "it holds something that is no run of `megtool finetune`",
            file=folder,
            hint="give a DST that is not there yet; --load CKPT goes on from a checkpoint",
        )
    if newest is not None:
        return folder / folder_name(newest)
    return settings.load


@dataclass(slots=True)
class _Run:
    """A run on one of its ranks."""

    runnable: Runnable
    folder: Path
    settings: TrainSettings
    begun: Path | None
    groups: Groups
    progress: Progress

    def go(self) -> FinetuneReport:
        """Prepare everything, train, and say what came of it."""
        from megtool.commands.finetune_beside import beside_of
        from megtool.train.further import Further
        from megtool.train.log import RunLog
        from megtool.train.loop import Job, train
        from megtool.train.lora import LoraSaver
        from megtool.train.plan import make_optimizer, schedule_of
        from megtool.train.save import Saver

        settings, groups, folder = self.settings, self.groups, self.folder
        feeds = open_feeds(
            self.runnable, settings, folder / CACHE_FOLDER, groups.world, self.progress
        )
        plan = run_plan(self.runnable, settings, feeds, groups.parallel)
        identity = self.identity(feeds, plan)
        opened = self.runnable.opened
        if self.begun is not None and settings.lora_rank is None:
            opened = self.open_begun(self.begun)
        stored = stored_of(opened)
        stages = self.load(stored)
        beside = beside_of(self.runnable, settings, stages, plan, self.progress)
        further = Further.of(stages, settings, groups, beside)
        optimizer = make_optimizer(stages, settings, plan, groups)
        if further.lora is not None and self.begun is not None:
            standing = further.lora.go_on(self.begun, optimizer)
        else:
            standing = self.stand(stored, stages, optimizer, plan)
        if self.begun is not None:
            further.load(opened.catalogue)
        if groups.rank == 0:
            identity.write(folder)
        template = self.template(opened, stages, optimizer)
        further.names = [t.name for t in template.tensors]
        with (
            RunLog(
                folder if groups.rank == 0 else None,
                iteration=standing.iteration,
                tensorboard=settings.tensorboard,
            ) as log,
            Saver(
                folder,
                template,
                groups,
                optimizer_format="none" if further.lora else settings.dist_ckpt_optim_format,
                fsync=settings.fsync,
            ) as plain_saver,
        ):
            saver = plain_saver if further.lora is None else LoraSaver(plain_saver, further.lora)
            if settings.async_save:
                saver.prepare(stages, optimizer)
            job = Job(
                stages=stages,
                optimizer=optimizer,
                feed=feeds.train,
                eval_feed=feeds.evaluation,
                plan=plan,
                settings=settings,
                schedule=schedule_of(settings, plan),
                log=log,
                saver=saver,
                folder=folder,
                further=further,
                args=_megatron_args(settings, plan, stages[0].dtype),
            )
            begun_at = standing.iteration
            outcome = train(job, standing, progress=self.progress)
            losses, evaluations = log.losses(), log.evaluations()
        plot = hf = None
        if groups.rank == 0:
            plot = self.plot(losses, evaluations)
            hf = self.export(outcome)
        return FinetuneReport(
            source=str(self.runnable.opened.path),
            destination=str(folder),
            format=self.runnable.format,
            family=self.runnable.family,
            device=str(groups.device),
            dtype=str(stages[0].dtype).removeprefix("torch."),
            layout=sizes_said(groups.parallel),
            num_parameters=num_parameters(self.runnable),
            train_iters=plan.train_iters,
            begun_at=begun_at,
            iteration=outcome.standing.iteration,
            reason=outcome.reason,
            saved=outcome.saved,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            stall_seconds=outcome.stall_seconds,
            skipped=outcome.skipped,
            first_loss=losses[0][1] if losses else None,
            last_loss=losses[-1][1] if losses else None,
            evaluations=tuple(evaluations),
            counts=feeds.counts,
            peak_bytes=_peak(groups),
            plot=plot,
            hf=hf,
            adapter=None if further.lora is None else further.lora.place(folder, outcome.saved),
        )

    def identity(self, feeds: Feeds, plan: RunPlan) -> Identity:
        """What this run is; held against what the folder's run was.

        Raises:
            TrainingError: it is another one.
        """
        from megtool.train.keeping import Identity

        mine = Identity.of(self.runnable.config, feeds.identity, self.settings, plan.train_iters)
        before = Identity.read(self.folder)
        if before is not None:
            for changed in mine.check(before, self.folder):
                if self.groups.rank == 0:
                    _LOG.warning("the run goes on with another option: %s", changed)
        return mine

    def open_begun(self, begun: Path) -> Opened:
        """The checkpoint to go on from, with its optimizer."""
        settings = self.settings
        if self.groups.rank == 0:
            _LOG.info("goes on from %s", begun)
        opened = open_model(begun, family_name=settings.family, like=settings.like)
        runnable_of(opened)
        return opened

    def load(self, stored: Stored) -> list[Decoder]:
        """The model on this rank, in training mode, with what the settings do to it."""
        from megtool.model.recompute import recompute
        from megtool.train.plan import freeze
        from megtool.train.setup import load_for_training

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
        self, stored: Stored, stages: Sequence[Decoder], optimizer: Optimizer, plan: RunPlan
    ) -> Standing:
        """Where the run is: at its beginning, or where its checkpoint was written."""
        from megtool.train.resume import resume
        from megtool.train.standing import Standing

        if self.begun is None:
            return Standing()
        found = resume(
            stored, stages, optimizer, threads=self.settings.threads, progress=self.progress
        )
        if not found.has_optimizer and self.groups.rank == 0:
            _LOG.warning("%s has no optimizer state: moments begin at zero", self.begun)
        scheduler: Mapping[str, Any] = found.scheduler or {}
        return Standing(
            iteration=found.iteration,
            consumed_samples=found.consumed_train_samples
            or found.iteration * plan.global_batch_size,
            num_steps=int(scheduler.get("num_steps", found.iteration * plan.global_batch_size)),
        )

    def template(self, opened: Opened, stages: Sequence[Decoder], optimizer: Optimizer) -> Any:
        """What saved iterations are but their values."""
        from megtool.commands.saving import template_of
        from megtool.dtypes import dtype

        kind = dtype(str(stages[0].dtype).removeprefix("torch."))
        return template_of(
            opened,
            self.groups.parallel,
            kind,
            bucket_size=getattr(optimizer, "bucket_size", None),
        )

    def plot(
        self, losses: Sequence[tuple[int, float]], evaluations: Sequence[tuple[int, float]]
    ) -> str | None:
        """Draw the curve, if that can be done."""
        from megtool.train.plot import PLOT_FILE, write_plot

        path = self.folder / PLOT_FILE
        try:
            write_plot(path, losses, evaluations, title=self.folder.name)
        except MissingPackageError as e:
            _LOG.warning("%s: %s", e.message, e.hint)
            return None
        return str(path)

    def export(self, outcome: Outcome) -> str | None:
        """Write DST/hf where it is asked for."""
        from megtool.commands.reshard import reshard

        if self.settings.to != "hf" or outcome.saved is None:
            return None
        written = self.folder / "hf"
        reshard(
            self.folder / folder_name(outcome.saved),
            written,
            to="hf",
            optimizer="none",
            family=self.settings.family,
            like=self.settings.like,
            overwrite=True,
            fsync=self.settings.fsync,
            progress=self.progress,
        )
        return str(written)


def _megatron_args(settings: TrainSettings, plan: RunPlan, dtype: torch.dtype) -> dict[str, Any]:
    """What the run knows of Megatron's args, as checkpoints keep them."""
    own: tuple[str, ...] = (
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_warmup_iters",
        "weight_decay",
        "clip_grad",
        "seed",
        "optimizer",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "sequence_parallel",
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
        "fp8": settings.fp8_format if settings.fp8_recipe else None,
    }


def _peak(groups: Groups) -> int:
    """Most memory used: on a GPU there, else of the process."""
    if groups.device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(groups.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
