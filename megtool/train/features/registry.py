"""All training features of a run, as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

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
from megtool.train.features.distillation import DistillationFeature
from megtool.train.features.dropout import DropoutFeature
from megtool.train.features.eagle import EagleFeature
from megtool.train.features.fp8 import Fp8Feature
from megtool.train.features.lora import LoraFeature
from megtool.train.features.moe_load_balancing import MoeLoadBalancingFeature
from megtool.train.features.mtp import MtpFeature
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.features.qat import QatFeature
from megtool.train.features.te_modules import TeFeature
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

FEATURES: tuple[type[TrainingFeature], ...] = (
    Fp8Feature,
    LoraFeature,
    EagleFeature,
    QatFeature,
    DistillationFeature,
    TeFeature,
    MtpFeature,
    MoeLoadBalancingFeature,
    DropoutFeature,
)
"""All features, in the order they change a model and surround its passes.

Dropout comes last: it seeds the generator that passes draw from.
"""


def check_features(settings: TrainConfig, source: CheckpointSource) -> None:
    """Call `TrainingFeature.check` of all features."""
    for feature in FEATURES:
        feature.check(settings, source)


def estimate_feature_memory(
    settings: TrainConfig,
    source: CheckpointSource,
    layout: ParallelConfig,
    dtype: str,
    device: str,
) -> dict[str, int]:
    """Call `TrainingFeature.estimate_memory` of all features."""
    out: dict[str, int] = {}
    for feature in FEATURES:
        out |= feature.estimate_memory(settings, source, layout, dtype, device)
    return out


def add_feature_parameters(settings: TrainConfig, stages: Sequence[Decoder]) -> None:
    """Call `TrainingFeature.add_parameters` of all features."""
    for feature in FEATURES:
        feature.add_parameters(settings, stages)


def is_model_frozen(settings: TrainConfig) -> bool:
    """Whether a feature alone is trained, and the model's own weights are not."""
    return any(feature.freezes_model(settings) for feature in FEATURES)


def feature_identity(settings: TrainConfig) -> dict[str, Any]:
    """Call `TrainingFeature.identity` of all features."""
    out: dict[str, Any] = {}
    for feature in FEATURES:
        out |= feature.identity(settings)
    return out


@dataclass(frozen=True, slots=True)
class TrainingFeatures:
    """The features of a run, in the order of `FEATURES`; every method calls all of them."""

    features: tuple[TrainingFeature, ...] = ()

    @classmethod
    def prepare(
        cls,
        settings: TrainConfig,
        stages: Sequence[Decoder],
        inputs: FeatureInputs | None = None,
    ) -> TrainingFeatures:
        """Change the stages as options ask, before their optimizer is made.

        Raises:
            MegtoolError: see `TrainingFeature.prepare`.
        """
        inputs = FeatureInputs() if inputs is None else inputs
        prepared = [feature.prepare(settings, stages, inputs) for feature in FEATURES]
        return cls(tuple(feature for feature in prepared if feature is not None))

    @property
    def changes_parameters(self) -> bool:
        """See `TrainingFeature`."""
        return any(feature.changes_parameters for feature in self.features)

    @property
    def saves_optimizer(self) -> bool:
        """See `TrainingFeature`."""
        return all(feature.saves_optimizer for feature in self.features)

    @property
    def objective(self) -> Objective | None:
        """The loss of the first feature that has one."""
        losses = (feature.objective for feature in self.features)
        return next((loss for loss in losses if loss is not None), None)

    @property
    def evaluation_loss(self) -> EvaluationLoss | None:
        """The loss of the first feature that has one."""
        losses = (feature.evaluation_loss for feature in self.features)
        return next((loss for loss in losses if loss is not None), None)

    @property
    def quantizers(self) -> QuantizerState | None:
        """Those of the first feature that has some."""
        states = (feature.quantizers for feature in self.features)
        return next((state for state in states if state is not None), None)

    @property
    def is_steady(self) -> bool:
        """See `TrainingFeature.is_steady`."""
        return all(feature.is_steady for feature in self.features)

    @contextmanager
    def around_passes(
        self, iteration: int, batch: Batch | None, *, is_repeated: bool = False
    ) -> Iterator[None]:
        """See `TrainingFeature.around_passes`."""
        with ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(
                    feature.around_passes(iteration, batch, is_repeated=is_repeated)
                )
            yield

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """See `TrainingFeature.begin_step`."""
        for feature in self.features:
            feature.begin_step(labels_BS, loss_scale)

    def forget_passes(self) -> None:
        """See `TrainingFeature.forget_passes`."""
        for feature in self.features:
            feature.forget_passes()

    def end_step(self) -> dict[str, float]:
        """See `TrainingFeature.end_step`."""
        out: dict[str, float] = {}
        for feature in self.features:
            out |= feature.end_step()
        return out

    def end_evaluation(self) -> dict[str, float]:
        """See `TrainingFeature.end_evaluation`."""
        out: dict[str, float] = {}
        for feature in self.features:
            out |= feature.end_evaluation()
        return out

    def megatron_args(self) -> dict[str, Any]:
        """See `TrainingFeature.megatron_args`."""
        out: dict[str, Any] = {}
        for feature in self.features:
            out |= feature.megatron_args()
        return out

    def saved_objects(self, tensors: Sequence[GlobalTensor]) -> dict[str, bytes]:
        """See `TrainingFeature.saved_objects`."""
        out: dict[str, bytes] = {}
        for feature in self.features:
            out |= feature.saved_objects(tensors)
        return out

    def load_objects(self, catalogue: Catalogue) -> None:
        """See `TrainingFeature.load_objects`."""
        for feature in self.features:
            feature.load_objects(catalogue)

    def wrap_saver(self, saver: CheckpointSaver) -> CheckpointSaver:
        """See `TrainingFeature.wrap_saver`."""
        for feature in self.features:
            saver = feature.wrap_saver(saver)
        return saver

    def restore(self, checkpoint: Path, optimizer: Optimizer) -> TrainState | None:
        """The state of the first feature that restores one."""
        states = (feature.restore(checkpoint, optimizer) for feature in self.features)
        return next((state for state in states if state is not None), None)

    def load_states(self, checkpoint: Path) -> dict[tuple[str, str], Tensor]:
        """See `TrainingFeature.load_states`."""
        out: dict[tuple[str, str], Tensor] = {}
        for feature in self.features:
            out |= feature.load_states(checkpoint)
        return out

    def saved_paths(self, folder: Path, iteration: int | None) -> Mapping[str, str]:
        """See `TrainingFeature.saved_paths`; nothing where no iteration was saved."""
        out: dict[str, str] = {}
        if iteration is not None:
            for feature in self.features:
                out |= feature.saved_paths(folder, iteration)
        return out
