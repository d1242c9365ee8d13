"""One run on one of its ranks: load or resume, train, and save."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megtool.console import Progress
from megtool.dtypes import dtype
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import FullyShard
from megtool.model.stacks.recompute import recompute
from megtool.optim.optimizer import Optimizer
from megtool.options.field import find_option
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.checkpoint import CheckpointSource
from megtool.train.checkpointing.megatron_common_state import seed_random_states
from megtool.train.checkpointing.megatron_template import make_save_template
from megtool.train.checkpointing.protocol import TrainState
from megtool.train.checkpointing.quantizer_state import QuantizerState
from megtool.train.checkpointing.save import TorchDistSaver
from megtool.train.checkpointing.save_template import SaveTemplate
from megtool.train.datasets import TrainDatasets, open_datasets
from megtool.train.features.protocol import FeatureInputs
from megtool.train.features.registry import TrainingFeatures, is_model_frozen
from megtool.train.loop import TrainJob, TrainOutcome, train
from megtool.train.model.build import load_for_training
from megtool.train.model.packed_base import KeepPacked
from megtool.train.options.config import TrainConfig
from megtool.train.options.overlap import let_overlap
from megtool.train.preflight import check_plan
from megtool.train.resume_point import (
    cache_folder,
    check_loaded,
    claim_folder,
    load_train_state,
    open_checkpoint,
    rescale_state,
    saved_batch_size,
    warn_stale_tracker,
    with_batch_size,
)
from megtool.train.run_identity import RunIdentity, sample_fingerprint
from megtool.train.run_log import RunLog
from megtool.train.run_plan import (
    RunPlan,
    freeze,
    make_optimizer,
    plan_run,
    resolve_dtype,
    saves_in_background,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run did. Losses and evaluations are (step, loss); `counts` are those of the data.

    `saved_paths` are what features saved, by the field of the report. `has_quantizers`: what is
    saved has ModelOpt's quantizers.
    """

    outcome: TrainOutcome
    plan: RunPlan
    dtype: str
    start_iteration: int
    losses: Sequence[tuple[int, float]]
    evaluations: Sequence[tuple[int, float]]
    counts: Mapping[str, int]
    saved_paths: Mapping[str, str]
    has_quantizers: bool


