"""Megatron-LM's own `load_checkpoint` and `save_checkpoint` in a world of gloo processes.

    python megatron_lm_world.py OPTIONS-AS-JSON

A folder with `megatron.core` and `megatron.training` is on PYTHONPATH: a checkout of Megatron-LM,
or a wheel of megatron-core 0.19. Every run of `runs` has a `layout`, the `words` of a command line
and what is done: `save` trains for two steps and saves, `load` loads; both dump what is in memory
then if they are told to. With `install` megtool is installed for the run. What each rank found is
printed as JSON, a line for each run and rank.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from gloo_ranks import run_ranks
from megatron_world import FFN, GROUPS, HEADS, HIDDEN, LAYERS, VOCAB, build, fill, sharded
from trained_world import pretend_cuda, step, with_optimizer
from trained_world import save as dump

SEED = 7


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    run_ranks(work, options["world"], options, method="spawn")


def work(rank: int, options: dict[str, Any]) -> None:
    """One process: every run in turn."""
    pretend_cuda()
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_: None
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    if not hasattr(typing, "override"):  # which the wheel takes from Python 3.12
        typing.override = typing_extensions.override
    import megtool

    for run in options["runs"]:
        installed = megtool.megatron.install() if run.get("install") else None
        found = {"save": save, "load": load}[run["do"]](rank, options["world"], run)
        dist.barrier()
        line = "found " + json.dumps({"run": run["name"], "rank": rank, **found}) + "\n"
        os.write(1, line.encode())  # in one piece, beside the other ranks
        if installed is not None:
            installed.undo()
    dist.destroy_process_group()


def begin(world: int, run: dict[str, Any]) -> tuple[Any, list[Any], Any, Any, Any]:
    """Args, model, its wrapper, optimizer and scheduler, as Megatron-LM's training script has."""
    from megatron.core import num_microbatches_calculator as batches
    from megatron.core import parallel_state
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training import checkpointing, global_vars
    from megatron.training.arguments import parse_args, validate_args

    layout = run["layout"]
    sys.argv = ["pretrain_gpt.py", *words(layout, run)]
    args = parse_args()
    if args.use_checkpoint_args:
        checkpointing.load_args_from_checkpoint(args)
    validate_args(args, {})
    args.vocab_size = args.padded_vocab_size = VOCAB
    global_vars._GLOBAL_ARGS = args
    batches.unset_num_microbatches_calculator()
    batches.init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.get("tp", 1), layout.get("pp", 1), layout.get("vpp")
    )
    torch.manual_seed(SEED)
    chunks = build(layout, {"dtype": "bfloat16"})
    wrapped, optimizer = with_optimizer(chunks, {})
    for group in optimizer.param_groups:
        group |= {"max_lr": args.lr, "min_lr": args.min_lr}
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return args, chunks, wrapped, optimizer, scheduler


def words(layout: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """The command line."""
    options: dict[str, Any] = {
        "num-layers": LAYERS,
        "hidden-size": HIDDEN,
        "ffn-hidden-size": FFN,
        "num-attention-heads": HEADS,
        "num-query-groups": GROUPS,
        "seq-length": 16,
        "max-position-embeddings": 16,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "make-vocab-size-divisible-by": 8,
        "micro-batch-size": 1,
        "global-batch-size": 4,
        "train-iters": 20,
        "save-interval": 7,
        "eval-iters": 1,
        "eval-interval": 20,
        "lr": 1e-2,
        "min-lr": 1e-3,
        "tensor-model-parallel-size": layout.get("tp", 1),
        "pipeline-model-parallel-size": layout.get("pp", 1),
        "distributed-backend": "gloo",
        "transformer-impl": "local",
    }
    flags = ["group-query-attention", "swiglu", "disable-bias-linear", "bf16"]
    flags += ["use-distributed-optimizer", "untie-embeddings-and-output-weights"]
    flags += [
        "no-persist-layer-norm",
        "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion",
    ]
    out = [w for k, v in options.items() for w in (f"--{k}", str(v))]
    return [*out, *(f"--{f}" for f in flags), *run.get("words", [])]


def save(rank: int, world: int, run: dict[str, Any]) -> dict[str, Any]:
    """Train for two steps and save, as a training loop does at iteration 7."""
    from megatron.training import checkpointing

    args, chunks, wrapped, optimizer, scheduler = begin(world, run)
    fill(sharded(chunks))
    optimizer.reload_model_params()
    step(wrapped, optimizer)
    scheduler.step(28)
    args.consumed_train_samples = 28
    torch.manual_seed(100 + rank)
    torch.rand(3)
    checkpointing.save_checkpoint(7, wrapped, optimizer, scheduler, 12345)
    out = describe(args, optimizer, scheduler)
    dump_to(rank, world, chunks, optimizer, run)
    return out


def load(rank: int, world: int, run: dict[str, Any]) -> dict[str, Any]:
    """What Megatron-LM's `load_checkpoint` returns and leaves in the objects that it was given."""
    from megatron.training import checkpointing

    args, chunks, wrapped, optimizer, scheduler = begin(world, run)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        one._init_optimizer_states_with_dummy_values()
    try:
        iteration, flops = checkpointing.load_checkpoint(wrapped, optimizer, scheduler)
    except Exception as e:
        if not run.get("fails"):
            raise
        return {"error": type(e).__name__, "text": str(e)}
    out = describe(args, optimizer, scheduler) | {"iteration": iteration, "flops": flops}
    dump_to(rank, world, chunks, optimizer, run)
    return out


def describe(args: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """What is in memory beside tensors."""
    return {
        "samples": args.consumed_train_samples,
        "scheduler": scheduler.num_steps,
        "rate": optimizer.param_groups[0]["lr"],
        "random": torch.rand(2).tolist(),
        "layers": args.num_layers,
    }


def dump_to(rank: int, world: int, chunks: list[Any], optimizer: Any, run: dict[str, Any]) -> None:
    """Save what is in memory by core alone."""
    if "dump" in run:
        options = {"layout": run["layout"], "world": world}
        dump(rank, chunks, optimizer, "fully_reshardable", Path(run["dump"]), options)


if __name__ == "__main__":
    main()
