"""The loop: steps until the end, with evaluations, checkpoints, logs, and reasons to stop early."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megtool.console import Progress, silent
from megtool.errors import TrainingError
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.pipeline import PipelineSchedule as Passes
from megtool.optim.optimizer import Optimizer, StepResult
from megtool.optim.scaler import DynamicScaler
from megtool.optim.schedules import Schedule
from megtool.train.checkpointing.retention import forget_old, has_iteration
from megtool.train.checkpointing.save_metadata import Extras
from megtool.train.collate import Feed, batch_of
from megtool.train.config import TrainSettings
from megtool.train.cuda_graph import GraphedSchedule
from megtool.train.evaluation import Evaluation, evaluate, world_sum
from megtool.train.features.protocol import Further
from megtool.train.nonfinite import first_not_finite, parameter_not_finite, stop
from megtool.train.run_log import RunLog, told
from megtool.train.run_plan import RunPlan, rates_of
from megtool.train.train_state import Standing

_LOG = logging.getLogger(__name__)

Reason = Literal["done", "patience", "signal", "time"]


class Keeper(Protocol):
    """What saves iterations; see `megtool.train.checkpointing.save.Saver`."""

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        extras: Extras,
        *,
        asynchronous: bool = False,
        copy_behind: bool = False,
    ) -> float:
        """Save; returns the seconds that training waited."""

    def wait_for_copy(self) -> float:
        """Wait until the state may change; returns the seconds of it."""

    def check(self) -> None:
        """Raise what went wrong in the background."""

    def finish(self) -> None:
        """Wait until no save is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, ready to go: the model on this rank, its optimizer, data, and where things are kept.

    `folder` is where `saver` keeps iterations, None with it. `objective` stands for the decoder's
    own loss. `args` are Megatron's, as checkpoints keep them.
    """

    stages: Sequence[Decoder]
    optimizer: Optimizer
    feed: Feed
    plan: RunPlan
    settings: TrainSettings
    schedule: Schedule
    log: RunLog
    eval_feed: Feed | None = None
    saver: Keeper | None = None
    folder: Path | None = None
    further: Further = field(default_factory=Further)
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run has come to. `saved` is its newest checkpoint; `stall_seconds` it waited for
    saves, of `seconds` in all; `tokens` went through the model."""

    standing: Standing
    reason: Reason = "done"
    saved: int | None = None
    seconds: float = 0.0
    stall_seconds: float = 0.0
    tokens: int = 0
    skipped: int = 0


def train(job: Job, standing: Standing, *, progress: Progress = silent) -> Outcome:
    """Do the steps that are left, from `standing` on; every rank calls it.

    Raises:
        TrainingError: a loss or a gradient is no finite number. Checkpoints stay.
        StorageError: a checkpoint or the log cannot be written.
        FormatError: the data has a fault.
    """
    with _signalled(job.settings.exit_signal_handler) as is_signalled:
        return _Run(job, standing, is_signalled, progress).go()


