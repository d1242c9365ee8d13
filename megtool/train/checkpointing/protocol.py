"""The protocol of savers, the metadata of a save, and the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megtool.model.stacks.decoder import Decoder
from megtool.storage.files import Files

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The progress of a run: steps done, samples of the data used, and steps of the schedule, which
    counts samples, without those of skipped steps."""

    iteration: int = 0
    consumed_samples: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMetadata:
    """The state of a run when it is saved, apart from weights and optimizer; a resumed run reads
    it.

    `scheduler` is the state of the learning rate's schedule, with Megatron's keys. `args` are
    fields of Megatron's args that the run knows better than the checkpoint it began with (`lr`,
    `train_iters`, ...). `files` are small files that go into the iteration's folder, by their path
    in it, or larger ones on the same file system, which are moved there. Of these three, rank 0's
    are written. `objects` are ready items by name that only this rank has
    (`..._extra_state/shard_1_4`); all ranks' are written. `random` says whether the random state is
    saved.
    """

    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    floating_point_operations: float = 0.0
    scheduler: Mapping[str, Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    objects: Mapping[str, bytes] = field(default_factory=dict)
    random: bool = True


class CheckpointSaver(Protocol):
    """What saves iterations; see `megtool.train.checkpointing.save.TorchDistSaver`."""

    @property
    def folder(self) -> Path:
        """The save folder."""

    @property
    def files(self) -> Files:
        """The access to its file system."""

    def prepare(
        self, stages: Sequence[Decoder], optimizer: Optimizer | None, *, asynchronous: bool = True
    ) -> None:
        """Plan all saves, and take the memory for host copies."""

    def save(
        self,
        iteration: int,
        stages: Sequence[Decoder],
        optimizer: Optimizer | None,
        metadata: SaveMetadata,
        *,
        asynchronous: bool = False,
        copy_behind: bool = False,
    ) -> float:
        """Save an iteration; returns the seconds that training waited."""

    def wait_for_copy(self) -> float:
        """Wait until the state may change; returns the seconds it took."""

    def check(self) -> None:
        """Raise an error of the background thread, if there was one."""

    def finish(self) -> None:
        """Wait until no save is under way."""
