"""Training in FP8: linear layers computed in FP8, and their scaling state in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from megtool.convert.families.nested import MEGATRON_PREFIX
from megtool.errors import MappingError, UsageError
from megtool.kernels.dispatch import chosen
from megtool.kernels.fp8.cast import Quantized
from megtool.kernels.fp8.products import dense_arithmetic
from megtool.kernels.transformer_engine.linear import check_sides
from megtool.megatron_state.extra_states.names import Site, StateNaming, parse_site
from megtool.megatron_state.extra_states.te_state import (
    EXTRA_VARIABLES,
    NUM_GEMMS,
    ExtraState,
    decode,
    make_delayed_recipe,
    resize_history,
    to_tree,
)
from megtool.megatron_state.saved_objects import read_object
from megtool.model.attention.mla import DownLinear
from megtool.model.layers.linear import ColumnLinear, RowLinear
from megtool.model.moe.experts import ExpertLinear
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import build_stages
from megtool.number_formats.delayed_scaling import ScalingRule
from megtool.optim.fp8.amax_history import AmaxHistories
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.experts import expert_linear, make_expert_scaling
from megtool.optim.fp8.linear import fp8_product, require_products
from megtool.optim.fp8.scaling import BLOCK, MX_BLOCK, StepScope, make_scaling
from megtool.optim.fp8.transformer_engine import (
    TeAmaxHistories,
    TeTraining,
    require_recipe,
    required_multiple,
)
from megtool.optim.fp8.weights import mark_for_gather
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.pickles.zip_writer import encode_object
from megtool.quant.recipes.dialects import read_recipe_text
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.sharded import GlobalTensor
from megtool.train.features.module_precision import (
    ModulePrecisions,
    choose_precisions,
    make_fp8_config,
    summarize_precisions,
    uniform_precisions,
)
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.features.te_layers import (
    TeKind,
    build_te_modules,
    choose_te_modules,
    excluded_kinds,
    remove_te_modules,
)
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self

_LOG = logging.getLogger(__name__)

Fp8Linear = ColumnLinear | RowLinear | DownLinear | ExpertLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A linear layer that is computed in FP8, by its module's name, or that of all experts.

    Of the histories of delayed scaling it has those from `first` on, one for each of this rank's
    experts, of which the first is `expert` in the whole model.
    """

    name: str
    module: Fp8Linear
    settings: Fp8Config
    first: int = 0
    expert: int | None = None

    @property
    def num_histories(self) -> int:
        """How many histories it has with delayed scaling."""
        return 1 if self.expert is None else self.module.weight.shape[0]

    @property
    def sites(self) -> list[Site]:
        """The owners of its states, in the order of its histories."""
        if self.expert is None:
            return [Site(self.name)]
        return [Site(self.name, self.expert + i) for i in range(self.num_histories)]


