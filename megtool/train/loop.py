"""The training loop: steps, evaluations, checkpoints, logs, and reasons to stop early."""

from __future__ import annotations

import logging
import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from megtool.console import Progress, silent
from megtool.errors import TrainingError
from megtool.inference.collate import RowDataset, collate_rows
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.flops import training_flops
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.optim.optimizer import Optimizer, StepResult
from megtool.optim.scaler import DynamicGradScaler
from megtool.optim.schedules import LRSchedule
from megtool.tensors.sharded import GlobalTensor
from megtool.train.checkpointing.protocol import CheckpointSaver, SaveMetadata, TrainState
from megtool.train.checkpointing.retention import has_iteration, prune_checkpoints
from megtool.train.cuda_graph import GraphedPipeline, GraphedSchedule
from megtool.train.evaluation import Evaluation, evaluate, world_sum
from megtool.train.features.registry import TrainingFeatures
from megtool.train.nonfinite import find_nonfinite_parameter, find_nonfinite_tensor, nonfinite_error
from megtool.train.options.config import TrainConfig
from megtool.train.prefetch import RowPrefetcher
from megtool.train.profile import StepProfiler
from megtool.train.run_log import RunLog, format_line
from megtool.train.run_plan import RunPlan

_LOG = logging.getLogger(__name__)

StopReason = Literal["done", "patience", "signal", "interrupt", "time"]
"""Why a run ended: `signal` is a SIGTERM that `--exit-signal-handler` expects, `interrupt` is any
other SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """A run that is ready to start: the model on this rank, its optimizer, its data and its saver.

    `folder` is the save folder of `saver`, None without one. `args` are Megatron's args, and
    `stored_tensors` the tensors, in its checkpoints.
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
    features: TrainingFeatures = field(default_factory=TrainingFeatures)
    stored_tensors: Sequence[GlobalTensor] = ()
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TrainOutcome:
    """The result of a run, up to `iteration`. It waited `stall_seconds` of its `seconds` for saves;
    `tokens` are those that went through the model, `skipped` the steps that changed nothing."""

    iteration: int
    stop_reason: StopReason = "done"
    saved_iteration: int | None = None
    tokens: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    skipped: int = 0


def train(job: TrainJob, state: TrainState, *, progress: Progress = silent) -> TrainOutcome:
    """Do the remaining steps, starting from `state`; every rank calls it.

    Raises:
        TrainingError: a loss or a gradient is NaN or Inf. Checkpoints stay.
        StorageError: a checkpoint or the log cannot be written.
        FormatError: the data is damaged.
    """
    with _watch_signals() as received:
        return _TrainLoop(job, state, received, progress).run()


