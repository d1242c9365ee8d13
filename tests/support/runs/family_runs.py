"""Steps of a family's tiny model on random tokens, whatever shares out its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megtool.model.batch import Batch
from megtool.model.stacks.fully_shard import FullyShard
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.model.stacks.recompute import recompute
from megtool.options.config_file import build_options
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_decoder
from megtool.train.model.build import load_for_training
from megtool.train.options.config import TrainConfig
from megtool.train.run_plan import make_optimizer, plan_run

ROWS, LENGTH = 2, 16


def family_steps(folder: Path, strategy: Any, steps: int = 3) -> list[float]:
    """Losses and norms of a model trained in bfloat16, its layers computed twice, on this rank."""
    groups = ProcessGroups.start(ParallelConfig())
    source = open_decoder(folder, encoders=True, two_stacks=True)
    how = {"global_batch_size": ROWS * groups.dp.size, "bf16": True, "lr": 1e-3}
    settings = build_options(TrainConfig, {"data_parallel_sharding_strategy": strategy, **how})
    place = (
        FullyShard(groups=groups, reshard_after_forward=True)
        if settings.sharding.is_fully_sharded
        else groups
    )
    stages = load_for_training(source, place, dtype="bfloat16", threads=1)
    recompute(stages, "full")
    plan = plan_run(settings, seq_length=LENGTH, num_samples=8, layout=groups.parallel)
    optimizer = make_optimizer(stages, settings, plan, groups)
    schedule = PipelineSchedule(stages, num_microbatches=2)
    generator = torch.Generator().manual_seed(groups.dp.rank)
    out: list[float] = []
    for _ in range(steps):
        tokens, labels, texts = (
            torch.randint(
                0, source.config.embedding.vocab_size, (ROWS, LENGTH), generator=generator
            )
            for _ in range(3)
        )
        batch = Batch(
            tokens_BS=tokens, source_BE=texts if source.config.num_decoder_layers else None
        )
        optimizer.zero_grad()
        optimizer.begin(2)
        loss, _ = schedule.step(batch, labels)
        optimizer.finish(torch.tensor(float(labels.numel() * groups.dp.size)))
        out += [float(loss), optimizer.step(1e-3, 0.01).grad_norm]
    groups.stop()
    return out
