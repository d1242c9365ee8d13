"""Runs of the training loop without the command: a model, `Numbers`, and what it logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megtool.model.stacks.decoder import Decoder
from megtool.options.config_file import build_options
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_decoder
from megtool.train.loop import TrainJob, TrainOutcome, TrainState, train
from megtool.train.model.build import load_for_training
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import RunLog
from megtool.train.run_plan import freeze, make_optimizer, plan_run
from tests.support.runs.numbered_data import LENGTH, Numbers


def load(model: Path, dtype: str = "float32") -> list[Decoder]:
    torch.set_num_threads(1)
    stored = open_decoder(model, encoders=True)
    return load_for_training(stored, ProcessGroups.alone(), dtype=dtype, threads=1)


def job(
    model: Path, *, folder: Path | None = None, dtype: str = "float32", **options: Any
) -> TrainJob:
    settings = build_options(
        TrainConfig, {"train_iters": 4, "lr": 1e-3, "global_batch_size": 4} | options
    )
    stages = load(model, dtype)
    freeze(stages, settings.freeze)
    plan = plan_run(settings, seq_length=LENGTH, num_samples=12, layout=ParallelConfig())
    return TrainJob(
        stages=stages,
        optimizer=make_optimizer(stages, settings, plan, ProcessGroups.alone()),
        dataset=Numbers(),
        plan=plan,
        settings=settings,
        schedule=plan.make_lr_schedule(settings.optimizer),
        log=RunLog(folder or Path(model) / "logs"),
    )


def run(job: TrainJob) -> TrainOutcome:
    with job.log:
        return train(job, TrainState())


def losses(job: TrainJob) -> list[float]:
    run(job)
    return [loss for _, loss in job.log.losses()]