class _TrainLoop:
    """The state of the loop."""

    def __init__(
        self,
        job: TrainJob,
        state: TrainState,
        received: Callable[[], signal.Signals | None],
        progress: Progress,
    ) -> None:
        self.job, self.state, self.progress = job, state, progress
        self.received = received
        self.signals = (0.0, 0.0)
        self.groups = job.stages[0].groups
        self.schedule = _make_schedule(job)
        self.outcome = TrainOutcome(iteration=state.iteration)
        if job.folder is not None and has_iteration(job.folder, state.iteration):
            self.outcome.saved_iteration = state.iteration
        self.evaluations = job.log.evaluations()
        self.flops = training_flops(job.stages[0].config, job.plan.seq_length)
        self.start_time = time.monotonic()

    def run(self) -> TrainOutcome:
        """Run all steps, with evaluations and saves between them."""
        plan, state = self.job.plan, self.state
        self.progress("train", plan.tokens * state.iteration, plan.tokens * plan.train_iters)
        if state.iteration == 0:
            self.evaluate()
        elif state.iteration < plan.train_iters and self.patience_exhausted():
            self.outcome.stop_reason = "patience"
        settings, groups = self.job.settings, self.groups
        settings.profile.check_profile(
            state.iteration, plan.train_iters, groups.parallel.world_size
        )
        prefetcher = RowPrefetcher(
            self.job.dataset, plan.rows, plan.global_batch_size, depth=settings.rows.prefetch_steps
        )
        profiler = StepProfiler(settings.profile, self.job.folder, groups.rank, groups.device)
        with prefetcher, profiler:
            self.run_steps(profiler, prefetcher)
        self.outcome.iteration = state.iteration
        self.outcome.seconds = time.monotonic() - self.start_time
        return self.outcome

    def run_steps(self, profiler: StepProfiler, prefetcher: RowPrefetcher) -> None:
        """Run steps until there are no more, or a reason to stop."""
        plan, state = self.job.plan, self.state
        while state.iteration < plan.train_iters and self.outcome.stop_reason == "done":
            profiler.begin(state.iteration)
            self.step(prefetcher)
            profiler.end(state.iteration)
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

    def step(self, prefetcher: RowPrefetcher) -> None:
        """Do one step of the optimizer, and log it."""
        job, plan, state = self.job, self.job.plan, self.state
        began = time.monotonic()
        first = state.consumed_samples + self.groups.dp.rank * plan.rows
        with record_function("data"):
            end = plan.global_batch_size * plan.train_iters
            batch, labels_BS = collate_rows(prefetcher.rows(first, end), self.groups.device)
        lr = job.schedule.lr(state.num_steps)
        weight_decay = job.schedule.weight_decay(state.num_steps)
        job.optimizer.zero_grad()
        job.optimizer.begin(plan.num_microbatches)
        if job.features.changes_parameters:
            self.wait_for_parameters()
            self.wait_for_copy()
        job.features.begin_step(labels_BS, job.optimizer.loss_scale)
        passes = job.features.around_passes(state.iteration, batch)
        with record_function("forward and backward"), passes:
            loss, count = self.schedule.step(batch, labels_BS)
        # Every rank learns here, with the loss, whether one of them is to stop after this step.
        arrived = self.received()
        flags = [float(arrived == s) for s in (signal.SIGTERM, signal.SIGINT)]
        loss_sum, num_labels, *arrivals = world_sum([float(loss), float(count)], self.groups, flags)
        self.signals = (arrivals[0], arrivals[1])
        state.iteration += 1
        if not math.isfinite(loss_sum):
            raise self.nonfinite_error(f"the loss is {loss_sum}", batch, labels_BS)
        with record_function("reduce gradients"):
            job.optimizer.finish(torch.tensor(num_labels, device=self.groups.device))
        self.wait_for_copy()
        with record_function("optimizer"):
            result = job.optimizer.step(lr, weight_decay)
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
            "peak_memory_bytes": _peak_memory(self.groups.device),
            **feature_metrics,
        }
        if self.flops is not None:
            flops = self.flops * plan.global_batch_size / self.groups.parallel.world_size
            line["tflops"] = round(flops / seconds / 1e12, 6)
        if result.num_zeros is not None:
            line["num_zeros"] = result.num_zeros
        if isinstance(job.optimizer.scaler, DynamicGradScaler):
            unit = job.optimizer.scaler.unit  # as checkpoints and Megatron count it
            line |= {"loss_scale": result.loss_scale * unit, "skipped": not result.ok}
        job.log.write(line)
        self.log_line(line)

    def check_skipped_step(self, result: StepResult) -> None:
        """Go on after a non-finite gradient if fp16 can lower its loss scale; otherwise stop.

        Raises:
            TrainingError: it cannot.
        """
        scaler = self.job.optimizer.scaler
        self.outcome.skipped += 1
        if isinstance(scaler, DynamicGradScaler) and result.loss_scale > scaler.minimum:
            return
        named = f"gradient of {result.first_nonfinite}" if result.first_nonfinite else None
        problem = "the gradient is NaN or Inf"
        if isinstance(scaler, DynamicGradScaler):
            problem += f", even with a loss scale of {result.loss_scale * scaler.unit:g}"
        raise self.stop_error(problem, named)

    def nonfinite_error(self, problem: str, batch: Batch, labels_BS: Tensor) -> TrainingError:
        """The error for a loss that is NaN or Inf."""
        job, number = self.job, self.job.plan.num_microbatches
        with job.features.around_passes(self.state.iteration - 1, batch, is_repeated=True):
            first = find_nonfinite_tensor(job.stages, batch, labels_BS, number)
        return self.stop_error(problem, first)

    def stop_error(self, problem: str, tensor: str | None = None) -> TrainingError:
        """The error that ends the run, with the last good checkpoint."""
        tensor = tensor or find_nonfinite_parameter(self.job.stages)
        return nonfinite_error(
            problem,
            tensor,
            iteration=self.state.iteration,
            last_saved=self.outcome.saved_iteration,
        )

    def log_line(self, line: dict[str, Any]) -> None:
        """Log a readable line every `log_interval` steps, on rank 0."""
        plan, n = self.job.plan, self.state.iteration
        if self.groups.rank or (n % self.job.settings.log_interval and n != plan.train_iters):
            return
        done = self.outcome.tokens // plan.tokens
        seconds_left = (plan.train_iters - n) * (time.monotonic() - self.start_time) / done
        _LOG.info("%s", format_line(line, plan.train_iters, seconds_left))

    def evaluate(self) -> None:
        """Evaluate the model on the validation data, if there is any."""
        job = self.job
        if job.eval_dataset is None:
            return
        self.wait_for_parameters()
        iters = job.settings.eval_iters
        if job.features.changes_parameters:
            self.wait_for_copy()
        with job.features.around_passes(self.state.iteration, None):
            evaluation: Evaluation = evaluate(
                job.stages,
                job.eval_dataset,
                micro_batch_size=job.plan.micro_batch_size,
                num_samples=None if iters is None else iters * job.plan.global_batch_size,
                loss_of=job.features.evaluation_loss,
            )
        line = {
            "iteration": self.state.iteration,
            "eval_loss": evaluation.loss,
            "eval_labels": evaluation.num_labels,
            **job.features.end_evaluation(),
        }
        job.log.write(line)
        self.evaluations.append((self.state.iteration, evaluation.loss))
        if self.groups.rank == 0:
            _LOG.info("%s", format_line(line, job.plan.train_iters))
        if not math.isfinite(evaluation.loss):
            raise self.stop_error(f"the validation loss is {evaluation.loss}")

    def find_stop_reason(self) -> StopReason | None:
        """Why the run should stop now, if it should; the same on every rank."""
        settings = self.job.settings
        minutes = settings.exit_duration_in_mins
        has_run = minutes is not None and time.monotonic() - self.start_time > 60 * minutes
        if self.patience_exhausted():
            return "patience"
        is_terminated, is_interrupted = self.signals
        if is_terminated and settings.exit_signal_handler:
            return "signal"
        if is_terminated or is_interrupted:
            return "interrupt"
        if minutes is None:
            return None
        return "time" if world_sum([], self.groups, [float(has_run)])[0] else None

    def patience_exhausted(self) -> bool:
        """Whether evaluations have stopped improving; rank 0, which has all of them, decides."""
        patience = self.job.settings.patience
        if patience is None:
            return False
        is_exhausted = self.groups.rank == 0 and patience_exhausted(self.evaluations, patience)
        return world_sum([], self.groups, [float(is_exhausted)])[0] > 0

    def save(self, *, last: bool) -> None:
        """Save the iteration; wait for the last one.

        Raises:
            TrainingError: a parameter is NaN or Inf; earlier checkpoints stay.
        """
        job, state = self.job, self.state
        if job.saver is None:
            return
        self.wait_for_parameters()
        if name := find_nonfinite_parameter(job.stages):
            raise self.stop_error("a parameter is NaN or Inf", name)
        metadata = SaveMetadata(
            consumed_train_samples=state.consumed_samples,
            scheduler=job.schedule.state_dict(state.num_steps),
            args={**job.args, "iteration": state.iteration},
            objects=job.features.saved_objects(job.stored_tensors),
        )
        began = time.monotonic()
        job.log.flush()
        job.saver.finish()
        self.prune_checkpoints()  # before the next one needs the space
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
        """Remove checkpoints older than the newest `most_recent_k`."""
        job = self.job
        if job.folder is not None and job.settings.most_recent_k and self.groups.rank == 0:
            prune_checkpoints(job.folder, job.settings.most_recent_k)

    def wait_for_copy(self) -> None:
        """Wait until the last save no longer copies what is about to change."""
        if self.job.saver is not None:
            self.outcome.stall_seconds += self.job.saver.wait_for_copy()

    def wait_for_parameters(self) -> None:
        """Wait until all parameters have arrived from other replicas."""
        self.job.optimizer.wait_for_parameters()


