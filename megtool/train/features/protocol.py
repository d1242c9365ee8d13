"""The protocol of training features: what changes how a model is trained, as the loop sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megtool.console import Progress, silent
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import Objective
from megtool.options.layout import ParallelConfig
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.train.checkpointing.protocol import CheckpointSaver, TrainState
from megtool.train.checkpointing.quantizer_state import QuantizerState
from megtool.train.evaluation import EvaluationLoss
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self

    from megtool.optim.optimizer import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureInputs:
    """What features may need in addition to options: the checkpoint that the run was started with,
    that its weights were loaded from (None: the same one), and how many micro batches each step
    has. `source` is None in a run of a model alone."""

    source: CheckpointSource | None = None
    weights: CheckpointSource | None = None
    num_microbatches: int = 1
    progress: Progress = silent


class TrainingFeature:
    """A feature of a run: LoRA, QAT, FP8, ... Each overrides the methods it needs.

    Class methods take options (and the headers of `source`) alone, before weights are loaded.
    `prepare` makes the feature of a run from the loaded stages of this rank, before their optimizer
    is made. Every rank calls every method at the same time.

    `changes_parameters`: parameters have other values during passes, so all of them have to be
    there, and no copy of them may be under way. `saves_optimizer`: the checkpoint itself holds the
    optimizer's state; otherwise the feature saves and restores it.
    """

    changes_parameters: bool = False
    saves_optimizer: bool = True

    # ---- before weights are loaded

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Refuse what options and headers alone forbid.

        Raises:
            MegtoolError: the model, the layout or a file that an option names does not fit.
        """

    @classmethod
    def estimate_memory(
        cls,
        settings: TrainConfig,
        source: CheckpointSource,
        layout: ParallelConfig,
        dtype: str,
        device: str,
    ) -> Mapping[str, int]:
        """Bytes of a rank in addition to those of the model, by the field of the plan they are in.

        Raises:
            UsageError: the device or the dtype cannot do it.
        """
        return {}

    @classmethod
    def add_parameters(cls, settings: TrainConfig, stages: Sequence[Decoder]) -> None:
        """Add the feature's own parameters to stages, which may be without memory."""

    @classmethod
    def freezes_model(cls, settings: TrainConfig) -> bool:
        """Whether the model's own weights are not trained: every start reads them from SRC."""
        return False

    @classmethod
    def identity(cls, settings: TrainConfig) -> Mapping[str, Any]:
        """Options that must be the same when a run is resumed, as plain data.

        Raises:
            StorageError: a file among them cannot be read.
        """
        return {}

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Change the stages as options ask; None if they ask for nothing.

        Raises:
            MegtoolError: the model does not allow it, or an input cannot be read.
        """
        raise NotImplementedError

    # ---- steps

    @property
    def objective(self) -> Objective | None:
        """The loss that replaces the decoder's own; None keeps that."""
        return None

    @property
    def evaluation_loss(self) -> EvaluationLoss | None:
        """The loss that evaluations measure instead of the decoder's own; None keeps that."""
        return None

    @property
    def is_steady(self) -> bool:
        """Whether every further pass does the same operations, so that a graph can repeat them."""
        return True

    def around_passes(
        self, iteration: int, batch: Batch | None, *, is_repeated: bool = False
    ) -> AbstractContextManager[None]:
        """Surround the passes of a step, or of an evaluation (`batch` None).

        `is_repeated`: passes of the same step are repeated, to find what was not finite in them.
        """
        return nullcontext()

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """Prepare for the passes of a step."""

    def forget_passes(self) -> None:
        """Forget what the passes of this step have counted: they ran to be captured as a graph."""

    def end_step(self) -> Mapping[str, float]:
        """Finish a step of the optimizer; returns what the log adds to its line."""
        return {}

    def end_evaluation(self) -> Mapping[str, float]:
        """Finish an evaluation; returns what the log adds to its line."""
        return {}

    # ---- checkpoints

    @property
    def quantizers(self) -> QuantizerState | None:
        """ModelOpt's quantizers, which checkpoints of the run have; None if they have none."""
        return None

    def megatron_args(self) -> Mapping[str, Any]:
        """Fields of Megatron's args that describe the feature."""
        return {}

    def saved_objects(self, tensors: Sequence[GlobalTensor]) -> Mapping[str, bytes]:
        """Objects that this rank adds to a checkpoint that stores `tensors`."""
        return {}

    def load_objects(self, catalogue: Catalogue) -> int:
        """Take from a checkpoint what `saved_objects` put there; returns how many there were.

        Raises:
            CheckpointError: an object is damaged, or of another model.
        """
        return 0

    def wrap_saver(self, saver: CheckpointSaver) -> CheckpointSaver:
        """A saver that saves the feature's own files as well."""
        return saver

    def restore(self, checkpoint: Path, optimizer: Optimizer) -> TrainState | None:
        """Restore what the feature saved by itself, and the optimizer; None if that is nothing.

        Raises:
            CheckpointError: it is missing, or of another run.
        """
        return None

    def load_states(self, checkpoint: Path) -> Mapping[tuple[str, str], Tensor]:
        """Load the feature's own parameters, which it saved by itself; returns their states, flat,
        by state and parameter, as the optimizer asks for them.

        Raises:
            CheckpointError: they are missing, or of another run.
        """
        return {}

    def saved_paths(self, folder: Path, iteration: int) -> Mapping[str, str]:
        """Paths of what the feature saved in an iteration, by the field of the report."""
        return {}
