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
from megtool.optim.scaler import DynamicGradScaler
from megtool.optim.schedules import LRSchedule
from megtool.train.checkpointing.retention import prune_checkpoints, has_iteration
from megtool.train.checkpointing.save_metadata import SaveMetadata
from megtool.train.collate import RowDataset, collate_rows
from megtool.train.config import TrainConfig
from megtool.train.cuda_graph import GraphedSchedule
from megtool.train.evaluation import Evaluation, evaluate, world_sum
from megtool.train.features.protocol import Further
from megtool.train.nonfinite import find_nonfinite_tensor, find_nonfinite_parameter, nonfinite_error
from megtool.train.run_log import RunLog, format_line
from megtool.train.run_plan import RunPlan, rates_at
from megtool.train.train_state import TrainState

_LOG = logging.getLogger(__name__)

StopReason = Literal["done", "patience", "signal", "time"]


class CheckpointSaver(Protocol):
    """What saves iterations; see `megtool.train.checkpointing.save.Saver`."""

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        metadata: SaveMetadata,
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
class TrainJob:
    """A run, ready to go: the model on this rank, its optimizer, data, and where things are kept.

    `folder` is where `saver` keeps iterations, None with it. `objective` stands for the decoder's
    own loss. `args` are Megatron's, as checkpoints keep them.
    """

    stages: Sequence[Decoder]
    optimizer: Optimizer
    dataset: RowDataset
    plan: RunPlan
    settings: TrainConfig
    schedule: LRSchedule
    log: RunLog
    eval_dataset: RowDataset | None = None
    saver: CheckpointSaver | None = None
    folder: Path | None = None
    features: Further = field(default_factory=Further)
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TrainOutcome:
    """What a run has come to. `saved` is its newest checkpoint; `stall_seconds` it waited for
    saves, of `seconds` in all; `tokens` went through the model."""

    state: TrainState
    stop_reason: StopReason = "done"
    saved_iteration: int | None = None
    seconds: float = 0.0
    stall_seconds: float = 0.0
    tokens: int = 0
    skipped: int = 0


def train(job: TrainJob, state: TrainState, *, progress: Progress = silent) -> TrainOutcome:
    """Do the steps that are left, from `standing` on; every rank calls it.

    Raises:
        TrainingError: a loss or a gradient is no finite number. Checkpoints stay.
        StorageError: a checkpoint or the log cannot be written.
        FormatError: the data has a fault.
    """
    with _watch_sigterm(job.settings.exit_signal_handler) as is_signalled:
        return _TrainLoop(job, state, is_signalled, progress).run()


