"""LoRA training: adapters, saved in PEFT's format next to merged weights, and restored.

An iteration of a LoRA run is a checkpoint of the merged model; its folder `adapter/` holds the
adapter (`megtool.train.features.frozen_model`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megtool.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from megtool.convert.families.family import Family
from megtool.errors import UsageError
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.lora import (
    LoraSettings,
    adapters_of,
    add_adapters,
    check_experts,
    layers_for,
)
from megtool.model.stacks.pipeline import build_stages
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.checkpoint import CheckpointSource
from megtool.storage.files import Files
from megtool.train.checkpointing.safetensors_stream import write_safetensors
from megtool.train.features.adapter_tensors import AdapterViews
from megtool.train.features.frozen_model import FrozenModelFeature
from megtool.train.features.peft_format import PeftFormat
from megtool.train.features.protocol import FeatureInputs
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self

FOLDER = "adapter"


class LoraFeature(FrozenModelFeature):
    """The adapters on this rank's stages, whose own weights are frozen.

    `base` is the path of the model that the adapters belong to.

    Raises:
        UsageError: the model has no layers of a role.
        MappingError: its family has no place for the adapters.
    """

    folder = state_folder = called = FOLDER

    def __init__(
        self, stages: Sequence[Decoder], settings: LoraSettings, family: Family, base: str
    ) -> None:
        self.num_elements = add_adapters(stages, settings)
        super().__init__(stages, AdapterViews(stages))
        self.settings, self.base, self._family = settings, base, family
        self.config = stages[0].config
        PeftFormat(self.config, family, [n for s in stages for n, *_ in adapters_of(s)])

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check that the model can have the adapters.

        Raises:
            UsageError: its family is not known, or its experts cannot have such adapters.
            MappingError: its family has no place for them in PEFT's format.
        """
        if (lora := make_lora_settings(settings)) is None:
            return
        config = source.config
        check_experts(config, lora)
        family = _require_family(source)
        stages = build_stages(config.with_fields(num_mtp_layers=0), ProcessGroups.alone("meta"))
        PeftFormat(config, family, [name for s in stages for name, _ in layers_for(s, lora)])

    @classmethod
    def add_parameters(cls, settings: TrainConfig, stages: Sequence[Decoder]) -> None:
        """Add the adapters."""
        if (lora := make_lora_settings(settings)) is not None:
            add_adapters(stages, lora)

    @classmethod
    def freezes_model(cls, settings: TrainConfig) -> bool:
        """Adapters alone are trained."""
        return settings.lora.lora_rank is not None

    @classmethod
    def identity(cls, settings: TrainConfig) -> Mapping[str, Any]:
        """Rank, layers and scale of the adapters."""
        lora = make_lora_settings(settings)
        return {
            "lora_rank": settings.lora.lora_rank,
            "lora_target": None if lora is None else sorted(lora.roles),
            "lora_alpha": None if lora is None else lora.alpha,
        }

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Add the adapters, and freeze the model.

        Raises:
            UsageError: the model's family is not known.
        """
        if (lora := make_lora_settings(settings)) is None:
            return None
        family = _require_family(inputs.source)
        return cls(stages, lora, family, "" if inputs.source is None else str(inputs.source.path))

    def format_files(
        self, weights: Mapping[str, Tensor], spool: Path, files: Files
    ) -> dict[str, bytes | Path]:
        """The adapter in PEFT's format."""
        linears = {n.rpartition(".")[0] for n in weights if n.startswith("decoder.")}
        form = PeftFormat(self.config, self._family, sorted(linears))
        adapter = form.convert(weights, self.settings, self.base)
        tensors = adapter.tensors
        names = sorted(tensors)
        specs = [(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in names]
        write_safetensors(files, spool, specs, (tensors[n] for n in names), {"format": "pt"})
        return {WEIGHTS_FILE: spool, CONFIG_FILE: adapter.config_file}


def make_lora_settings(settings: TrainConfig) -> LoraSettings | None:
    """The adapters that options ask for; None if they do not.

    Raises:
        UsageError: there is no such role.
    """
    rank = settings.lora.lora_rank
    if rank is None:
        return None
    return LoraSettings(
        rank=rank,
        alpha=2.0 * rank if settings.lora.lora_alpha is None else settings.lora.lora_alpha,
        dropout=settings.lora.lora_dropout,
        roles=tuple(dict.fromkeys(role.strip() for role in settings.lora.lora_target.split(","))),
        seed=settings.seed,
    )


def _require_family(source: CheckpointSource | None) -> Family:
    """The family of the model, whose names PEFT's format needs.

    Raises:
        UsageError: it is not known.
    """
    model = None if source is None else source.model
    if model is None or model.family is None:
        raise UsageError(
            "LoRA of a model of unknown family, whose modules have no names in PEFT's format",
            hint="name the family with --family",
        )
    return model.family
