"""The plan of a run: steps, rows of a step and of each rank, learning rates, and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megtool.errors import LayoutError, UsageError
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from megtool.model.stacks.decoder import Decoder
    from megtool.optim.config import OptimizerConfig
    from megtool.optim.optimizer import Optimizer
    from megtool.optim.schedules import LRSchedule
    from megtool.options.layout import ParallelConfig
    from megtool.parallel.process_groups import ProcessGroups
    from megtool.spec.model_config import ModelConfig

_MOST_LENGTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The size of a run: `train_iters` steps of `global_batch_size` rows of `seq_length` tokens.

    Each of `replicas` does `num_microbatches` passes of `micro_batch_size` rows in a step. Where an
    encoder reads rows, each has a target of `target_length` tokens as well.
    """

    train_iters: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    replicas: int
    target_length: int = 0

    @property
    def num_microbatches(self) -> int:
        """Passes of a replica for each step."""
        return self.rows // self.micro_batch_size

    @property
    def rows(self) -> int:
        """Rows of a replica in each step."""
        return self.global_batch_size // self.replicas

    @property
    def tokens(self) -> int:
        """Tokens of a step, padding included."""
        return self.global_batch_size * (self.seq_length + self.target_length)

    @property
    def samples(self) -> int:
        """Rows of the whole run."""
        return self.train_iters * self.global_batch_size

    @property
    def loss_scale_unit(self) -> float:
        """The tokens of a pass, rounded up to a power of two.

        Losses are sums over tokens, while Megatron's are means: for the same effect, a loss scale
        is smaller by this factor; it is saved as Megatron's.
        """
        return 2.0 ** (self.micro_batch_size * self.seq_length - 1).bit_length()

    def make_lr_schedule(self, options: OptimizerConfig) -> LRSchedule:
        """Return the schedule of the learning rate and weight decay.

        Raises:
            UsageError: warm-up is longer than the decay, or values contradict each other.
        """
        from megtool.optim.schedules import LRSchedule

        return LRSchedule(
            options=options,
            train_iters=self.train_iters,
            global_batch_size=self.global_batch_size,
        )


def row_length(settings: TrainConfig, config: ModelConfig) -> int:
    """Tokens of a row, or, of a model with an encoder, of a source.

    Raises:
        UsageError: more than the model has positions, unless these are relative.
    """
    max_positions = config.positions.max_positions
    if settings.seq_length is None:
        return min(max_positions, _MOST_LENGTH)
    if settings.seq_length > max_positions and config.positions.position_embedding != "relative":
        raise UsageError(
            f"--seq-length {settings.seq_length} exceeds the model's {max_positions} positions",
            hint=f"at most {max_positions}",
        )
    return settings.seq_length


def plan_run(
    settings: TrainConfig,
    *,
    seq_length: int,
    num_samples: int,
    layout: ParallelConfig,
    target_length: int = 0,
) -> RunPlan:
    """Plan a run at a layout on data of so many samples.

    Raises:
        LayoutError: replicas and micro batches do not divide the global batch, or ranks the rows.
        UsageError: there is no sample.
    """
    if not num_samples:
        raise UsageError("the data has no sample", hint="does it contain anything to train on?")
    tp, cp, replicas = layout.tp, layout.cp, layout.dp
    if cp > 1:
        from megtool.parallel.context_parallel import chunk_size

        chunk_size(seq_length, cp)
    if settings.parallel.sequence_parallel:
        from megtool.model.stacks.decoder import rows_of_rank

        for length in (seq_length, target_length):
            rows_of_rank(settings.micro_batch_size * length // cp, tp, cp)
    micro, batch = settings.micro_batch_size, settings.global_batch_size
    rows_per_pass = micro * replicas
    if batch is None:
        batch = rows_per_pass * layout.pp
    if batch % rows_per_pass:
        below = batch // rows_per_pass * rows_per_pass
        fits = f"{below} or {below + rows_per_pass}" if below else str(rows_per_pass)
        raise LayoutError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x "
            f"dp={replicas}",
            hint=f"the nearest multiple: {fits}",
        )
    iters = settings.train_iters
    if iters is None:
        iters = max(1, math.ceil((settings.epochs or 1.0) * num_samples / batch))
    return RunPlan(
        train_iters=iters,
        seq_length=seq_length,
        micro_batch_size=micro,
        global_batch_size=batch,
        replicas=replicas,
        target_length=target_length,
    )


