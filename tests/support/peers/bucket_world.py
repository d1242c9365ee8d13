"""Where real megatron-core puts parameters of given sizes in its buckets, and who updates them.

    python bucket_world.py CASES-AS-JSON

A case is `{numels, shared, bucket_size, dp, busbw}`; for each, one line of JSON comes back. Ranks
but the first exist in name alone: nothing is communicated.
"""

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trained_world import pretend_cuda


def laid_out(case: dict[str, Any], group: Any) -> dict[str, Any]:
    """Slots and bucket sizes of one case."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    params = []
    for numel, shared in zip(case["numels"], case["shared"], strict=True):
        p = torch.nn.Parameter(torch.zeros(numel))
        if shared:
            p.shared_embedding = True  # type: ignore[attr-defined]
        params.append(p)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=case.get("busbw", False)
    )
    names = {p: str(i) for i, p in enumerate(params)}
    listed, layout = params, {}
    if "param_layout" in inspect.signature(_ParamAndGradBuffer).parameters:
        # Of 0.19 the optimizer says where parameters lie, not the buffer.
        listed = list(names.items())
        layout["param_layout"] = DistributedOptimizer._compute_per_buffer_param_layout(
            params, case["bucket_size"], group.size(), config
        )
    buffer = _ParamAndGradBuffer(
        config,
        torch.float32,
        torch.float32,
        listed,
        group,
        case["bucket_size"],
        names,
        1.0,
        list(range(len(params))),
        False,
        pg_collection=SimpleNamespace(tp=group, dp_cp=group),
        **layout,
    )
    slots = []
    for p in params:
        start, end, bucket = buffer.param_index_map[p]
        slots.append([bucket, start - buffer.buckets[bucket].offset, end - start])
    return {
        "shards": [shards_of_rank(buffer, params, rank) for rank in range(case["dp"])],
        "slots": slots,
        "unpadded": [b.numel_unpadded for b in buffer.buckets],
        "padded": [b.grad_data.numel() for b in buffer.buckets],
    }


def shards_of_rank(buffer: Any, params: list[Any], rank: int) -> list[list[list[int]]]:
    """By bucket: number, first and last element of each parameter that a rank updates, and where
    it lies in the rank's shard."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    size = buffer.data_parallel_world_size
    buffer.data_parallel_group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    (by_bucket,) = DistributedOptimizer._build_gbuf_range_map(buffer).values()
    number = {p: i for i, p in enumerate(params)}
    return [
        [
            [number[p], r["param"].start, r["param"].end, r["gbuf_local"].start]
            for p, r in found["param_map"].items()
        ]
        for found in by_bucket
    ]


def main() -> None:
    cases = json.loads(sys.argv[1])
    pretend_cuda()
    most = max(case["dp"] for case in cases)
    dist.init_process_group("fake", rank=0, world_size=most, store=FakeStore())
    groups = {n: dist.new_group(range(n)) for n in sorted({case["dp"] for case in cases})}
    for case in cases:
        print(json.dumps(laid_out(case, groups[case["dp"]])))


if __name__ == "__main__":
    main()
