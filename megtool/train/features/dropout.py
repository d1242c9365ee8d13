"""Dropout of a run: the same elements are dropped again when a step is repeated or resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from megtool.model.batch import Batch
from megtool.model.layers.dropout import Dropout
from megtool.model.stacks.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self


class DropoutFeature(TrainingFeature):
    """Seeds torch's generator before the passes of each step, from the step's number alone.

    Ranks that have other rows or layers drop other elements.
    """

    def __init__(self, seed: int, groups: ProcessGroups) -> None:
        self.seed = seed
        self._rank_key = f"{groups.replicas.rank} {groups.pp.rank}"

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Set the stages' dropout rates."""
        hidden, attention = settings.hidden_dropout, settings.attention_dropout
        for stage in stages:
            stage.dropout = Dropout(hidden=hidden, attention=attention)
        if not (hidden or attention or settings.lora.lora_dropout):
            return None
        return cls(settings.seed, stages[0].groups)

    @contextmanager
    def around_passes(
        self, iteration: int, batch: Batch | None, *, is_repeated: bool = False
    ) -> Iterator[None]:
        """Seed the generator, unless it is an evaluation."""
        if batch is not None:
            text = f"{self.seed} {iteration} {self._rank_key}"
            digest = hashlib.sha256(text.encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
        yield