def freeze(stages: Sequence[Decoder], globs: Sequence[str]) -> int:
    """Freeze parameters; returns the number of their elements.

    Raises:
        UsageError: a pattern matches no parameter; with several pipeline stages this is not
            checked here, since it may match on another rank.
    """
    frozen, used = 0, set[str]()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if fits := [g for g in globs if fnmatchcase(name, g)]:
                used.update(fits)
                parameter.requires_grad_(False)
                frozen += parameter.numel()
    if stages[0].groups.pp.size == 1 and (idle := [g for g in globs if g not in used]):
        raise UsageError(
            f"--freeze {idle[0]!r} matches no parameter",
            hint="names are Megatron's, such as decoder.layers.0.mlp.linear_fc1.weight",
        )
    return frozen


def make_optimizer(
    stages: Sequence[Decoder], settings: TrainConfig, plan: RunPlan, groups: ProcessGroups
) -> Optimizer:
    """The optimizer of a rank's stages: by the sharding strategy, or distributed if there are
    replicas, else replicated.

    Raises:
        UsageError: options contradict each other, or nothing is left to train.
    """
    import torch

    from megtool.parallel.collectives import all_sum

    config, unit = settings.optimizer, plan.loss_scale_unit
    named = [(n, p) for stage in stages for n, p in stage.named_parameters()]
    is_trained = torch.tensor(float(any(p.requires_grad for _, p in named)), device=groups.device)
    if not float(all_sum(is_trained, groups.world)):
        raise UsageError("nothing is left to train", hint="--freeze less")
    from megtool.optim.distributed import DistributedOptimizer
    from megtool.optim.replicated import ReplicatedOptimizer

    if settings.sharding.is_fully_sharded:
        from megtool.model.stacks.fully_shard import sharded_modules
        from megtool.optim.fully_sharded import FullyShardedOptimizer

        return FullyShardedOptimizer(
            named, config, groups, modules=sharded_modules(stages), loss_scale_unit=unit
        )
    strategy, in_fp8 = settings.sharding.sharding_strategy, settings.fp8.fp8_param_gather
    if strategy is None:
        has_replicas = groups.replicas.size > 1 or groups.expert_dp.size > 1
        strategy = "optim" if has_replicas or in_fp8 else "no_shard"
    optimizer: DistributedOptimizer | ReplicatedOptimizer
    if strategy == "optim":
        optimizer = DistributedOptimizer(
            named,
            config,
            groups,
            chunks=list(stages),
            fp8_param_gather=in_fp8,
            loss_scale_unit=unit,
        )
    else:
        optimizer = ReplicatedOptimizer(named, config, groups, loss_scale_unit=unit)
    if not config.offload_fraction:
        return optimizer
    from megtool.optim.cpu_offload import HybridDeviceOptimizer

    return HybridDeviceOptimizer(optimizer)


def resolve_dtype(settings: TrainConfig, device: str) -> str:
    """The dtype that the model is trained in, on a type of device."""
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        if getattr(settings, name):
            return dtype
    return "float32" if device == "cpu" else "bfloat16"


def saves_in_background(settings: TrainConfig, plan: RunPlan, iteration: int) -> bool:
    """Whether a run that is at `iteration` saves while it trains: it waits for its last save."""
    interval = settings.save_interval
    if not settings.async_save or not interval:
        return False
    return (iteration // interval + 1) * interval < plan.train_iters
