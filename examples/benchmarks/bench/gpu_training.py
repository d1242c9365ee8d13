"""On a GPU: steps of training by megtool, eager and graphed, and by transformers' Trainer."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bench import megatron
from bench.gpu import decoder, fill, race, theirs
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.optim.config import OptimizerConfig
from megtool.optim.cpu_offload import HybridDeviceOptimizer
from megtool.optim.distributed import DistributedOptimizer
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.cuda_graph import GraphedSchedule

LR, DECAY, CLIP = 1e-5, 0.1, 1.0


def optimizer_of(model: Decoder, **how: Any) -> DistributedOptimizer | HybridDeviceOptimizer:
    """Megtool's, for one process."""
    settings = OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=CLIP, **how)
    named = model.named_parameters()
    made = DistributedOptimizer(named, settings, ProcessGroups.alone("cuda"), chunks=[model])
    return HybridDeviceOptimizer(made) if settings.offload_fraction else made


def our_step(
    model: Decoder,
    optimizer: DistributedOptimizer | HybridDeviceOptimizer,
    tokens: Tensor,
    *,
    graphed: bool = False,
) -> Callable[[], object]:
    """A step of training on the same tokens; with `graphed`, there and back is a CUDA graph."""
    batch = Batch(tokens_BS=tokens[:, :-1].contiguous())
    labels = tokens[:, 1:].contiguous()
    passes = (
        GraphedSchedule([model], optimizer, num_microbatches=1, shape=batch.shape)
        if graphed
        else PipelineSchedule(model, num_microbatches=1)
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        optimizer.begin(1)
        loss, count = passes.step(batch, labels)
        optimizer.finish(count)
        optimizer.step(LR, DECAY)
        return loss / count

    return step


def ours(name: str, tokens: Tensor, given: argparse.Namespace, *, graphed: bool = False) -> float:
    """Median seconds of a step of megtool."""
    model = decoder(name)
    work = our_step(model, optimizer_of(model), tokens, graphed=graphed)
    return race({"megtool": work}, given)["megtool"]


def megatron_core(
    name: str, tokens: Tensor, given: argparse.Namespace, *, te: bool = False
) -> float:
    """Median seconds of a step of megatron-core, by its own modules or Transformer Engine's."""
    megatron.start()
    config, made = megatron.model(name, te=te, dtype=torch.bfloat16)
    fill(made)
    work = megatron.step_of(config, made, tokens, lr=LR, weight_decay=DECAY, clip_grad=CLIP)
    return race({"megatron-core": work}, given)["megatron-core"]


def trainer(
    name: str,
    tokens: Tensor,
    given: argparse.Namespace,
    *,
    liger: bool = False,
    compiled: bool = False,
) -> float:
    """Median seconds of a step by transformers' Trainer, without the first ones."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    rows = [{"input_ids": row[:-1].cpu(), "labels": row[:-1].cpu()} for row in tokens]
    num_steps = 10 + given.rounds * given.calls
    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """When steps end."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """One is over."""
            torch.cuda.synchronize()
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            max_steps=num_steps,
            learning_rate=LR,
            weight_decay=DECAY,
            max_grad_norm=CLIP,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            bf16=False,  # parameters are bfloat16 already, and so are its moments: less than ours
            torch_compile=compiled,
            use_liger_kernel=liger,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=theirs(name), args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    gaps = [b - a for a, b in pairwise(marks[9:])]
    return statistics.median(gaps)
