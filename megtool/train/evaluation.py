"""Evaluation during training: the mean loss of held-out samples, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megtool.data.packing import IGNORED
from megtool.model.batch import Batch
from megtool.model.decoder import Decoder
from megtool.model.pipeline import stream_hidden
from megtool.parallel.collectives import all_sum
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.collate import Feed, batch_of, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss in nats of `num_labels` tokens."""

    loss: float
    num_labels: int


@torch.no_grad()
def evaluate(
    stages: Sequence[Decoder],
    feed: Feed,
    *,
    micro_batch_size: int,
    num_samples: int | None = None,
    counted: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Every sample of the feed once, or its first `num_samples`, shared out over the replicas.

    `counted` is told how many samples more are done. Every rank has to call this, and gets the
    same.
    """
    groups = stages[0].groups
    total = len(feed) if num_samples is None else min(len(feed), num_samples)
    labels: list[Tensor] = []

    def batches() -> Iterator[Batch]:
        # As many passes on every replica: their tensor-parallel and expert ranks wait for another.
        each = micro_batch_size
        for first in range(0, total, each * groups.dp.size):
            begin = first + groups.dp.rank * each
            have = max(0, min(each, total - begin))
            rows = feed.rows(begin, have) if have else feed.rows(first, 1)
            if not have:
                rows = replace(rows, labels_BS=rows.labels_BS * 0 + IGNORED)
            batch, wanted = batch_of(padded(rows, each), groups.device)
            labels.append(wanted)
            counted(min(each * groups.dp.size, total - first))
            yield batch

    modes = [stage.training for stage in stages]
    for stage in stages:
        stage.eval()
    sums = [0.0, 0.0]
    for x_TH in stream_hidden(stages, batches()):
        wanted = labels.pop(0)
        if x_TH is not None:
            loss, count = stages[-1].loss_of(x_TH, wanted)
            sums[0] += float(loss)
            sums[1] += float(count)
    for stage, mode in zip(stages, modes, strict=True):
        stage.train(mode)
    loss_sum, num = world_sum(sums, groups)
    return Evaluation(loss=loss_sum / max(num, 1.0), num_labels=int(num))


def world_sum(
    values: Sequence[float], groups: ProcessGroups, everywhere: Sequence[float] = ()
) -> list[float]:
    """Sums over replicas of what the last stages have: each replica counts once, and so does each
    of the ranks that share its rows (context parallelism).

    The same bits on every rank, so that all of them decide alike. `everywhere` are added up over
    all ranks instead.
    """
    counts = groups.tp.is_first and groups.pp.is_last
    own = [*(values if counts else [0.0] * len(values)), *everywhere]
    sums = torch.tensor(own, dtype=torch.float64, device=groups.device)
    total: list[float] = all_sum(sums, groups.world).tolist()
    return total
