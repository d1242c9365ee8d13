"""Trouble: a loss or a gradient that is no finite number, and the first tensor that is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.errors import TrainingError
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.pipeline import microbatches, stream_hidden
from megtool.parallel.process_groups import ProcessGroups


@torch.no_grad()
def first_not_finite(
    stages: Sequence[Decoder], batch: Batch, labels_BS: Tensor, num_microbatches: int = 1
) -> str | None:
    """The first tensor with a NaN or an infinity: a parameter, else what a module gives.

    Runs the batch forward again, in as many parts as the step did, so every rank has to call this;
    with several it is the first of the first rank in the order of the stages that has one. None if
    all are numbers.
    """
    found = _parameter(stages)
    if all(x is None for x in _gathered(found, stages[0].groups)):
        found = _activation(stages, batch, labels_BS, num_microbatches)
    return _first(found, stages[0].groups)


@torch.no_grad()
def parameter_not_finite(stages: Sequence[Decoder]) -> str | None:
    """The first parameter with a NaN or an infinity, of all ranks; every rank has to call this."""
    return _first(_parameter(stages), stages[0].groups)


def _first(found: str | None, groups: ProcessGroups) -> str | None:
    """What the first rank in the order of the stages has found, the same on every rank."""
    named = [
        f"{name} (rank {rank})" if groups.world.size > 1 else name
        for rank, name in sorted(
            enumerate(_gathered(found, groups)), key=lambda x: _stage_of(x[0], groups)
        )
        if name is not None
    ]
    return named[0] if named else None


def stop(what: str, first: str | None, *, iteration: int, good: int | None) -> TrainingError:
    """The error that ends a run: `what` went wrong in a step, and which checkpoint is left."""
    left = (
        f"iteration {good} is the last good checkpoint, which it goes on from"
        if good
        else "there is no checkpoint yet"
    )
    return TrainingError(
        f"step {iteration}: {what}",
        tensor=first,
        hint="the same command meets the same again: a lower --lr, more --lr-warmup-iters or "
        f"--clip-grad may help; {left}; `megtool inspect SRC --stats` looks for NaN in what it "
        "began with",
    )


def _parameter(stages: Sequence[Decoder]) -> str | None:
    for stage in stages:
        for name, p in stage.named_parameters():
            if not bool(torch.isfinite(p).all()):
                return name
    return None


def _activation(
    stages: Sequence[Decoder], batch: Batch, labels_BS: Tensor, number: int
) -> str | None:
    """The first module whose output is not finite, in the order in which modules finish."""
    found: list[str] = []
    handles = []
    for stage in stages:
        for name, module in stage.named_modules():
            if name:
                handles.append(module.register_forward_hook(_watch(name, found)))
    try:
        rows = stream_hidden(list(stages), microbatches(batch, number))
        for x_TH, labels in zip(rows, labels_BS.chunk(number), strict=True):
            if x_TH is not None and not found:
                loss, _ = stages[-1].loss_of(x_TH, labels)
                if not bool(torch.isfinite(loss)):
                    found.append("the loss of the output layer")
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _watch(name: str, found: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            found.append(f"output of {name}")

    return hook


def _gathered(name: str | None, groups: ProcessGroups) -> list[str | None]:
    if groups.world.handle is None:
        return [name]
    out: list[str | None] = [None] * groups.world.size
    dist.all_gather_object(out, name, group=groups.world.handle)
    return out


def _stage_of(rank: int, groups: ProcessGroups) -> tuple[int, int]:
    """Pipeline stage and rank: Megatron's order has the stages outermost."""
    each = max(1, groups.world.size // groups.pp.size)
    return rank // each, rank