class _TrainLoop:
    """The state of the loop."""

    def __init__(
        self, job: TrainJob, state: TrainState, is_signalled: Callable[[], bool], progress: Progress
    ) -> None:
        self.job, self.state, self.progress = job, state, progress
        self.is_signalled = is_signalled
        self.groups = job.stages[0].groups
        self.schedule = _make_schedule(job)
        self.outcome = TrainOutcome(state=state)
        if job.folder is not None and has_iteration(job.folder, state.iteration):
            self.outcome.saved_iteration = state.iteration
        self.evaluations = job.log.evaluations()
        self.start_time = time.monotonic()

    def run(self) -> TrainOutcome:
        """All steps, and what belongs at both ends."""
        plan, state = self.job.plan, self.state
        self.progress("train", plan.tokens * state.iteration, plan.tokens * plan.train_iters)
        if state.iteration == 0:
            self.evaluate()
        elif state.iteration < plan.train_iters and self.patience_exhausted():
            self.outcome.stop_reason = "patience"
        while state.iteration < plan.train_iters and self.outcome.stop_reason == "done":
            self.step()
            self.progress("train", plan.tokens, plan.tokens * plan.train_iters)
            last = state.iteration == plan.train_iters
            every = self.job.settings.eval_interval or max(1, plan.train_iters // 10)
            if last or state.iteration % every == 0:
                self.evaluate()
            reason = None if last else self.find_stop_reason()
            interval = self.job.settings.save_interval
            if last or reason or (interval and state.iteration % interval == 0):
                self.save(last=last or reason is not None)
            self.outcome.stop_reason = reason or "done"
        self.outcome.seconds = time.monotonic() - self.start_time
        return self.outcome

    def step(self) -> None:
        """One step of the optimizer, and its line in the log."""
        job, plan, state = self.job, self.job.plan, self.state
        began = time.monotonic()
        first = state.consumed_samples + self.groups.dp.rank * plan.rows
        batch, labels_BS = collate_rows(job.dataset.rows(first, plan.rows), self.groups.device)
        rate, weight_decay = rates_at(job.schedule, state.num_steps)
        job.optimizer.zero_grad()
        job.optimizer.begin(plan.num_microbatches)
        if job.features.rounding is not None:
            self.wait_for_parameters()
            self.wait_for_copy()
        job.features.begin_step(labels_BS, job.optimizer.loss_scale)
        with job.features.around(state.iteration, batch):
            loss, count = self.schedule.step(batch, labels_BS)
        loss_sum, num_labels = world_sum([float(loss), float(count)], self.groups)
        state.iteration += 1
        if not math.isfinite(loss_sum):
            raise self.nonfinite_error(f"the loss is {loss_sum}", batch, labels_BS)
        job.optimizer.finish(torch.tensor(num_labels, device=self.groups.device))
        self.wait_for_copy()
        result = job.optimizer.step(rate, weight_decay)
        feature_metrics = job.features.end_step()
        if not result.ok:
            self.check_skipped_step(result)
        else:
            state.num_steps += plan.global_batch_size
        state.consumed_samples += plan.global_batch_size
        self.outcome.tokens += plan.tokens
        if job.saver is not None:
            job.saver.check()
        seconds = time.monotonic() - began
        line = {
            "iteration": state.iteration,
            "loss": loss_sum / max(num_labels, 1.0),
            "lr": job.schedule.lr(state.num_steps - plan.global_batch_size * result.ok),
            "weight_decay": weight_decay,
            "grad_norm": result.grad_norm,
            "labels": int(num_labels),
            "consumed_samples": state.consumed_samples,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(plan.tokens / seconds, 3),
            **feature_metrics,
        }
        if result.num_zeros is not None:
            line["num_zeros"] = result.num_zeros
        if isinstance(job.optimizer.scaler, DynamicGradScaler):
            unit = job.optimizer.scaler.unit  # the log has it as files have it, as Megatron's
            line |= {"loss_scale": result.loss_scale * unit, "skipped": not result.ok}
        job.log.write(line)
        self.log_line(line)

    def check_skipped_step(self, result: StepResult) -> None:
        """A gradient is not finite: fp16 goes on with a smaller loss scale, others stop."""
        scaler = self.job.optimizer.scaler
        self.outcome.skipped += 1
        if isinstance(scaler, DynamicGradScaler) and result.loss_scale > scaler.minimum:
            return
        named = f"gradient of {result.first_nonfinite}" if result.first_nonfinite else None
        problem = "the gradient is no finite number"
        if isinstance(scaler, DynamicGradScaler):
            problem += f", even with a loss scale of {result.loss_scale * scaler.unit:g}"
        raise self.stop_error(problem, named)

    def nonfinite_error(self, problem: str, batch: Batch, labels_BS: Tensor) -> TrainingError:
        """The error for a loss that is no number."""
        job, number = self.job, self.job.plan.num_microbatches
        with job.features.around(self.state.iteration - 1, batch, teach=False):
            first = find_nonfinite_tensor(job.stages, batch, labels_BS, number)
        return self.stop_error(problem, first)

    def stop_error(self, problem: str, tensor: str | None = None) -> TrainingError:
        """The error that ends the run here, and the checkpoint that is left."""
        tensor = tensor or find_nonfinite_parameter(self.job.stages)
        return nonfinite_error(problem, tensor, iteration=self.state.iteration, last_saved=self.outcome.saved_iteration)

    def log_line(self, line: dict[str, Any]) -> None:
        """Every `log_interval` steps, a line for people; of rank 0."""
        plan, n = self.job.plan, self.state.iteration
        if self.groups.rank or (n % self.job.settings.log_interval and n != plan.train_iters):
            return
        done = self.outcome.tokens // plan.tokens
        seconds_left = (plan.train_iters - n) * (time.monotonic() - self.start_time) / done
        _LOG.info("%s", format_line(line, plan.train_iters, seconds_left))

    def evaluate(self) -> None:
        """Measure the model on what it does not learn, if there is anything."""
        job = self.job
        if job.eval_dataset is None:
            return
        self.wait_for_parameters()
        iters = job.settings.eval_iters
        if job.features.rounding is not None:
            self.wait_for_copy()
        with job.features.around(self.state.iteration, None):
            evaluation: Evaluation = evaluate(
                job.stages,
                job.eval_dataset,
                micro_batch_size=job.plan.micro_batch_size,
                num_samples=None if iters is None else iters * job.plan.global_batch_size,
            )
        line = {
            "iteration": self.state.iteration,
            "eval_loss": evaluation.loss,
            "eval_labels": evaluation.num_labels,
        }
        job.log.write(line)
        self.evaluations.append((self.state.iteration, evaluation.loss))
        if self.groups.rank == 0:
            _LOG.info("%s", format_line(line, job.plan.train_iters))
        if not math.isfinite(evaluation.loss):
            raise self.stop_error(f"the evaluation's loss is {evaluation.loss}")

    def find_stop_reason(self) -> StopReason | None:
        """Why the run should end here, the same on every rank."""
        settings = self.job.settings
        minutes = settings.exit_duration_in_mins
        has_run = minutes is not None and time.monotonic() - self.start_time > 60 * minutes
        if self.patience_exhausted():
            return "patience"
        if not settings.exit_signal_handler and minutes is None:
            return None
        flags = world_sum([], self.groups, [float(self.is_signalled()), float(has_run)])
        return "signal" if flags[0] else "time" if flags[1] else None

    def patience_exhausted(self) -> bool:
        """Whether evaluations no longer get better: what rank 0 says, which has those of before."""
        patience = self.job.settings.patience
        if patience is None:
            return False
        is_exhausted = self.groups.rank == 0 and patience_exhausted(self.evaluations, patience)
        return world_sum([], self.groups, [float(is_exhausted)])[0] > 0

    def save(self, *, last: bool) -> None:
        """Keep the iteration; the last one is waited for.

        Raises:
            TrainingError: a parameter is not finite: what is kept stays.
        """
        job, state = self.job, self.state
        if job.saver is None:
            return
        self.wait_for_parameters()
        if bad := find_nonfinite_parameter(job.stages):
            raise self.stop_error("a parameter is no finite number", bad)
        metadata = SaveMetadata(
            consumed_train_samples=state.consumed_samples,
            scheduler=job.schedule.state_dict(state.num_steps),
            args={**job.args, "iteration": state.iteration},
            objects=job.features.objects(),
        )
        began = time.monotonic()
        job.saver.finish()
        self.prune_checkpoints()  # before the next one needs its space
        job.saver.save(
            state.iteration,
            job.stages,
            job.optimizer,
            metadata,
            asynchronous=job.settings.async_save and not last,
            copy_behind=True,
        )
        self.outcome.stall_seconds += time.monotonic() - began
        self.outcome.saved_iteration = state.iteration
        self.prune_checkpoints()

    def prune_checkpoints(self) -> None:
        """Remove checkpoints that are not to be kept any longer."""
        job = self.job
        if job.folder is not None and job.settings.most_recent_k and self.groups.rank == 0:
            prune_checkpoints(job.folder, job.settings.most_recent_k)

    def wait_for_copy(self) -> None:
        """The last save may still be copying what is to change now."""
        if self.job.saver is not None:
            self.outcome.stall_seconds += self.job.saver.wait_for_copy()

    def wait_for_parameters(self) -> None:
        """Parameters that are still on their way from other replicas are here from now on."""
        wait = getattr(self.job.optimizer, "wait_for_parameters", None)
        if wait is not None:
            wait()


def _make_schedule(job: TrainJob) -> Passes:
    """How micro batches go there and back."""
    plan, further = job.plan, job.features
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
        is_steady=lambda: further.fp8 is None or further.fp8.is_steady,
    )


def patience_exhausted(evaluations: Sequence[tuple[int, float]], patience: int) -> bool:
    """Whether none of the last `patience` evaluations was better than all before them.

    A loss that is no number is worse than any.
    """
    if len(evaluations) <= patience:
        return False
    losses = [math.inf if math.isnan(loss) else loss for _, loss in evaluations]
    return min(losses[-patience:]) >= min(losses[:-patience])


@contextmanager
def _watch_sigterm(is_enabled: bool) -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM has come since the block began; while it lasts, it does nothing else."""
    received = threading.Event()

    def note(_: int, __: FrameType | None) -> None:
        received.set()

    if not is_enabled or threading.current_thread() is not threading.main_thread():
        yield received.is_set
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield received.is_set
    finally:
        signal.signal(signal.SIGTERM, before)
