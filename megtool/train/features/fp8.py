"""Training in FP8: linear layers computed in FP8, and their scaling state in checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megtool.checkpoint.catalogue import Catalogue
from megtool.checkpoint.containers.te_extra_state import (
    EXTRA_VARIABLES,
    NUM_GEMMS,
    ExtraState,
    decode,
    make_delayed_recipe,
    resize_history,
    to_tree,
)
from megtool.checkpoint.containers.zip_writer import encode_object
from megtool.checkpoint.megatron_metadata import read_object
from megtool.config import ParallelConfig
from megtool.convert.megatron import split_state
from megtool.errors import MappingError, UsageError
from megtool.kernels.dispatch import chosen
from megtool.kernels.te_linear import check_sides
from megtool.model.decoder import Decoder
from megtool.model.linear import ColumnLinear, RowLinear
from megtool.model.mla import DownLinear
from megtool.model.moe import ExpertLinear
from megtool.model.pipeline import build_stages
from megtool.model_config import ModelConfig
from megtool.number_formats.delayed_scaling import ScalingRule
from megtool.optim.fp8.amax_history import AmaxHistories
from megtool.optim.fp8.config import Fp8Config
from megtool.optim.fp8.fp8_param_gather import mark_for_gather
from megtool.optim.fp8.linear import fp8_product, require_products
from megtool.optim.fp8.scaling import Fp8Scaling, make_scalings
from megtool.optim.fp8.transformer_engine import (
    TeAmaxHistories,
    TeTraining,
    require_recipe,
    required_multiple,
)
from megtool.parallel.process_groups import ProcessGroups
from megtool.reshard.source import CheckpointSource
from megtool.train.config import TrainConfig
from megtool.train.features.protocol import FeatureInputs, TrainingFeature

if TYPE_CHECKING:
    from typing import Self

_LOG = logging.getLogger(__name__)

_STATE = re.compile(r"(.+)\._extra_state/shard_(\d+)_(\d+)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.+)")


@dataclass(frozen=True, slots=True)
class _Member:
    """A linear layer that is computed in FP8, by its module's name."""

    name: str
    module: ColumnLinear | RowLinear


