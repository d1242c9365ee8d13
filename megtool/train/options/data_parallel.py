"""Options of data parallelism: what replicas share out, and how gradients and parameters travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megtool.optim.config import DATA_PARALLEL, shares_out_state
from megtool.options.effects import excludes
from megtool.options.field import OptionCondition, Options, option

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
FULLY_SHARDED = ("optim_grads", "optim_grads_params")
"""The strategies of torch's FSDP2."""

_EXCLUDED_BY_FSDP2 = excludes(
    {
        "overlap_grad_reduce": "FSDP2 always reduces gradients during the backward pass",
        "overlap_param_gather": "FSDP2 always gathers parameters as passes need them",
        "ddp_bucket_size": "FSDP2 communicates a layer at a time, not a bucket",
        "ddp_pad_buckets_for_high_nccl_busbw": "FSDP2 has no buckets",
        "store_param_remainders": "sharded parameters are fp32 and their own master weights",
        "optimizer_cpu_offload": "state is sharded over replicas instead",
        "optimizer_offload_fraction": "state is sharded over replicas instead",
        "fp8_param_gather": "FSDP2 gathers parameters in the model's dtype",
        "qat": "QAT rounds whole weights in place, and a rank has a shard of them",
        "cuda_graph_impl": "a graph cannot gather parameters",
    },
    *FULLY_SHARDED,
)
_NOT_FP8_BY_TE = OptionCondition(
    holds=lambda options, facts: options.fp8_recipe is None or options.kernels != "te",
    reason="and --kernels te with --fp8-recipe exclude each other: Transformer Engine keeps "
    "weights of its own for FP8",
    hint="leave out one of them",
    values=FULLY_SHARDED,
    is_conflict=True,
)
_IS_THE_STRATEGY = OptionCondition(
    holds=lambda options, facts: (
        options.data_parallel_sharding_strategy
        in (None, "optim" if options.use_distributed_optimizer else "no_shard")
    ),
    reason="and --data-parallel-sharding-strategy exclude each other",
    hint="give one of them",
    is_conflict=True,
)
_IS_SHARDED = OptionCondition(
    holds=shares_out_state,
    reason="{has} no effect without sharded optimizer state",
    hint="--data-parallel-sharding-strategy optim",
)


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(Options):
    """How replicas work together, with Megatron's names."""

    data_parallel_sharding_strategy: ShardingStrategy | None = option(
        DATA_PARALLEL,
        "What is sharded over replicas. optim: optimizer state (ZeRO-1, the distributed "
        "optimizer); optim_grads: gradients as well (ZeRO-2); optim_grads_params: parameters as "
        "well (ZeRO-3). The last two are torch's FSDP2. Default: optim, if there are several "
        "replicas.",
        needs=(*_EXCLUDED_BY_FSDP2, _NOT_FP8_BY_TE),
    )
    use_distributed_optimizer: bool | None = option(
        DATA_PARALLEL,
        "The sharding strategy optim; with --no-: no_shard.",
        needs=(_IS_THE_STRATEGY,),
    )
    num_distributed_optimizer_instances: int = option(
        DATA_PARALLEL,
        "Shard over the replicas of each of so many groups, which have the same shards and sum "
        "their gradients (hierarchical communication, HSDP).",
        1,
        metavar="N",
        minimum=1,
        needs=(_IS_SHARDED,),
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
        return self.sharding_strategy in FULLY_SHARDED