class Fp8Feature(TrainingFeature):
    """FP8 in the stages of this rank; every rank calls its methods at the same time.

    It covers all linear layers between embedding and output layer that `precisions` (or `settings`,
    for all layers alike) do not leave out: dense ones, latent projections, and those of experts,
    which have scales for each expert. Routers, attention and the output layer are not in FP8.
    `describe` says so in a sentence. Only delayed scaling has state. Inside
    `kernels.dispatch.use("te")` Transformer Engine's modules and recipes compute these layers, as
    `te_layers` chooses them, and end a step of delayed scaling with every pass; experts that they
    cannot compute are not in FP8. `te_excluded` are modules that are not to be used, and why.
    Weights are cast once a step, at their first use, if `keeps_casts`; a captured graph would
    repeat the products with the casts of the step that it was captured in.

    Raises:
        MissingPackageError: Transformer Engine is needed and cannot be loaded.
        UsageError: the device has no FP8, the model is in fp16, no layer is left, or the recipe
            does not go with Transformer Engine.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        settings: Fp8Config | ModulePrecisions,
        groups: ProcessGroups,
        te_excluded: Mapping[TeKind, str] | None = None,
        *,
        keeps_casts: bool = True,
    ) -> None:
        require_products(groups.device)
        first = stages[0]
        if first.dtype == torch.float16:
            raise _fp16_error()
        self.groups, self.param_gather = groups, False
        self._scope, self._keeps_casts = StepScope(), keeps_casts
        if isinstance(settings, Fp8Config):
            settings = uniform_precisions(settings, first.config.num_layers)
        self.precisions, self._stages = settings, stages
        self._is_by_te = chosen(groups.device) == "te"
        self._choices = []
        if self._is_by_te:
            self._choices = choose_te_modules(stages, settings.of, te_excluded, has_fp8=True)
        self._members = self._find_members()
        self.histories: AmaxHistories | TeAmaxHistories | None = None
        if self._is_by_te:
            self._use_transformer_engine()
        else:
            self._set_products()
        if groups.rank == 0:
            _LOG.info("%s", self.describe())

    def _find_members(self) -> list[_Member]:
        """The linear layers in FP8, dense ones before experts."""
        layers: list[tuple[str, Fp8Linear, Fp8Config]] = []
        by_te = {name for choice in self._choices if choice.module for name in choice.names}
        for stage in self._stages:
            for n in stage.stage.layers:
                for name, module in _linears(stage.decoder.layers[str(n)]):
                    full = f"decoder.layers.{n}.{name}"
                    if (config := self.precisions.of(full)) is not None:
                        layers.append((full, module, config))
        layers.sort(key=lambda f: isinstance(f[1], ExpertLinear))
        members: list[_Member] = []
        first = 0
        for full, module, config in layers:
            expert = None
            if isinstance(module, ExpertLinear):
                if self._is_by_te and full not in by_te:
                    continue
                expert = self.groups.ep.rank * module.weight.shape[0]
            member = _Member(name=full, module=module, settings=config, first=first, expert=expert)
            members.append(member)
            first += member.num_histories if config.fp8_recipe == "delayed" else 0
        return members

    def _set_products(self) -> None:
        """Let linear layers multiply in FP8."""
        delayed = [m for m in self._members if m.settings.fp8_recipe == "delayed"]
        histories = None
        if delayed:
            dense = [m for m in delayed if m.expert is None]
            histories = self.histories = AmaxHistories(
                sum(m.num_histories for m in delayed),
                delayed[0].settings,
                self.groups.device,
                num_dense=len(dense),
            )
        for m in self._members:
            own = histories if m.settings.fp8_recipe == "delayed" else None
            if isinstance(m.module, ExpertLinear):
                experts = make_expert_scaling(
                    m.settings,
                    m.num_histories,
                    self.groups.device,
                    histories=own,
                    first=m.first,
                    scope=self._scope,
                )
                m.module.product = partial(expert_linear, scaling=experts)
            else:
                scaling = make_scaling(m.settings, histories=own, module=m.first, scope=self._scope)
                if isinstance(m.module, DownLinear) and m.module.sequence_parallel:
                    scaling.group = m.module.group
                m.module.product = partial(fp8_product, scaling=scaling)
            _mark(m.module, m.settings)

    def _use_transformer_engine(self) -> None:
        """Let Transformer Engine's modules compute the layers, in its own region only."""
        settings = self.precisions.recipes[0]
        multiple = required_multiple(settings.fp8_recipe)
        te_modules = build_te_modules(self._stages, self._choices, lambda name: multiple)
        products = [
            (module, gemm + i)
            for member in self._members
            for module, gemm in [te_modules[member.name]]
            for i in range(member.num_histories)
        ]
        te = TeTraining(products, settings, self.groups)
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
        precisions = choose_precisions(settings, source)
        if precisions is not None and settings.kernels == "te":
            check_te_shapes(precisions, source.config, settings.layout.tp)

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
        precisions = choose_precisions(settings, source)
        if precisions is not None:
            if dtype == "float16":
                raise _fp16_error()
            require_products(torch.device(device))
            if settings.kernels == "te":
                require_recipe(precisions.recipes[0].fp8_recipe)
        return {}

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Let linear layers compute in FP8."""
        precisions: ModulePrecisions | None
        if inputs.source is None:
            config = make_fp8_config(settings)
            layers = stages[0].config.num_layers
            precisions = None if config is None else uniform_precisions(config, layers)
        else:
            precisions = choose_precisions(settings, inputs.source)
        if precisions is None:
            return None
        feature = cls(
            stages,
            precisions,
            stages[0].groups,
            excluded_kinds(settings),
            keeps_casts=settings.cuda_graph_impl == "none",
        )
        feature.param_gather = settings.fp8.fp8_param_gather
        return feature

    @classmethod
    def identity(cls, settings: TrainConfig) -> Mapping[str, Any]:
        """A digest of the rules that choose the precision of modules."""
        file = settings.fp8.te_precision_config_file
        digest = None if file is None else sha256(read_recipe_text(file)[1]).hexdigest()
        return {"te_precision_config_file": digest}

    def megatron_args(self) -> dict[str, Any]:
        """Megatron's args of FP8; those of a run without a recipe for all layers are its own."""
        settings = self.precisions.default
        if settings is None:
            return {}
        return {
            "fp8": settings.fp8_format,
            "fp8_recipe": settings.fp8_recipe,
            "fp8_margin": settings.fp8_margin,
            "fp8_amax_history_len": settings.fp8_amax_history_len,
            "fp8_amax_compute_algo": settings.fp8_amax_compute_algo,
            "num_layers_at_start_in_bf16": settings.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": settings.num_layers_at_end_in_bf16,
            "fp8_param_gather": self.param_gather,
        }

    @property
    def names(self) -> list[str]:
        """The modules of this rank that are computed in FP8."""
        return [member.name for member in self._members]

    def describe(self) -> str:
        """A sentence on what is computed in FP8, and how."""
        recipes = " and ".join(f"{c.fp8_recipe}, {c.fp8_format}" for c in self.precisions.recipes)
        te = "; Transformer Engine is installed but not used (--kernels te)"
        is_idle = not self._is_by_te and find_spec("transformer_engine") is not None
        experts = [c for c in self._choices if c.module is None and ".experts." in c.owner]
        left_out = ["experts"] if experts else []
        return (
            f"FP8 ({recipes}): {self._layers_text()} are {self._arithmetic()}; "
            f"{', '.join([*left_out, 'attention'])} and the output layer are not in FP8"
            f"{te if is_idle else ''}"
        )

    def _layers_text(self) -> str:
        if self.precisions.chosen:
            return "the linear layers that --te-precision-config-file gives it"
        layers, num_layers = self.precisions.layers, self._stages[0].config.num_layers
        return f"linear layers of layers {layers.start} to {layers.stop - 1} of {num_layers}"

    def _arithmetic(self) -> str:
        if self._is_by_te:
            return "computed by Transformer Engine"
        if self.groups.device.type == "cpu":
            return "rounded to FP8 and multiplied as float32 (the numbers of FP8, not its speed)"
        device, recipes = self.groups.device, self.precisions.recipes
        kinds = {describe_arithmetic(config.fp8_recipe, device) for config in recipes}
        return " or ".join(sorted(kinds))

    @property
    def is_steady(self) -> bool:
        """Every layer has scales from an earlier step, so that passes no longer differ."""
        return self.histories is None or not any(self.histories.is_fresh)

    def begin_step(self, labels_BS: Tensor, loss_scale: float) -> None:
        """Keep the casts of weights from now on, until the optimizer has changed the weights."""
        if self._keeps_casts:
            self._scope.begin()

    def end_step(self) -> dict[str, float]:
        """Update scales from the amax of all ranks."""
        self._scope.end()
        if self.histories is not None:
            self.histories.end_step(self.groups)
        return {}

    def remove(self) -> None:
        """Restore the linear layers."""
        self._scope.end()
        for member in self._members:
            member.module.product = None
        if self._is_by_te:
            remove_te_modules(self._stages)
            for stage in self._stages:
                delattr(stage, "run")

    # Checkpoints.

    def saved_objects(self, tensors: Sequence[GlobalTensor]) -> dict[str, bytes]:
        """This rank's states as ready items, by their name in a checkpoint that has `tensors`,
        whose names show whether layers and experts are stacked there. Of the ranks that have the
        same layers one returns them, the others nothing.
        """
        histories, groups = self.histories, self.groups
        if histories is None:
            return {}
        naming, out = StateNaming.of(tensors), {}
        for member in self._delayed_members:
            same = (groups.tp, groups.replicas)
            if member.expert is not None:
                same = (groups.etp, groups.expert_dp)
            if any(group.rank for group in same):
                continue
            for i, site in enumerate(member.sites):
                arrays = {n: t.numpy() for n, t in histories.state(member.first + i).items()}
                item = encode_object(to_tree(self._extra_state(arrays, member.settings)))
                out[naming.name(site)] = item
        return out

    @property
    def _delayed_members(self) -> list[_Member]:
        return [m for m in self._members if m.settings.fp8_recipe == "delayed"]

    def load_objects(self, catalogue: Catalogue) -> int:
        """Take the states of a checkpoint of any layout; returns how many there were.

        Histories of another length are cut or extended. Layers without a state start afresh.

        Raises:
            FormatError: a state is damaged.
            MappingError: a state is of several products.
        """
        if self.histories is None:
            return 0
        object_names = {
            replace(site, module=site.module.removeprefix(MEGATRON_PREFIX)): name
            for name in catalogue.objects
            if (site := parse_site(name)) is not None
        }
        number = 0
        for member in self._delayed_members:
            for i, site in enumerate(member.sites):
                if site not in object_names:
                    continue
                stored = catalogue.objects[object_names[site]]
                file = catalogue.path(stored.extent[0]) if stored.extent else catalogue.root
                state = decode(read_object(catalogue, stored), file=file)
                if state is None or not state.is_delayed:
                    continue
                if state.num_gemms != 1:
                    raise MappingError(
                        f"its FP8 state is that of {state.num_gemms} products",
                        file=file,
                        tensor=site.module,
                    )
                state = resize_history(state, member.settings.fp8_amax_history_len)
                self.histories.load(
                    member.first + i,
                    {n: torch.from_numpy(np.array(a)) for n, a in state.tensors.items()},
                )
                number += 1
        return number

    def _extra_state(self, arrays: Mapping[str, np.ndarray], settings: Fp8Config) -> ExtraState:
        """A module's state as releases 2.x of Transformer Engine have it."""
        forward, backward = settings.largest
        rule = ScalingRule(
            max_fwd=forward,
            max_bwd=backward,
            margin=settings.fp8_margin,
            algorithm=settings.fp8_amax_compute_algo,
        )
        facts = {
            "recipe": make_delayed_recipe(rule, settings.fp8_amax_history_len),
            EXTRA_VARIABLES: {
                "fp8_checkpoint": True,
                "fp8_max_fwd": forward,
                "fp8_max_bwd": backward,
                NUM_GEMMS: 1,
            },
        }
        return ExtraState(tensors=dict(arrays), facts=facts, release=2)