class Fp8Feature(TrainingFeature):
    """FP8 in the stages of this rank; every rank calls its methods at the same time.

    It covers all dense linear layers between embedding and output layer, except in the first and
    last layers that `settings` exclude. Experts, routers, latent down projections, attention and
    the output layer are not in FP8. `describe` says so in a sentence. Only delayed scaling has
    state. Inside `kernels.dispatch.use("te")` Transformer Engine's modules and recipes compute
    these layers, and end a step of delayed scaling with every pass.

    Raises:
        MissingPackageError: Transformer Engine is needed and cannot be loaded.
        UsageError: the device has no FP8, the model is in fp16, no layer is left, or the recipe
            does not go with Transformer Engine, or only with it.
    """

    def __init__(
        self, stages: Sequence[Decoder], settings: Fp8Config, groups: ProcessGroups
    ) -> None:
        require_products(groups.device)
        first = stages[0]
        if first.dtype == torch.float16:
            raise _fp16_error()
        self.settings, self.groups = settings, groups
        self.param_gather = False
        self.num_layers = first.config.num_layers
        self._fp8_layers = fp8_layers = select_fp8_layers(settings, self.num_layers)
        self._members = [
            _Member(f"decoder.layers.{n}.{name}", module)
            for stage in stages
            for n in stage.stage.layers
            if n in fp8_layers
            for name, module in _linears(stage.decoder.layers[str(n)])
        ]
        self._stages = stages
        self.histories: AmaxHistories | TeAmaxHistories | None
        self._is_by_te = chosen(groups.device) == "te"
        if self._is_by_te:
            self._use_transformer_engine()
        else:
            scalings, self.histories = make_scalings(len(self._members), settings, groups.device)
            for member, scaling in zip(self._members, scalings, strict=True):
                member.module.product = _product(scaling)
                if settings.recipe != "blockwise":
                    mark_for_gather(member.module.weight)
        inner = [m for stage in stages for m in stage.modules()]
        kinds = {ExpertLinear: "experts", DownLinear: "latent projections down"}
        self._excluded = [
            word for kind, word in kinds.items() if any(isinstance(m, kind) for m in inner)
        ]
        if groups.rank == 0:
            _LOG.info("%s", self.describe())

    def _use_transformer_engine(self) -> None:
        """Let Transformer Engine compute the products, in its own region only."""
        weights = [member.module.weight for member in self._members]
        te = TeTraining(weights, self.settings, self.groups)
        for member, product in zip(self._members, te.products, strict=True):
            member.module.product = product
        for stage in self._stages:
            setattr(stage, "run", te.around(stage.run))  # noqa: B010 - stands for the method
        self.histories = te.histories

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check that some layer is left, and with `--kernels te` that its shapes fit.

        Raises:
            UsageError: no layer is computed in FP8, or a weight's shape does not fit.
            LayoutError: tp does not divide a weight.
        """
        if (fp8 := make_fp8_config(settings)) is None:
            return
        select_fp8_layers(fp8, source.config.num_layers)
        if settings.kernels == "te":
            check_te_shapes(fp8, source.config, settings.tp)

    @classmethod
    def estimate_memory(
        cls,
        settings: TrainConfig,
        source: CheckpointSource,
        layout: ParallelConfig,
        dtype: str,
        device: str,
    ) -> Mapping[str, int]:
        """Check that the device and the dtype allow FP8; it needs no memory of note.

        Raises:
            UsageError: they do not.
        """
        if (fp8 := make_fp8_config(settings)) is not None:
            if dtype == "float16":
                raise _fp16_error()
            require_products(torch.device(device))
            if settings.kernels == "te":
                require_recipe(fp8.recipe)
        return {}

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Let linear layers compute in FP8."""
        fp8 = make_fp8_config(settings)
        if fp8 is None:
            return None
        feature = cls(stages, fp8, stages[0].groups)
        feature.param_gather = settings.fp8_param_gather
        return feature

    def megatron_args(self) -> dict[str, Any]:
        """Megatron's args of FP8."""
        settings = self.settings
        return {
            "fp8": settings.format,
            "fp8_recipe": settings.recipe,
            "fp8_margin": settings.margin,
            "fp8_amax_history_len": settings.amax_history_len,
            "fp8_amax_compute_algo": settings.amax_compute_algo,
            "num_layers_at_start_in_bf16": settings.start_in_bf16,
            "num_layers_at_end_in_bf16": settings.end_in_bf16,
            "fp8_param_gather": self.param_gather,
        }

    @property
    def names(self) -> list[str]:
        """The modules of this rank that are computed in FP8."""
        return [member.name for member in self._members]

    def describe(self) -> str:
        """A sentence on what is computed in FP8, and how."""
        settings, fp8_layers = self.settings, self._fp8_layers
        excluded = ", ".join([*self._excluded, "attention"])
        if self._is_by_te:
            by = "computed by Transformer Engine"
        elif self.groups.device.type == "cpu":
            by = "rounded to FP8 and multiplied as float32 (the numbers of FP8, not its speed)"
        elif settings.recipe == "blockwise":
            by = "rounded to FP8 and multiplied as bfloat16 (the numbers of FP8, not its speed)"
        else:
            by = "multiplied by torch._scaled_mm"
        te = "; Transformer Engine is installed but not used (--kernels te)"
        is_idle = not self._is_by_te and find_spec("transformer_engine") is not None
        return (
            f"FP8 ({settings.recipe}, {settings.format}): linear layers of layers "
            f"{fp8_layers.start} to {fp8_layers.stop - 1} of {self.num_layers} are {by}; "
            f"{excluded} and the output layer are not in FP8{te if is_idle else ''}"
        )

    @property
    def is_steady(self) -> bool:
        """Every layer has scales from an earlier step, so that passes no longer differ."""
        return self.histories is None or not any(self.histories.is_fresh)

    def end_step(self) -> dict[str, float]:
        """Update scales from the amax of all ranks."""
        if self.histories is not None:
            self.histories.end_step(self.groups)
        return {}

    def remove(self) -> None:
        """Restore the linear layers."""
        for member in self._members:
            member.module.product = None
        for stage in self._stages if self._is_by_te else ():
            delattr(stage, "run")

    # Checkpoints.

    def saved_objects(self, names: Sequence[str]) -> dict[str, bytes]:
        """This rank's states as ready items, by their name in a checkpoint that has `names`.

        `names` of tensors or of extra states show whether layers are stacked there. Of the ranks
        that have the same layers one returns them, the others nothing.
        """
        histories = self.histories
        if histories is None or self.groups.tp.rank or self.groups.replicas.rank:
            return {}
        is_stacked = any(_STACKED.match(split_state(name)[2]) for name in names)
        out = {}
        for i, name in enumerate(self.names):
            arrays = {n: t.numpy() for n, t in histories.state(i).items()}
            item = encode_object(to_tree(self._extra_state(arrays)))
            out[_object_name(name, self.num_layers, is_stacked)] = item
        return out

    def load_objects(self, catalogue: Catalogue) -> int:
        """Take the states of a checkpoint of any layout; returns how many there were.

        Histories of another length are cut or extended. Layers without a state start afresh.

        Raises:
            FormatError: a state is damaged.
            MappingError: a state is of several products.
        """
        if self.histories is None:
            return 0
        object_names, number = {}, 0
        for name in catalogue.objects:
            if (module := _parse_object_name(name)) is not None:
                object_names[module] = name
        for i, module in enumerate(self.names):
            if module not in object_names:
                continue
            stored = catalogue.objects[object_names[module]]
            file = catalogue.path(stored.extent[0]) if stored.extent else catalogue.root
            state = decode(read_object(catalogue, stored), file=file)
            if state is None or not state.is_delayed:
                continue
            if state.num_gemms != 1:
                raise MappingError(
                    f"its FP8 state is that of {state.num_gemms} products", file=file, tensor=module
                )
            state = resize_history(state, self.settings.amax_history_len)
            self.histories.load(
                i, {n: torch.from_numpy(np.array(a)) for n, a in state.tensors.items()}
            )
            number += 1
        return number

    def _extra_state(self, arrays: Mapping[str, np.ndarray]) -> ExtraState:
        """A module's state as releases 2.x of Transformer Engine have it."""
        forward, backward = self.settings.largest
        rule = ScalingRule(
            max_fwd=forward,
            max_bwd=backward,
            margin=self.settings.margin,
            algorithm=self.settings.amax_compute_algo,
        )
        facts = {
            "recipe": make_delayed_recipe(rule, self.settings.amax_history_len),
            EXTRA_VARIABLES: {
                "fp8_checkpoint": True,
                "fp8_max_fwd": forward,
                "fp8_max_bwd": backward,
                NUM_GEMMS: 1,
            },
        }
        return ExtraState(tensors=dict(arrays), facts=facts, release=2)


