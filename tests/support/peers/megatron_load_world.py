"""Real megatron-core begins to train from a checkpoint that megtool, or core itself, loads.

    python megatron_load_world.py OPTIONS-AS-JSON

Every layout of `runs`, `[layout, how, folder]`, builds the model, loads `folder` (`how`: `megtool`,
`installed`, or `core`), and takes two steps of SGD. Rank 0 prints the losses of each run as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import megatron_world
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from megatron_world import VOCAB, build, sharded
from trained_world import pretend_cuda

LENGTH, BATCH = 8, 2


def main() -> None:
    options = json.loads(sys.argv[1])
    run_ranks(work, options["world"], options, method="spawn")


def work(rank: int, options: dict[str, Any]) -> None:
    """One process: every run in turn."""
    pretend_cuda()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    results = []
    for layout, how, folder in options["runs"]:
        parallel_state.initialize_model_parallel(
            layout.get("tp", 1),
            layout.get("pp", 1),
            layout.get("vpp"),
            expert_model_parallel_size=layout.get("ep", 1),
        )
        chunks = build(layout, options)
        read(chunks, how, folder, options)
        results.append(train(chunks, layout))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    if rank == options["world"] - 1:
        print("losses", json.dumps(results))
    dist.destroy_process_group()


def read(chunks: list[Any], how: str, folder: str, options: dict[str, Any]) -> None:
    """Load the weights alone."""
    from megatron.core import dist_checkpointing

    import megtool

    state = sharded(chunks)
    if how == "megtool":
        out = megtool.megatron.load(state, folder, **options.get("known", {}))
    elif how == "installed":
        with megtool.megatron.install(**options.get("known", {})):
            if not dist_checkpointing.check_is_distributed_checkpoint(folder):
                raise AssertionError(folder)
            if "args" not in dist_checkpointing.load_common_state_dict(folder):
                raise AssertionError("no args")
            out = dist_checkpointing.load(state, folder)
    else:
        out = dist_checkpointing.load(state, folder, strict="log_unexpected")
    for number, c in enumerate(chunks):
        c.load_state_dict(out["model" if len(chunks) == 1 else f"model{number}"])


def train(chunks: list[Any], layout: dict[str, Any]) -> list[float]:
    """The losses before and after a step, on the last pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]

    def forward(_: Any, model: Any) -> Any:
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

        def loss(values: torch.Tensor) -> Any:
            return values.float().mean(), {"loss": values.detach().float().mean()}

        return output, loss

    run = get_forward_backward_func()
    losses = []
    for _ in range(2):
        for c in chunks:
            c.eval().zero_grad()  # without dropout
        found = run(
            forward_step_func=forward,
            data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        losses += [float(x["loss"]) for x in found]
        with torch.no_grad():
            for c in chunks:
                for p in c.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return []
    return losses


if __name__ == "__main__":
    with contextlib.suppress(KeyError):
        megatron_world.ACTIONS.clear()
    main()