def _fp16_error() -> UsageError:
    return UsageError("FP8 and fp16 exclude each other", hint="train in bf16 or fp32 with FP8")


def describe_arithmetic(recipe: Recipe | None, device: torch.device) -> str:
    """How the dense products of a recipe are computed on a device."""
    blocks: dict[str | None, tuple[int, int]] = {"blockwise": (1, BLOCK), "mxfp8": (1, MX_BLOCK)}
    block = blocks.get(recipe, (0, 0))
    data = torch.empty(0, 0, dtype=torch.float8_e4m3fn, device=device)
    operand = Quantized(data=data, scale_inv=torch.empty((), device=device), block=block)
    if dense_arithmetic(operand, operand) == "fp8":
        return "multiplied in FP8 by torch"
    return "rounded to FP8 and multiplied as bfloat16 (the numbers of FP8, not its speed)"


def check_te_shapes(precisions: ModulePrecisions, config: ModelConfig, tp: int) -> None:
    """Check that weights have shapes that Transformer Engine supports in FP8.

    Raises:
        UsageError: a rank's part of a weight has a shape that does not fit the recipe.
        LayoutError: tp does not divide it.
    """
    (model,) = build_stages(config.with_fields(num_mtp_layers=0), ProcessGroups.alone("meta"))
    for n in model.stage.layers:
        for name, module in _linears(model.decoder.layers[str(n)]):
            fp8 = precisions.of(f"decoder.layers.{n}.{name}")
            if fp8 is None or isinstance(module, ExpertLinear):
                continue
            out, inner = module.weight.shape
            shape = out, inner
            if isinstance(module, ColumnLinear):
                shape = out // tp, inner
            elif isinstance(module, RowLinear):
                shape = out, inner // tp
            check_sides(shape, required_multiple(fp8.fp8_recipe), f"decoder.layers.{n}.{name}")


