"""Evaluation during training: the mean loss of the validation data over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.data.packing import IGNORED
from megtool.inference.collate import RowDataset, collate_rows, pad_rows
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import stream_hidden
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ProcessGroups

EvaluationLoss = Callable[[Decoder, Tensor, Batch, Tensor], tuple[Tensor, Tensor]]
"""A sum over tokens, and their number: of the last stage, its states x_TH, the batch, labels_BS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss in nats of `num_labels` tokens."""

    loss: float
    num_labels: int


@torch.no_grad()
def evaluate(
    stages: Sequence[Decoder],
    dataset: RowDataset,
    *,
    micro_batch_size: int,
    num_samples: int | None = None,
    loss_of: EvaluationLoss | None = None,
    on_samples: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Evaluate all samples of a data set once, or its first `num_samples`, split over replicas.

    `loss_of` stands for the decoder's own loss. `on_samples` is called with the number of further
    samples done. Every rank has to call this, and gets the same result.
    """
    groups = stages[0].groups
    total = len(dataset) if num_samples is None else min(len(dataset), num_samples)
    pending: list[tuple[Batch, Tensor]] = []

    def batches() -> Iterator[Batch]:
        # Every replica does as many passes: its tensor- and expert-parallel ranks wait for others.
        each = micro_batch_size
        for first in range(0, total, each * groups.dp.size):
            begin = first + groups.dp.rank * each
            num_rows = max(0, min(each, total - begin))
            rows = dataset.rows(begin, num_rows) if num_rows else dataset.rows(first, 1)
            if not num_rows:
                rows = replace(rows, labels_BS=rows.labels_BS * 0 + IGNORED)
            batch, batch_labels = collate_rows(pad_rows(rows, each), groups.device)
            pending.append((batch, batch_labels))
            on_samples(min(each * groups.dp.size, total - first))
            yield batch

    modes = [stage.training for stage in stages]
    for stage in stages:
        stage.eval()
    sums = [0.0, 0.0]
    for x_TH in stream_hidden(stages, batches()):
        batch, batch_labels = pending.pop(0)
        if x_TH is not None:
            if loss_of is None:
                loss, count = stages[-1].loss_of(x_TH, batch_labels)
            else:
                loss, count = loss_of(stages[-1], x_TH, batch, batch_labels)
            sums[0] += float(loss)
            sums[1] += float(count)
    for stage, mode in zip(stages, modes, strict=True):
        stage.train(mode)
    loss_sum, num = world_sum(sums, groups)
    return Evaluation(loss=loss_sum / max(num, 1.0), num_labels=int(num))


def world_sum(
    values: Sequence[float], groups: ProcessGroups, everywhere: Sequence[float] = ()
) -> list[float]:
    """Sum values of the last stages over replicas, and over context-parallel ranks.

    The result has the same bits on every rank, so that all make the same decisions. `everywhere`
    are summed over all ranks instead.
    """
    counts = groups.tp.is_first and groups.pp.is_last
    local = [*(values if counts else [0.0] * len(values)), *everywhere]
    sums = torch.tensor(local, dtype=torch.float64, device=groups.device)
    total: list[float] = all_sum(sums, groups.world).tolist()
    return total
