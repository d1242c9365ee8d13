"""Errors for NaN and Inf in training, which name the first tensor that has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megtool.errors import TrainingError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import microbatches, stream_hidden
from megtool.optim.fp8.weights import weight_values
from megtool.parallel.process_groups import ProcessGroups
from megtool.tensors.dtensor_shards import local_shard


@torch.no_grad()
def find_nonfinite_tensor(
    stages: Sequence[Decoder], batch: Batch, labels_BS: Tensor, num_microbatches: int = 1
) -> str | None:
    """The first tensor with a NaN or Inf: a parameter, else the output of a module.

    It runs the batch forward again, in as many micro batches as the step, so every rank has to call
    it. Of several ranks the first in the order of pipeline stages counts. None if all are finite.
    """
    name = _parameter(stages)
    if all(x is None for x in _all_gather_names(name, stages[0].groups)):
        name = _activation(stages, batch, labels_BS, num_microbatches)
    return _first_of_ranks(name, stages[0].groups)


@torch.no_grad()
def find_nonfinite_parameter(stages: Sequence[Decoder]) -> str | None:
    """The first parameter with a NaN or Inf on any rank; every rank has to call this."""
    return _first_of_ranks(_parameter(stages), stages[0].groups)


def _first_of_ranks(local_name: str | None, groups: ProcessGroups) -> str | None:
    """The name given by the first rank in the order of pipeline stages, on every rank."""
    named = [
        f"{name} (rank {rank})" if groups.world.size > 1 else name
        for rank, name in sorted(
            enumerate(_all_gather_names(local_name, groups)), key=lambda x: _stage_of(x[0], groups)
        )
        if name is not None
    ]
    return named[0] if named else None


def nonfinite_error(
    problem: str, tensor: str | None, *, iteration: int, last_saved: int | None
) -> TrainingError:
    """The error that ends a run, with the problem, the tensor, and the last good checkpoint."""
    remaining = (
        f"the run resumes from iteration {last_saved}, the last good checkpoint"
        if last_saved
        else "there is no checkpoint yet"
    )
    return TrainingError(
        f"step {iteration}: {problem}",
        tensor=tensor,
        hint="repeating the command gives the same error: a lower --lr, more --lr-warmup-iters or "
        f"--clip-grad may help; {remaining}; `megtool inspect SRC --stats` looks for NaN in the "
        "initial weights",
        error_id="nan-loss",
    )


def _parameter(stages: Sequence[Decoder]) -> str | None:
    for stage in stages:
        for name, p in stage.named_parameters():
            if not bool(torch.isfinite(local_shard(weight_values(p))).all()):
                return name
    return None


def _activation(
    stages: Sequence[Decoder], batch: Batch, labels_BS: Tensor, number: int
) -> str | None:
    """The first module whose output is not finite, in the order modules finish."""
    names: list[str] = []
    handles = []
    for stage in stages:
        for name, module in stage.named_modules():
            if name:
                handles.append(module.register_forward_hook(_record_nonfinite(name, names)))
    try:
        rows = stream_hidden(list(stages), microbatches(batch, number))
        for x_TH, labels in zip(rows, labels_BS.chunk(number), strict=True):
            if x_TH is not None and not names:
                loss, _ = stages[-1].loss_of(x_TH, labels)
                if not bool(torch.isfinite(loss)):
                    names.append("the loss of the output layer")
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else None


def _record_nonfinite(name: str, names: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not names and isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
            names.append(f"output of {name}")

    return hook


def _all_gather_names(name: str | None, groups: ProcessGroups) -> list[str | None]:
    if groups.world.handle is None:
        return [name]
    out: list[str | None] = [None] * groups.world.size
    dist.all_gather_object(out, name, group=groups.world.handle)
    return out


def _stage_of(rank: int, groups: ProcessGroups) -> tuple[int, int]:
    """Pipeline stage and rank: Megatron's order has the stages outermost."""
    each = max(1, groups.world.size // groups.pp.size)
    return rank // each, rank