@dataclass(slots=True)
class TrainRun:
    """A run of the model in `source`, which writes `folder` and resumes from `checkpoint`, if any.

    Every rank makes one, and calls `run`.
    """

    source: CheckpointSource
    folder: Path
    settings: TrainConfig
    checkpoint: Path | None
    groups: ProcessGroups
    progress: Progress

    def run(self) -> RunResult:
        """Prepare everything, and train.

        Raises:
            TrainingError: a loss or a gradient is NaN or Inf, or the folder holds another run.
            MegtoolError: the checkpoint, the data or an option cannot be used.
        """
        groups, folder = self.groups, self.folder
        seed_random_states(self.settings.seed, groups)
        previous = RunIdentity.read(folder)
        resumed = self._open_checkpoint()
        previous_batch = saved_batch_size(previous, resumed)
        settings = self.settings = with_batch_size(self.settings, previous_batch)
        check_plan(self.source, settings, groups.parallel)
        datasets = open_datasets(
            settings,
            self.source,
            cache=settings.rows.data_cache_path or cache_folder(folder),
            world=groups.world,
            progress=self.progress,
        )
        plan = plan_run(
            settings,
            seq_length=datasets.train.length,
            num_samples=len(datasets.train),
            target_length=datasets.train.target_length,
            layout=groups.parallel,
        )
        schedule = plan.make_lr_schedule(settings.optimizer)
        identity = self._identify(datasets, plan, previous)
        if resumed is not None and self.checkpoint == settings.load:
            check_loaded(self.source, resumed, plan.train_iters)
        # A frozen model is read from SRC, though a checkpoint holds it with adapters merged.
        weights = self.source if resumed is None or is_model_frozen(settings) else resumed
        stages = self._load(weights)
        for stage in stages:
            stage.label_kind = datasets.label_kind
        inputs = FeatureInputs(
            source=self.source,
            weights=weights,
            num_microbatches=plan.num_microbatches,
            progress=self.progress,
        )
        features = TrainingFeatures.prepare(settings, stages, inputs)
        optimizer = make_optimizer(stages, settings, plan, groups)
        state = self._restore(
            weights, stages, optimizer, features, previous_batch or plan.global_batch_size
        )
        state = self._rescale(state, previous_batch, plan)
        if resumed is not None:
            features.load_objects(resumed.catalogue)
        template = _make_template(weights, groups, stages, optimizer, features.quantizers)
        optimizer_format = settings.dist_ckpt_optim_format if features.saves_optimizer else "none"
        with ExitStack() as stack:
            saver = features.wrap_saver(
                stack.enter_context(
                    TorchDistSaver(
                        folder,
                        template,
                        groups,
                        optimizer_format=optimizer_format,
                        fsync=settings.fsync,
                    )
                )
            )
            identity = identity.continued(previous, state.iteration)
            claim_folder(folder, settings, self.checkpoint, identity, groups.rank)
            log = stack.enter_context(
                RunLog(
                    folder if groups.rank == 0 else None,
                    iteration=state.iteration,
                    tensorboard=settings.tensorboard,
                )
            )
            in_background = saves_in_background(settings, plan, state.iteration)
            saver.prepare(stages, optimizer, asynchronous=in_background)
            job = TrainJob(
                stages=stages,
                optimizer=optimizer,
                dataset=datasets.train,
                eval_dataset=datasets.evaluation,
                plan=plan,
                settings=settings,
                schedule=schedule,
                log=log,
                saver=saver,
                folder=folder,
                features=features,
                stored_tensors=template.tensors,
                args=_megatron_args(settings, plan, stages[0].dtype, optimizer)
                | features.megatron_args(),
            )
            start_iteration = state.iteration
            outcome = train(job, state, progress=self.progress)
            losses, evaluations = log.losses(), log.evaluations()
        return RunResult(
            outcome=outcome,
            plan=plan,
            dtype=str(stages[0].dtype).removeprefix("torch."),
            start_iteration=start_iteration,
            losses=losses,
            evaluations=evaluations,
            counts=datasets.counts,
            saved_paths=features.saved_paths(folder, outcome.saved_iteration),
            has_quantizers=features.quantizers is not None,
        )

    def _open_checkpoint(self) -> CheckpointSource | None:
        if self.checkpoint is None:
            return None
        if self.groups.rank == 0:
            _LOG.info("resumes from %s", self.checkpoint)
            warn_stale_tracker(self.folder, self.checkpoint)
        return open_checkpoint(self.checkpoint, self.settings)

    def _identify(
        self, datasets: TrainDatasets, plan: RunPlan, previous: RunIdentity | None
    ) -> RunIdentity:
        """The identity of this run; logs how it differs from that of the run in the folder.

        Raises:
            TrainingError: the folder holds another run.
        """
        settings, source = self.settings, self.source
        evaluation = datasets.evaluation
        # Ranks other than the first need the fingerprint only if a difference is an error.
        needs_fingerprint = not self.groups.rank or is_model_frozen(settings)
        identity = RunIdentity.from_config(
            source.config,
            datasets.identity,
            settings,
            {
                "train_iters": plan.train_iters,
                "global_batch_size": plan.global_batch_size,
                "dtype": resolve_dtype(settings, self.groups.device.type),
                "eval_data": None if evaluation is None else evaluation.fingerprint,
            },
            source=sample_fingerprint(source.catalogue, source.view) if needs_fingerprint else "",
        )
        for change in () if previous is None else identity.find_changes(previous, self.folder):
            if self.groups.rank == 0:
                _LOG.warning("the resumed run differs from before: %s", change)
        return identity

    def _load(self, source: CheckpointSource) -> list[Decoder]:
        """The model on this rank in training mode, with frozen and recomputed parts set."""
        settings, groups = self.settings, self.groups
        packed = KeepPacked(groups=groups) if settings.lora.qlora else None
        stages = load_for_training(
            source,
            self._sharder() if settings.sharding.is_fully_sharded else packed or groups,
            dtype=resolve_dtype(settings, groups.device.type),
            sequence_parallel=settings.parallel.sequence_parallel,
            threads=settings.threads,
            progress=self.progress,
        )
        freeze(stages, settings.freeze)
        let_overlap(stages, settings.overlap)
        if settings.recompute_granularity is not None:
            recompute(stages, settings.recompute_granularity, settings.recompute_num_layers)
        return stages

    def _sharder(self) -> FullyShard:
        """How the model is sharded over replicas, with what is frozen."""

        def prepare(stages: Sequence[Decoder]) -> None:
            freeze(stages, self.settings.freeze)
            if is_model_frozen(self.settings):
                for stage in stages:
                    stage.requires_grad_(False)

        return FullyShard(
            groups=self.groups,
            reshard_after_forward=self.settings.sharding.sharding_strategy == "optim_grads_params",
            in_param_dtype=self.settings.optimizer.grad_reduce_in_bf16,
            prepare=prepare,
        )

    def _restore(
        self,
        source: CheckpointSource,
        stages: Sequence[Decoder],
        optimizer: Optimizer,
        features: TrainingFeatures,
        batch_size: int,
    ) -> TrainState:
        """Load the optimizer's state and the progress of the run that is resumed, if any."""
        if self.checkpoint is None:
            return TrainState()
        state = features.restore(self.checkpoint, optimizer)
        if state is not None:
            return state
        return load_train_state(
            source,
            stages,
            optimizer,
            batch_size=batch_size,
            own_states=features.load_states(self.checkpoint),
            threads=self.settings.threads,
            progress=self.progress,
        )

    def _rescale(self, state: TrainState, previous: int | None, plan: RunPlan) -> TrainState:
        size = plan.global_batch_size
        if previous not in (None, size) and state.iteration and self.groups.rank == 0:
            _LOG.warning(
                "the global batch size was %d and is %d: the learning rate continues from the same "
                "step",
                previous,
                size,
            )
        return rescale_state(state, previous, size)


