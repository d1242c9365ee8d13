"""Options of data parallelism: what replicas share out, and how gradients and parameters travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megtool.errors import UsageError
from megtool.options.field import Options, flag, option

DATA_PARALLEL = "Data parallelism"

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(Options):
    """How replicas work together, with Megatron's names."""

    data_parallel_sharding_strategy: ShardingStrategy | None = option(
        DATA_PARALLEL,
        "What is sharded over replicas. optim: optimizer state (ZeRO-1, the distributed "
        "optimizer); optim_grads: gradients as well (ZeRO-2); optim_grads_params: parameters as "
        "well (ZeRO-3). The last two are torch's FSDP2. Default: optim, if there are several "
        "replicas.",
    )
    use_distributed_optimizer: bool | None = option(
        DATA_PARALLEL, "The sharding strategy optim; with --no-: no_shard."
    )
    num_distributed_optimizer_instances: int = option(
        DATA_PARALLEL,
        "Shard over the replicas of each of so many groups, which have the same shards and sum "
        "their gradients (hierarchical communication, HSDP).",
        1,
        metavar="N",
        minimum=1,
    )
    overlap_grad_reduce: bool = option(
        DATA_PARALLEL, "Reduce gradients during the backward pass.", False
    )
    overlap_param_gather: bool = option(
        DATA_PARALLEL, "Gather parameters in forward passes.", False
    )
    ddp_bucket_size: int | None = option(
        DATA_PARALLEL, "Elements in a gradient bucket.", metavar="N", minimum=1
    )
    ddp_pad_buckets_for_high_nccl_busbw: bool = option(
        DATA_PARALLEL,
        "Pad gradient buckets to multiples of 65536 elements, for many GPUs.",
        False,
    )

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy that options name; None: optim, if there are several replicas."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        by_flag: dict[bool | None, ShardingStrategy | None]
        by_flag = {True: "optim", False: "no_shard", None: None}
        return by_flag[self.use_distributed_optimizer]

    @property
    def is_fully_sharded(self) -> bool:
        """Whether gradients are sharded, and parameters may be: by torch's FSDP2."""
        return self.sharding_strategy in ("optim_grads", "optim_grads_params")


UNSHARDED_OPTIONS = {
    "overlap_grad_reduce": "FSDP2 always reduces gradients during the backward pass",
    "overlap_param_gather": "FSDP2 always gathers parameters as passes need them",
    "ddp_bucket_size": "FSDP2 communicates a layer at a time, not a bucket",
    "ddp_pad_buckets_for_high_nccl_busbw": "FSDP2 has no buckets",
    "store_param_remainders": "sharded parameters are fp32 and their own master weights",
    "optimizer_cpu_offload": "state is sharded over replicas instead",
    "optimizer_offload_fraction": "state is sharded over replicas instead",
    "fp8_param_gather": "FSDP2 gathers parameters in the model's dtype",
    "qat": "QAT rounds whole weights in place, and a rank has a shard of them",
}
"""Options that parameters sharded by FSDP2 do not allow, and why."""


def check_data_parallel(s: Any) -> None:
    """Check the options of data parallelism of a `TrainConfig`.

    Raises:
        UsageError: they contradict each other, or have no effect.
    """
    strategy = s.data_parallel_sharding_strategy
    by_flag = {True: "optim", False: "no_shard", None: strategy}[s.use_distributed_optimizer]
    if strategy not in (None, by_flag):
        given = "--use" if s.use_distributed_optimizer else "--no-use"
        raise UsageError(
            f"{given}-distributed-optimizer and --data-parallel-sharding-strategy {strategy} "
            "exclude each other",
            hint="give one of them",
        )
    if s.num_distributed_optimizer_instances > 1 and s.sharding_strategy == "no_shard":
        raise UsageError(
            "--num-distributed-optimizer-instances has no effect without sharded optimizer state",
            hint="--data-parallel-sharding-strategy optim",
            error_id="option-without-effect",
        )
    if s.sharding_strategy == "no_shard":
        for name in ("overlap_param_gather", "fp8_param_gather"):
            if getattr(s, name):
                raise UsageError(f"{flag(name)} needs --use-distributed-optimizer")
    if not s.is_fully_sharded:
        return
    reasons = dict(UNSHARDED_OPTIONS)
    if s.fp8_recipe is not None and s.kernels == "te":
        reasons["kernels"] = "Transformer Engine keeps weights of its own for FP8"
    if s.cuda_graph_impl != "none":
        reasons["cuda_graph_impl"] = "a graph cannot gather parameters"
    for name, reason in reasons.items():
        if getattr(s, name):
            raise UsageError(
                f"{flag(name)} and --data-parallel-sharding-strategy {strategy} exclude each "
                f"other: {reason}",
                hint=f"without {flag(name)}, or --data-parallel-sharding-strategy optim",
            )
