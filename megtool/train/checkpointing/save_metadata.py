"""Extras: what a run keeps beside weights and optimizer, as Megatron's common state has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMetadata:
    """Where a run stands when it is saved, and what a resumed one goes on from.

    `scheduler` is the state of the learning rate's schedule, with Megatron's keys. `args` are
    fields of Megatron's args that the run knows better than the checkpoint it began with (`lr`,
    `train_iters`, ...). `files` are small files that go into the iteration's folder, by their path
    in it, or larger ones that lie on its file system and are moved there; of these three, rank 0's
    are written. `objects` are ready items by name that this rank
    alone has (`..._extra_state/shard_1_4`); all ranks' are written. `random` says whether the
    random state is kept.
    """

    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations: float = 0.0
    scheduler: Mapping[str, Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    objects: Mapping[str, bytes] = field(default_factory=dict)
    random: bool = True
