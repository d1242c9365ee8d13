"""Runs for tests of saving: a few steps of training on any layout, and what a save folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megtool.dtypes import dtype
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.fully_shard import FullyShard, sharded_modules
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.fully_sharded import FullyShardedOptimizer
from megtool.optim.optimizer import Optimizer
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_source
from megtool.train.checkpointing.megatron_template import make_save_template
from megtool.train.checkpointing.protocol import SaveMetadata
from megtool.train.checkpointing.resume import ResumedRun, resume
from megtool.train.checkpointing.save import TorchDistSaver
from megtool.train.model.build import load_for_training

ROWS, LENGTH = 4, 8


class Trained:
    """A model loaded for training from a folder, its optimizer, and the saver of another folder."""

    def __init__(
        self,
        source: Path,
        layout: dict[str, int] | None = None,
        *,
        kind: str = "float32",
        plain: bool = False,
        settings: dict[str, Any] | None = None,
        groups: ProcessGroups | None = None,
        sequence_parallel: bool = False,
        is_fully_sharded: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        self.groups = groups or ProcessGroups.start(ParallelConfig(**(layout or {})))
        self.opened: CheckpointSource = open_source(source)
        assert self.opened.model is not None
        self.source = self.opened
        self.kind = dtype(kind)
        place = (
            FullyShard(groups=self.groups, reshard_after_forward=True)
            if is_fully_sharded
            else self.groups
        )
        self.stages: list[Decoder] = load_for_training(
            self.source, place, dtype=kind, threads=1, sequence_parallel=sequence_parallel
        )
        named = [(n, p) for stage in self.stages for n, p in stage.named_parameters()]
        how = OptimizerConfig(**(settings or {}))
        self.optimizer: Optimizer
        if is_fully_sharded:
            modules = sharded_modules(self.stages)
            self.optimizer = FullyShardedOptimizer(named, how, self.groups, modules=modules)
        elif plain:
            self.optimizer = ReplicatedOptimizer(named, how, self.groups)
        else:
            self.optimizer = DistributedOptimizer(named, how, self.groups, chunks=self.stages)
        self.num_steps = 0

    def resume(self) -> ResumedRun:
        return resume(self.source, self.stages, self.optimizer, threads=1)

    def step(self, lr: float = 1e-2) -> None:
        """One step on random tokens that depend on the step's number alone."""
        generator = torch.Generator().manual_seed(self.num_steps)
        tokens = torch.randint(0, 37, (ROWS, LENGTH), generator=generator)
        replicas = self.groups.dp
        tokens = tokens.chunk(replicas.size)[replicas.rank]
        labels = tokens.roll(-1, 1)
        micro = 2 if self.groups.pp.size > 1 else 1
        schedule = PipelineSchedule(self.stages, num_microbatches=micro)
        self.optimizer.zero_grad()
        self.optimizer.begin(micro)
        schedule.step(Batch(tokens_BS=tokens), labels)
        self.optimizer.finish(torch.tensor(float(ROWS * LENGTH)))
        assert self.optimizer.step(lr, 0.1).ok
        self.num_steps += 1

    def saver(self, folder: Path, kind: str = "fully_reshardable", **how: Any) -> TorchDistSaver:
        template = make_save_template(
            self.opened,
            self.groups.parallel,
            self.kind,
            bucket_size=self.optimizer.bucket_size,
            grad_dtype="float32" if self.optimizer.sums_in_fp32 else self.kind.name,
        )
        return TorchDistSaver(
            folder, template, self.groups, optimizer_format=kind, fsync=False, **how
        )

    def save(self, saver: TorchDistSaver, iteration: int, **how: Any) -> float:
        extras = SaveMetadata(
            consumed_train_samples=ROWS * iteration,
            scheduler={"max_lr": 1e-2, "num_steps": ROWS * iteration},
        )
        return saver.save(iteration, self.stages, self.optimizer, extras, **how)

    def state(self) -> dict[str, Tensor]:
        """Copies of all that this process holds."""
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.wait_for_parameters()
        out = {
            n: p.detach().clone() for stage in self.stages for n, p in stage.state_dict().items()
        }
        for piece in self.optimizer.pieces():
            out[f"{piece.state}:{piece.parameter}:{piece.start}"] = piece.tensor.clone()
        return out