def mark_fp8_weights(
    settings: TrainConfig, source: CheckpointSource, stages: Sequence[Decoder]
) -> None:
    """Mark the weights of stages, which may be without memory, that --fp8-param-gather keeps as FP8
    alone."""
    precisions = choose_precisions(settings, source) if settings.fp8.fp8_param_gather else None
    if precisions is None:
        return
    for stage in stages:
        for n in stage.stage.layers:
            for name, module in _linears(stage.decoder.layers[str(n)]):
                config = precisions.of(f"decoder.layers.{n}.{name}")
                if config is not None:
                    _mark(module, config)


def _mark(module: Fp8Linear, config: Fp8Config) -> None:
    """Mark a weight that can be FP8 alone: MXFP8 needs two roundings of it."""
    if config.fp8_recipe != "mxfp8":
        block = (BLOCK, BLOCK) if config.fp8_recipe == "blockwise" else (0, 0)
        mark_for_gather(module.weight, block)


def describe_precisions(settings: TrainConfig, source: CheckpointSource) -> dict[str, str]:
    """The precision of all modules that can be in FP8, by module and layers; empty without a
    recipe that chooses it.

    Raises:
        RecipeError: the recipe is not valid.
    """
    if settings.fp8.te_precision_config_file is None:
        return {}
    precisions = choose_precisions(settings, source)
    config = source.config.with_fields(num_mtp_layers=0)
    (model,) = build_stages(config, ProcessGroups.alone("meta"))
    names = [
        f"decoder.layers.{n}.{name}"
        for n in model.stage.layers
        for name, _ in _linears(model.decoder.layers[str(n)])
    ]
    return {} if precisions is None else dict(summarize_precisions(names, precisions))


def _linears(layer: nn.Module) -> list[tuple[str, Fp8Linear]]:
    kinds = ColumnLinear | RowLinear | DownLinear | ExpertLinear
    return [(name, module) for name, module in layer.named_modules() if isinstance(module, kinds)]