def _make_template(
    source: CheckpointSource,
    groups: ProcessGroups,
    stages: Sequence[Decoder],
    optimizer: Optimizer,
    quantizers: QuantizerState | None,
) -> SaveTemplate:
    kind = dtype(str(stages[0].dtype).removeprefix("torch."))
    return make_save_template(
        source,
        groups.parallel,
        kind,
        bucket_size=optimizer.bucket_size,
        grad_dtype="float32" if optimizer.sums_in_fp32 else kind.name,
        carries=groups.pp.rank == 0,
        quantizers=quantizers,
    )


_ARG_OPTIONS = (
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
"""Options that are fields of Megatron's args."""


def _megatron_args(
    settings: TrainConfig, plan: RunPlan, param_dtype: torch.dtype, optimizer: Optimizer
) -> dict[str, Any]:
    """Fields of Megatron's args that the run sets in its checkpoints."""
    options = settings.optimizer
    return {name: find_option(settings, name) for name in _ARG_OPTIONS} | {
        "train_iters": plan.train_iters,
        "seq_length": plan.seq_length,
        "micro_batch_size": plan.micro_batch_size,
        "global_batch_size": plan.global_batch_size,
        "bf16": param_dtype == torch.bfloat16,
        "fp16": param_dtype == torch.float16,
        "finetune": False,
        "overlap_grad_reduce": optimizer.bucket_size is not None,
        "ddp_bucket_size": options.ddp_bucket_size,
        "ddp_pad_buckets_for_high_nccl_busbw": options.ddp_pad_buckets_for_high_nccl_busbw,
        "accumulate_allreduce_grads_in_fp32": optimizer.sums_in_fp32,
        "fp8": None,
    }