class _Run:
    """The state of the loop."""

    def __init__(
        self, job: Job, standing: Standing, is_signalled: Callable[[], bool], progress: Progress
    ) -> None:
        self.job, self.standing, self.progress = job, standing, progress
        self.is_signalled = is_signalled
        self.groups = job.stages[0].groups
        self.passes = _passes(job)
        self.outcome = Outcome(standing=standing)
        if job.folder is not None and has_iteration(job.folder, standing.iteration):
            self.outcome.saved = standing.iteration
        self.evaluations = job.log.evaluations()
        self.began = time.monotonic()

    def go(self) -> Outcome:
        """All steps, and what belongs at both ends."""
        plan, standing = self.job.plan, self.standing
        self.progress("train", plan.tokens * standing.iteration, plan.tokens * plan.train_iters)
        if standing.iteration == 0:
            self.evaluate()
        elif standing.iteration < plan.train_iters and self.is_tired():
            self.outcome.reason = "patience"
        while standing.iteration < plan.train_iters and self.outcome.reason == "done":
            self.step()
            self.progress("train", plan.tokens, plan.tokens * plan.train_iters)
            last = standing.iteration == plan.train_iters
            every = self.job.settings.eval_interval or max(1, plan.train_iters // 10)
            if last or standing.iteration % every == 0:
                self.evaluate()
            reason = None if last else self.reason()
            interval = self.job.settings.save_interval
            if last or reason or (interval and standing.iteration % interval == 0):
                self.save(last=last or reason is not None)
            self.outcome.reason = reason or "done"
        self.outcome.seconds = time.monotonic() - self.began
        return self.outcome

    def step(self) -> None:
        """One step of the optimizer, and its line in the log."""
        job, plan, standing = self.job, self.job.plan, self.standing
        began = time.monotonic()
        first = standing.consumed_samples + self.groups.dp.rank * plan.rows
        batch, labels_BS = batch_of(job.feed.rows(first, plan.rows), self.groups.device)
        rate, weight_decay = rates_of(job.schedule, standing.num_steps)
        job.optimizer.zero_grad()
        job.optimizer.begin(plan.num_microbatches)
        if job.further.rounding is not None:
            self.wait_for_parameters()
            self.wait_for_copy()
        job.further.begin_step(labels_BS, job.optimizer.loss_scale)
        with job.further.around(standing.iteration, batch):
            loss, count = self.passes.step(batch, labels_BS)
        loss_sum, num_labels = world_sum([float(loss), float(count)], self.groups)
        standing.iteration += 1
        if not math.isfinite(loss_sum):
            raise self.trouble(f"the loss is {loss_sum}", batch, labels_BS)
        job.optimizer.finish(torch.tensor(num_labels, device=self.groups.device))
        self.wait_for_copy()
        result = job.optimizer.step(rate, weight_decay)
        noted = job.further.end_step()
        if not result.ok:
            self.skip(result)
        else:
            standing.num_steps += plan.global_batch_size
        standing.consumed_samples += plan.global_batch_size
        self.outcome.tokens += plan.tokens
        if job.saver is not None:
            job.saver.check()
        seconds = time.monotonic() - began
        line = {
            "iteration": standing.iteration,
            "loss": loss_sum / max(num_labels, 1.0),
            "lr": job.schedule.lr(standing.num_steps - plan.global_batch_size * result.ok),
            "weight_decay": weight_decay,
            "grad_norm": result.grad_norm,
            "labels": int(num_labels),
            "consumed_samples": standing.consumed_samples,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(plan.tokens / seconds, 3),
            **noted,
        }
        if result.num_zeros is not None:
            line["num_zeros"] = result.num_zeros
        if isinstance(job.optimizer.scaler, DynamicScaler):
            unit = job.optimizer.scaler.unit  # the log has it as files have it, as Megatron's
            line |= {"loss_scale": result.loss_scale * unit, "skipped": not result.ok}
        job.log.write(line)
        self.tell(line)

    def skip(self, result: StepResult) -> None:
        """A gradient is not finite: fp16 goes on with a smaller loss scale, others stop."""
        scaler = self.job.optimizer.scaler
        self.outcome.skipped += 1
        if isinstance(scaler, DynamicScaler) and result.loss_scale > scaler.minimum:
            return
        named = f"gradient of {result.first_bad}" if result.first_bad else None
        what = "the gradient is no finite number"
        if isinstance(scaler, DynamicScaler):
            what += f", even with a loss scale of {result.loss_scale * scaler.unit:g}"
        raise self.stop(what, named)

    def trouble(self, what: str, batch: Batch, labels_BS: Tensor) -> TrainingError:
        """The error for a loss that is no number."""
        job, number = self.job, self.job.plan.num_microbatches
        with job.further.around(self.standing.iteration - 1, batch, teach=False):
            first = first_not_finite(job.stages, batch, labels_BS, number)
        return self.stop(what, first)

    def stop(self, what: str, bad: str | None = None) -> TrainingError:
        """The error that ends the run here, and the checkpoint that is left."""
        bad = bad or parameter_not_finite(self.job.stages)
        return stop(what, bad, iteration=self.standing.iteration, good=self.outcome.saved)

    def tell(self, line: dict[str, Any]) -> None:
        """Every `log_interval` steps, a line for people; of rank 0."""
        plan, n = self.job.plan, self.standing.iteration
        if self.groups.rank or (n % self.job.settings.log_interval and n != plan.train_iters):
            return
        done = self.outcome.tokens // plan.tokens
        left = (plan.train_iters - n) * (time.monotonic() - self.began) / done
        _LOG.info("%s", told(line, plan.train_iters, left))

    def evaluate(self) -> None:
        """Measure the model on what it does not learn, if there is anything."""
        job = self.job
        if job.eval_feed is None:
            return
        self.wait_for_parameters()
        iters = job.settings.eval_iters
        if job.further.rounding is not None:
            self.wait_for_copy()
        with job.further.around(self.standing.iteration, None):
            found: Evaluation = evaluate(
                job.stages,
                job.eval_feed,
                micro_batch_size=job.plan.micro_batch_size,
                num_samples=None if iters is None else iters * job.plan.global_batch_size,
            )
        line = {
            "iteration": self.standing.iteration,
            "eval_loss": found.loss,
            "eval_labels": found.num_labels,
        }
        job.log.write(line)
        self.evaluations.append((self.standing.iteration, found.loss))
        if self.groups.rank == 0:
            _LOG.info("%s", told(line, job.plan.train_iters))
        if not math.isfinite(found.loss):
            raise self.stop(f"the evaluation's loss is {found.loss}")

    def reason(self) -> Reason | None:
        """Why the run should end here, the same on every rank."""
        settings = self.job.settings
        minutes = settings.exit_duration_in_mins
        has_run = minutes is not None and time.monotonic() - self.began > 60 * minutes
        if self.is_tired():
            return "patience"
        if not settings.exit_signal_handler and minutes is None:
            return None
        flags = world_sum([], self.groups, [float(self.is_signalled()), float(has_run)])
        return "signal" if flags[0] else "time" if flags[1] else None

    def is_tired(self) -> bool:
        """Whether evaluations no longer get better: what rank 0 says, which has those of before."""
        patience = self.job.settings.patience
        if patience is None:
            return False
        mine = self.groups.rank == 0 and is_tired(self.evaluations, patience)
        return world_sum([], self.groups, [float(mine)])[0] > 0

    def save(self, *, last: bool) -> None:
        """Keep the iteration; the last one is waited for.

        Raises:
            TrainingError: a parameter is not finite: what is kept stays.
        """
        job, standing = self.job, self.standing
        if job.saver is None:
            return
        self.wait_for_parameters()
        if bad := parameter_not_finite(job.stages):
            raise self.stop("a parameter is no finite number", bad)
        extras = Extras(
            consumed_train_samples=standing.consumed_samples,
            scheduler=job.schedule.state_dict(standing.num_steps),
            args={**job.args, "iteration": standing.iteration},
            objects=job.further.objects(),
        )
        began = time.monotonic()
        job.saver.finish()
        self.forget()  # before the next one needs its space
        job.saver.save(
            standing.iteration,
            job.stages,
            job.optimizer,
            extras,
            asynchronous=job.settings.async_save and not last,
            copy_behind=True,
        )
        self.outcome.stall_seconds += time.monotonic() - began
        self.outcome.saved = standing.iteration
        self.forget()

    def forget(self) -> None:
        """Remove checkpoints that are not to be kept any longer."""
        job = self.job
        if job.folder is not None and job.settings.keep and self.groups.rank == 0:
            forget_old(job.folder, job.settings.keep)

    def wait_for_copy(self) -> None:
        """The last save may still be copying what is to change now."""
        if self.job.saver is not None:
            self.outcome.stall_seconds += self.job.saver.wait_for_copy()

    def wait_for_parameters(self) -> None:
        """Parameters that are still on their way from other replicas are here from now on."""
        wait = getattr(self.job.optimizer, "wait_for_parameters", None)
        if wait is not None:
            wait()


def _passes(job: Job) -> Passes:
    """How micro batches go there and back."""
    plan, further = job.plan, job.further
    if job.settings.cuda_graph_impl == "none":
        return Passes(
            job.stages,
            num_microbatches=plan.num_microbatches,
            objective=further.objective,
            scale=job.optimizer.scale_loss,
        )
    return GraphedSchedule(
        job.stages,
        job.optimizer,
        num_microbatches=plan.num_microbatches,
        shape=(plan.micro_batch_size, plan.seq_length),
        is_settled=lambda: further.fp8 is None or further.fp8.is_settled,
    )


def is_tired(evaluations: Sequence[tuple[int, float]], patience: int) -> bool:
    """Whether none of the last `patience` evaluations was better than all before them.

    A loss that is no number is worse than any.
    """
    if len(evaluations) <= patience:
        return False
    losses = [math.inf if math.isnan(loss) else loss for _, loss in evaluations]
    return min(losses[-patience:]) >= min(losses[:-patience])


@contextmanager
def _signalled(asked: bool) -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come since the block began; while it lasts, it does nothing else."""
    seen = threading.Event()

    def note(_: int, __: FrameType | None) -> None:
        seen.set()

    if not asked or threading.current_thread() is not threading.main_thread():
        yield seen.is_set
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
