"""Real megatron-core trains a small GPT on a CPU and saves every few steps, as its loop does.

    python audited_world.py train OPTIONS-AS-JSON

Options: `folder`, `steps`, `every`, `kind` (how optimizer state is saved), `dtype`, `optimizer`,
`experts`, `frozen` (a part of the names of parameters that are not trained), `idle` (experts that
get no tokens), `lr`, `layout` and `world`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import megatron_world
import torch
import torch.distributed as dist
import trained_world
from gloo_ranks import run_ranks
from megatron_world import VOCAB, build, sharded

SEQUENCE, BATCH, DECAY_STEPS = 16, 2, 200


def main() -> None:
    options = json.loads(sys.argv[2])
    run_ranks(work, options.get("world", 1), options)


def work(rank: int, options: dict[str, Any]) -> None:
    """One process of a run."""
    world = options.get("world", 1)
    torch.set_num_threads(1)
    trained_world.pretend_cuda()
    from megatron.core import parallel_state

    options = {"layout": {}, "world": world, "dropout": 0.0, **options}
    layout = options["layout"]
    parallel_state.initialize_model_parallel(
        layout.get("tp", 1), layout.get("pp", 1), expert_model_parallel_size=layout.get("ep", 1)
    )
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_utils

    # Dropout is off, so nothing is drawn from what a GPU would have.
    parallel_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # 0.16 does not define it without Transformer Engine
    torch.manual_seed(3)
    chunks = build(layout, options)
    train(rank, chunks, options)
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, chunks: list[Any], options: dict[str, Any]) -> None:
    """Train on random tokens that repeat a pattern, and save."""
    (model,) = chunks
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.05)
            p.requires_grad_(not options.get("frozen") or options["frozen"] not in name)
    wrapped, optimizer, scheduler = make_optimizer(model, options)
    optimizer.reload_model_params()
    generator = torch.Generator().manual_seed(11 + rank)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    samples, has_state = 0, False
    for iteration in range(1, options["steps"] + 1):
        tokens = torch.randint(0, VOCAB // 2, (BATCH, 4), generator=generator).repeat(1, 5)
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = wrapped(tokens[:, :SEQUENCE], positions, mask, labels=tokens[:, 1 : SEQUENCE + 1])
        optimizer.scale_loss(losses.float().mean()).backward()
        for name, p in model.named_parameters():
            if any(f"experts.{e}." in name for e in options.get("idle", ())):
                p.main_grad.zero_()
        wrapped.finish_grad_sync()
        is_done = optimizer.step()[0]
        samples += BATCH * dist.get_world_size()
        if is_done:
            scheduler.step(increment=BATCH * dist.get_world_size())
        has_state = has_state or is_done
        if iteration % options["every"] == 0 and has_state:
            save(rank, chunks, optimizer, scheduler, iteration, samples, options)


def make_optimizer(model: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The model wrapped for data parallelism, its optimizer and its scheduler."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    is_distributed = options.get("distributed", True)
    trained_world.keep_step(DistributedOptimizer)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=is_distributed,
        grad_reduce_in_fp32=True,
        bucket_size=options.get("bucket_size"),
        overlap_grad_reduce=False,
    )
    wrapped = DistributedDataParallel(model.config, ddp, model)
    kind = getattr(torch, options.get("dtype", "float32"))
    config = OptimizerConfig(
        optimizer=options.get("optimizer", "adam"),
        lr=options.get("lr", 1e-3),
        min_lr=0.0,
        weight_decay=options.get("weight_decay", 0.01),
        bf16=kind is torch.bfloat16,
        fp16=kind is torch.float16,
        params_dtype=kind,
        initial_loss_scale=options.get("loss_scale", 2.0**20),
        min_loss_scale=1.0,
        hysteresis=1,
        use_distributed_optimizer=is_distributed,
        clip_grad=1.0,
        adam_beta2=options.get("beta2", 0.999),
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.get("lr", 1e-3),
        min_lr=0.0,
        lr_warmup_steps=options.get("warmup", 4),
        lr_decay_steps=DECAY_STEPS,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=DECAY_STEPS,
        wd_incr_style="constant",
    )
    return wrapped, optimizer, scheduler


def save(
    rank: int,
    chunks: list[Any],
    optimizer: Any,
    scheduler: Any,
    iteration: int,
    samples: int,
    options: dict[str, Any],
) -> None:
    """Save as Megatron's training loop does: model, optimizer, scheduler and args."""
    from megatron.core import dist_checkpointing

    folder = Path(options["folder"])
    into = folder / f"iter_{iteration:07d}"
    if rank == 0:
        into.mkdir(parents=True)
    dist.barrier()
    args = argparse.Namespace(
        **vars(trained_world.arguments(options)),
        consumed_train_samples=samples,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    kind = getattr(torch, options.get("dtype", "float32"))
    args.bf16, args.fp16, args.params_dtype = kind is torch.bfloat16, kind is torch.float16, kind
    common = {
        "iteration": iteration,
        "args": args,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": scheduler.state_dict(),
    }
    sharding = options.get("kind", "fully_reshardable")
    if sharding == "legacy":
        trained_world.save_ranks(
            chunks, optimizer, into / trained_world.rank_folder(options), common, options
        )
    else:
        metadata: dict[str, Any] = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        if options.get("distributed", True):
            metadata["distrib_optim_sharding_type"] = sharding
        state = sharded(chunks)
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(metadata))
        dist_checkpointing.save({**state, **common}, str(into), content_metadata=metadata)
    dist.barrier()
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


if __name__ == "__main__":
    megatron_world.ACTIONS.clear()
    main()
