"""Real DeepSpeed trains a tiny Llama on CPU ranks and saves it with ZeRO.

`python deepspeed_world.py RANKS STAGE DTYPE FOLDER`
"""

from __future__ import annotations

import os
import sys

import torch.multiprocessing as mp


def _run(rank: int, ranks: int, stage: int, dtype: str, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_SIZE=str(ranks),
        CROSS_RANK="0",
        CROSS_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ.get("MASTER_PORT", "29733"),
        DS_ACCELERATOR="cpu",
    )
    import deepspeed
    import torch

    from tests.support.peers.fsdp_world import tiny_model

    deepspeed.comm.torch.build_shm_op = lambda: None  # compiles for minutes
    deepspeed.init_distributed("gloo")
    model = tiny_model(0)
    flat = [p for p in model.parameters() if p.ndim == 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 3000,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bfloat16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        ids = torch.randint(0, 33, (1, 8), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder)
    if rank == 0:
        model.config.save_pretrained(folder)


if __name__ == "__main__":
    ranks, stage, dtype, folder = sys.argv[1:]
    mp.start_processes(
        _run, (int(ranks), int(stage), dtype, folder), nprocs=int(ranks), start_method="spawn"
    )