def _make_schedule(job: TrainJob) -> PipelineSchedule:
    """The schedule of forward and backward passes."""
    plan, features = job.plan, job.features
    options: dict[str, Any] = {"num_microbatches": plan.num_microbatches}
    if job.stages[0].groups.pp.size > 1:
        options["overlap_p2p"] = job.settings.overlap.overlap_p2p_communication
    if job.settings.cuda_graph_impl == "none":
        return PipelineSchedule(
            job.stages,
            objective=features.objective,
            scale=job.optimizer.scale_loss,
            before_pass=job.optimizer.begin_pass,
            **options,
        )
    kind = GraphedSchedule if job.stages[0].groups.pp.size == 1 else GraphedPipeline
    return kind(
        job.stages,
        job.optimizer,
        shape=(plan.micro_batch_size, plan.seq_length),
        is_steady=lambda: features.is_steady,
        forget_passes=features.forget_passes,
        **options,
    )


def _peak_memory(device: torch.device) -> int:
    """The most bytes that were in use: of torch on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def patience_exhausted(evaluations: Sequence[tuple[int, float]], patience: int) -> bool:
    """Whether none of the last `patience` evaluations was better than all before them.

    A loss that is NaN is worse than any other.
    """
    if len(evaluations) <= patience:
        return False
    losses = [math.inf if math.isnan(loss) else loss for _, loss in evaluations]
    return min(losses[-patience:]) >= min(losses[:-patience])


@contextmanager
def _watch_signals() -> Iterator[Callable[[], signal.Signals | None]]:
    """Note the first SIGINT or SIGTERM; the step that is under way ends, and the run is saved.

    A second SIGINT or SIGTERM interrupts at once, as it does outside the block.
    """
    received: list[signal.Signals] = []

    def note(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number))
        _LOG.warning("interrupted: the run is saved after this step (again: stops at once)")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