def make_fp8_config(settings: TrainConfig) -> Fp8Config | None:
    """The FP8 recipe that options ask for; None if they do not.

    Raises:
        UsageError: a value is out of its range.
    """
    if settings.fp8_recipe is None:
        return None
    return Fp8Config(
        recipe=settings.fp8_recipe,
        format=settings.fp8_format,
        amax_history_len=settings.fp8_amax_history_len,
        amax_compute_algo=settings.fp8_amax_compute_algo,
        margin=settings.fp8_margin,
        start_in_bf16=settings.num_layers_at_start_in_bf16,
        end_in_bf16=settings.num_layers_at_end_in_bf16,
    )


def _fp16_error() -> UsageError:
    return UsageError("FP8 and fp16 exclude each other", hint="train in bf16 or fp32 with FP8")


def select_fp8_layers(settings: Fp8Config, num_layers: int) -> range:
    """The layers of a model that are computed in FP8.

    Raises:
        UsageError: there are none.
    """
    layers = range(settings.start_in_bf16, num_layers - settings.end_in_bf16)
    if not layers:
        raise UsageError(
            f"{settings.start_in_bf16} first and {settings.end_in_bf16} last layers without FP8, "
            f"and the model has {num_layers}",
            hint="lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16",
        )
    return layers


def check_te_shapes(settings: Fp8Config, config: ModelConfig, tp: int) -> None:
    """Check that weights have shapes that Transformer Engine supports in FP8.

    Raises:
        UsageError: a rank's part of a weight has a shape that does not fit the recipe.
        LayoutError: tp does not divide it.
    """
    fp8_layers, multiple = (
        select_fp8_layers(settings, config.num_layers),
        required_multiple(settings.recipe),
    )
    (model,) = build_stages(replace(config, num_mtp_layers=0), ProcessGroups.alone("meta"))
    for n in fp8_layers:
        for name, module in _linears(model.decoder.layers[str(n)]):
            out, inner = module.weight.shape
            is_column = isinstance(module, ColumnLinear)
            shape = (out // tp, inner) if is_column else (out, inner // tp)
            check_sides(shape, multiple, f"decoder.layers.{n}.{name}")


def _linears(layer: nn.Module) -> list[tuple[str, ColumnLinear | RowLinear]]:
    return [
        (name, module)
        for name, module in layer.named_modules()
        if isinstance(module, ColumnLinear | RowLinear)
    ]


def _product(scaling: Fp8Scaling) -> Callable[[Tensor, Tensor], Tensor]:
    return partial(fp8_product, scaling=scaling)


def _object_name(module: str, num_layers: int, is_stacked: bool) -> str:
    """Megatron's name of a module's extra state."""
    match = _LAYER.fullmatch(module)
    if match is None or not is_stacked:
        return f"{module}._extra_state/shard_0_1"
    return f"{match[1]}{match[3]}._extra_state/shard_{match[2]}_{num_layers}"


def _parse_object_name(name: str) -> str | None:
    """The module, with its layer, of an extra state's name; None for other objects."""
    match = _STATE.fullmatch(name)
    if match is None:
        return None
    module = split_state(match[1])[2]
    stacked = _STACKED.fullmatch(module)
    return module if stacked is None else f"{stacked[1]}{match[2]}.{stacked[2]}"
