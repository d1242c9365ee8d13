"""Transformer Engine's modules in training without FP8, and a word on what it computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megtool.model.stacks.decoder import Decoder
from megtool.source.checkpoint import CheckpointSource
from megtool.train.features.module_precision import choose_precisions
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.features.te_layers import (
    TeChoice,
    build_te_modules,
    choose_te_modules,
    describe_te_choices,
    excluded_kinds,
    in_bf16,
    remove_te_modules,
)
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self

_LOG = logging.getLogger(__name__)


class TeFeature(TrainingFeature):
    """Layers by Transformer Engine's modules, in the model's own dtype.

    With FP8 they are those of `Fp8Feature` already. It comes after all features that change how a
    layer multiplies, which such a layer then keeps.

    Raises:
        MissingPackageError: Transformer Engine cannot be loaded.
    """

    def __init__(self, stages: Sequence[Decoder], choices: Sequence[TeChoice]) -> None:
        self._stages, self.choices = stages, choices
        build_te_modules(stages, choices, lambda name: 1)

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Put the modules into their layers, and log which layers have which."""
        if settings.kernels != "te":
            return None
        choices = choose_for_run(settings, stages, inputs.source)
        if stages[0].groups.rank == 0:
            for layers, module in describe_te_run(settings, choices).items():
                _LOG.info("--kernels te: %s: %s", layers, module)
        return cls(stages, choices) if settings.fp8.fp8_recipe is None else None

    def remove(self) -> None:
        """Restore the layers."""
        remove_te_modules(self._stages)


def describe_te_run(settings: TrainConfig, choices: Sequence[TeChoice]) -> dict[str, str]:
    """What computes layers, attention and the optimizer's step of a run with `--kernels te`."""
    optimizers = {
        "adam": "FusedAdam",
        "muon": "FusedAdam, and own kernels for what Muon updates",
        "sgd": "own kernels (--optimizer sgd)",
    }
    optimizer = optimizers[settings.optimizer.optimizer]
    if settings.optimizer.optimizer_cpu_offload and settings.optimizer.optimizer != "sgd":
        optimizer += "; torch's kernel for state on the CPU"
    return describe_te_choices(choices) | {"optimizer": optimizer}


def choose_for_run(
    settings: TrainConfig, stages: Sequence[Decoder], source: CheckpointSource | None
) -> list[TeChoice]:
    """The choices of a run with `--kernels te` for stages, which may be without memory; empty for
    an encoder and a decoder, which have our own kernels."""
    if stages[0].config.num_decoder_layers:
        return []
    excluded = excluded_kinds(settings)
    if settings.fp8.fp8_recipe is None:
        return choose_te_modules(stages, excluded=excluded)
    precisions = choose_precisions(settings, source) if source is not None else None
    of = in_bf16 if precisions is None else precisions.of
    return choose_te_modules(stages, of, excluded, has_fp8=True)
