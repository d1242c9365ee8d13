"""Training of layers of multi-token prediction, beside the model or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import check_mtp_stage
from megtool.source.checkpoint import CheckpointSource
from megtool.train.evaluation import world_sum
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self


class MtpFeature(TrainingFeature):
    """Gives layers of multi-token prediction the weight of their loss, and logs it.

    With weight 0 they are frozen, and saved as they are. So are they where a feature alone is
    trained (LoRA).
    """

    def __init__(self, stages: Sequence[Decoder], factor: float) -> None:
        self.groups, self.factor = stages[0].groups, factor
        self.depths = stages[0].config.mtp.num_mtp_layers
        self.mtp = stages[-1].mtp
        if self.mtp is not None:
            self.mtp.loss_factor = factor

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check that stages have what the layers need.

        Raises:
            LayoutError: they are on another stage than the output layer.
        """
        check_mtp_stage(source.config, settings.layout)

    @classmethod
    def add_parameters(cls, settings: TrainConfig, stages: Sequence[Decoder]) -> None:
        """Freeze the layers if options leave them as they are."""
        for stage in stages:
            if stage.mtp is not None and not settings.losses.mtp_loss_scaling_factor:
                stage.mtp.requires_grad_(False)

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Give the layers their weight; None for a model without them."""
        if not stages[0].config.mtp.num_mtp_layers:
            return None
        cls.add_parameters(settings, stages)
        return cls(stages, settings.losses.mtp_loss_scaling_factor)

    def megatron_args(self) -> dict[str, Any]:
        """Megatron's arg of the weight, if it trains such layers."""
        return {"mtp_loss_scaling_factor": self.factor} if self.factor else {}

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """Reset the sums."""
        if self.mtp is not None:
            self.mtp.begin()

    def end_step(self) -> Mapping[str, float]:
        """The mean loss of each layer, in nats, as `mtp_1_loss`, `mtp_2_loss`, ..."""
        sums = [0.0] * (2 * self.depths)
        if self.mtp is not None:
            sums = [float(value) for pair in self.mtp.sums for value in pair]
        sums = world_sum(sums, self.groups)
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        return {f"mtp_{n}_loss": loss / num for n, (loss, num) in enumerate(pairs, 1) if num}
