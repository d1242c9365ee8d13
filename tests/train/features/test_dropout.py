"""The seed of dropout: from the run's seed, the step and the rank, and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megtool.model.batch import Batch
from megtool.parallel.process_groups import Group, ProcessGroups
from megtool.train.features.dropout import DropoutFeature

ALONE = ProcessGroups.alone()
SECOND = replace(ALONE, pp=Group(ranks=(0, 1), rank=1))
BATCH = Batch(tokens_BS=torch.zeros(1, 2, dtype=torch.int64))


def draw(seed: int, iteration: int, groups: ProcessGroups = ALONE) -> Tensor:
    torch.rand(3)  # whatever was drawn before
    with DropoutFeature(seed, groups).around_passes(iteration, BATCH):
        return torch.rand(4)


def test_masks_are_those_of_the_step_and_the_rank() -> None:
    want = draw(1, 5)
    assert torch.equal(draw(1, 5), want)
    for other in (draw(1, 6), draw(2, 5), draw(1, 5, SECOND)):
        assert not torch.equal(other, want)


def test_an_evaluation_draws_on() -> None:
    torch.manual_seed(0)
    want = torch.rand(4)
    torch.manual_seed(0)
    with DropoutFeature(1, ALONE).around_passes(5, None):
        assert torch.equal(torch.rand(4), want)
