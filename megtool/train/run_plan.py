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
    from megtool.optim.config import GroupRule, OptimizerConfig
    from megtool.optim.optimizer import Optimizer
    from megtool.optim.param_groups import ParamGroup
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


def row_length(settings: TrainConfig, config: ModelConfig) -> int:
    """Tokens of a row, or, of a model with an encoder, of a source.

    Raises:
        UsageError: more than the model has positions, unless these are relative.
    """
    max_positions = config.max_positions
    if settings.seq_length is None:
        return min(max_positions, _MOST_LENGTH)
    if settings.seq_length > max_positions and config.position_embedding != "relative":
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
    if settings.sequence_parallel:
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


def make_lr_schedule(settings: TrainConfig, plan: RunPlan) -> LRSchedule:
    """The schedule of the learning rate and weight decay, which counts samples as Megatron's does.

    Raises:
        UsageError: warm-up is longer than the decay.
    """
    from megtool.optim.schedules import LRSchedule

    batch = plan.global_batch_size
    decay = settings.lr_decay_iters or plan.train_iters
    warmup: float = settings.lr_warmup_iters or 0
    samples = warmup * batch
    if settings.lr_warmup_fraction is not None:
        warmup = settings.lr_warmup_fraction * decay
        samples = settings.lr_warmup_fraction * (decay * batch)  # not rounded, as Megatron's
    if warmup >= decay and warmup:
        raise UsageError(
            f"there are {warmup:g} warm-up steps, but the learning rate decays within {decay} "
            "steps",
            hint=f"at most --lr-warmup-iters {max(0, decay - 1)}, or a larger --lr-decay-iters",
        )
    weight_decay = settings.weight_decay
    start, end = settings.start_weight_decay, settings.end_weight_decay
    wsd = settings.lr_wsd_decay_iters
    return LRSchedule(
        kind=settings.lr_decay_style,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        init_lr=settings.lr_warmup_init,
        warmup_steps=samples,
        decay_steps=decay * batch,
        wsd_decay_steps=None if wsd is None else wsd * batch,
        wsd_decay_style=settings.lr_wsd_decay_style,
        start_wd=weight_decay if start is None else start,
        end_wd=weight_decay if end is None else end,
        wd_incr_style=settings.weight_decay_incr_style,
        wd_incr_steps=plan.samples,
    )


def rates_at(schedule: LRSchedule, num_steps: int) -> tuple[_Rate, float]:
    """The learning rate of each group, and the weight decay, after so many samples."""
    return _Rate(schedule, num_steps), schedule.weight_decay(num_steps)


@dataclass(frozen=True, slots=True)
class _Rate:
    schedule: LRSchedule
    num_steps: int

    def __call__(self, group: ParamGroup) -> float:
        return self.schedule.lr(self.num_steps, max_lr=group.max_lr, min_lr=group.min_lr)


def make_optimizer_config(settings: TrainConfig, plan: RunPlan) -> OptimizerConfig:
    """The optimizer's configuration.

    Losses are sums over tokens, while Megatron's are means. For the same effect, a loss scale is
    divided by the tokens of a pass, rounded up to a power of two; it is saved as Megatron's.

    Raises:
        UsageError: a value is out of its range, or a rule is malformed.
    """
    from megtool.optim.config import OptimizerConfig

    tokens = 2.0 ** (plan.micro_batch_size * plan.seq_length - 1).bit_length()
    constant = settings.loss_scale
    initial = settings.initial_loss_scale / tokens
    return OptimizerConfig(
        optimizer=settings.optimizer,
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        sgd_momentum=settings.sgd_momentum,
        muon_momentum=settings.muon_momentum,
        clip_grad=settings.clip_grad,
        count_zeros=settings.log_num_zeros_in_grad,
        loss_scale=None if constant is None else constant / tokens,
        initial_loss_scale=initial,
        min_loss_scale=min(initial, settings.min_loss_scale / tokens),
        loss_scale_window=settings.loss_scale_window,
        loss_scale_unit=tokens,
        hysteresis=settings.hysteresis,
        main_params="remainder" if settings.store_param_remainders else "float32",
        moments="bfloat16" if settings.exp_avg_dtype == "bf16" else "float32",
        offload_fraction=settings.optimizer_offload_fraction
        or float(settings.optimizer_cpu_offload),
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        reduce_in_fp32=settings.grad_reduce_in_bf16,
        fp8_param_gather=settings.fp8_param_gather,
        fuse_gradient_accumulation=settings.gradient_accumulation_fusion,
        bucket_size=settings.ddp_bucket_size,
        pad_buckets=settings.ddp_pad_buckets_for_high_nccl_busbw,
        rules=_parse_group_rules(settings),
    )


def _parse_group_rules(settings: TrainConfig) -> tuple[GroupRule, ...]:
    """The rules of `--lr-mult` and `--wd-mult`, merged by pattern."""
    from megtool.optim.config import GroupRule

    factors: dict[str, dict[str, float]] = {}
    for name in ("lr_mult", "wd_mult"):
        for text in getattr(settings, name):
            glob, _, number = text.rpartition("=")
            try:
                factors.setdefault(glob, {})[name] = float(number)
            except ValueError:
                glob = ""
            if not glob:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {text!r}",
                    hint="give PATTERN=NUMBER, such as '*.mlp.*=0.5'",
                )
    return tuple(GroupRule(glob, **values) for glob, values in factors.items())


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

    config = make_optimizer_config(settings, plan)
    named = [(n, p) for stage in stages for n, p in stage.named_parameters()]
    is_trained = torch.tensor(float(any(p.requires_grad for _, p in named)), device=groups.device)
    if not float(all_sum(is_trained, groups.world)):
        raise UsageError("nothing is left to train", hint="--freeze less")
    from megtool.optim.distributed import DistributedOptimizer
    from megtool.optim.replicated import ReplicatedOptimizer

    if settings.is_fully_sharded:
        from megtool.model.stacks.fully_shard import sharded_modules
        from megtool.optim.fully_sharded import FullyShardedOptimizer

        return FullyShardedOptimizer(named, config, groups, modules=sharded_modules(stages))
    strategy = settings.sharding_strategy
    if strategy is None:
        has_replicas = groups.replicas.size > 1 or groups.expert_dp.size > 1
        strategy = "optim" if has_replicas or config.fp8_param_gather else "no_shard"
    optimizer = (
        DistributedOptimizer(named, config, groups, chunks=list(stages))
        if strategy == "optim"
        else ReplicatedOptimizer(named, config, groups)
    )
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
