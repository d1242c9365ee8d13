"""Quantization-aware training: passes with fake-quantized weights and inputs.

Weights are rounded in place for the passes of a step, and restored before the optimizer's update:
gradients are taken at the rounded weights and applied to the original ones (straight-through
estimator, Bengio et al., 2013), and likewise for rounded inputs. Formats and scales are those of a
recipe, or of ModelOpt's quantizers in the checkpoint, which are saved again. With LoRA the merged
weights are rounded, as in modelopt 0.47, torch/quantization/plugins/peft.py (`_QuantLoraLinear`).
There A multiplies inputs that are divided by smoothing scales already; here it multiplies a layer's
inputs before that, as PEFT and engines apply adapters, so that it is one of the exported folder.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megtool.console import Progress
from megtool.dtypes import dtype as named_dtype
from megtool.errors import CalibrationError, FormatError, StorageError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.hook_locations import tapped
from megtool.model.stacks.lora import adapters_of, merged_weight
from megtool.options.effects import without_effect
from megtool.options.layout import ParallelConfig
from megtool.options.quantize import CalibrationOptions, RecipeChoice
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel
from megtool.quant.fake_quant.learned_scales import BLOCK
from megtool.quant.fake_quant.straight_through import straight_through
from megtool.quant.fake_quant.weight_views import WeightViews
from megtool.quant.qparams import QParams, WeightQParams
from megtool.quant.recipes.learned_scales import LearnedScales
from megtool.quant.recipes.match import Decision
from megtool.quant.resolve import resolve_recipe
from megtool.quant.statistics.activation_sites import ActivationSite, list_activation_sites
from megtool.quantize.layout.megatron_source import (
    QuantizedMegatronSource,
    read_quantized_megatron,
)
from megtool.quantize.obtain_qparams import check_given, solve
from megtool.quantize.request import QuantizeRun
from megtool.source.checkpoint import CheckpointSource
from megtool.train.checkpointing.protocol import CheckpointSaver
from megtool.train.checkpointing.quantizer_state import QuantizerState
from megtool.train.features.learned_scales import (
    LearnedScalesSaver,
    LearnedWeights,
    check_learned_scales,
    learned_bytes_per_block,
)
from megtool.train.features.protocol import FeatureInputs, TrainingFeature
from megtool.train.model.memory_estimate import estimate_fake_quant_bytes
from megtool.train.options.config import TrainConfig

if TYPE_CHECKING:
    from typing import Self


class QatFeature(TrainingFeature):
    """In `with around_passes(...)` the stages compute as an engine would after `quantize`.

    `qparams` are the quantization parameters of weights, inputs and caches at `sites`. Scales of
    inputs and smoothing scales stay those of the calibration. Scales of weights follow the weights,
    and codes that were chosen for the initial weights (GPTQ) are dropped. With `decisions`, which
    are those of a quantized checkpoint, its amaxes of weights stay what they are, as ModelOpt's do,
    and what it has quantizers for has them in saved checkpoints. `learned` scales are trained with
    the weights instead. Memory: a copy of the rounded
    weights during the passes.

    Raises:
        UsageError: modules that share an input would round it in different ways.
        CalibrationError: an input's scale is missing from the calibration.
    """

    changes_parameters = True

    def __init__(
        self,
        stages: Sequence[Decoder],
        sites: Iterable[ActivationSite],
        qparams: QParams,
        decisions: Sequence[Decision] | None = None,
        learned: LearnedScales | None = None,
    ) -> None:
        all_sites = tuple(sites)
        is_fixed = decisions is not None
        weights = qparams.weights
        if not is_fixed:
            weights = {m: replace(t, amax=None, codes=None) for m, t in weights.items()}
        self._qparams = QParams(
            weights=dict(weights),
            kv_caches=dict(qparams.kv_caches),
            norm_scales=dict(qparams.norm_scales),
        )
        self._learned = None if learned is None else LearnedWeights(stages, self._qparams, learned)
        self._quantizers: QuantizerState | None = None
        if decisions is not None:
            planned = self._qparams
            if self._learned is not None:
                planned = self._learned.plan_qparams(decisions)
            self._quantizers = QuantizerState(decisions=decisions, qparams=planned)
        _smooth_adapters(stages, self._qparams.weights)
        # Modules that share a scale per tensor.
        self._shared = [
            siblings
            for p in all_sites
            if len(siblings := self._with_global_amax(p.modules)) > 1
            and p.kind == "input"
            and not is_fixed
        ]
        self._stages = [
            (
                stage,
                FakeQuantModel(
                    stage,
                    all_sites,
                    self._qparams,
                    dtype=str(stage.dtype).removeprefix("torch."),
                ),
            )
            for stage in stages
        ]

    def _with_global_amax(self, modules: Iterable[str]) -> list[str]:
        weights = self._qparams.weights
        return [m for m in modules if m in weights and weights[m].global_amax]

    @classmethod
    def check(cls, settings: TrainConfig, source: CheckpointSource) -> None:
        """Check the recipe and its calibration file, or the quantizers of the checkpoint.

        Raises:
            MegtoolError: see `make_qat_request`, and `read_quantizers`.
        """
        if settings.qat is not None:
            _decide(settings, source)

    @classmethod
    def estimate_memory(
        cls,
        settings: TrainConfig,
        source: CheckpointSource,
        layout: ParallelConfig,
        dtype: str,
        device: str,
    ) -> Mapping[str, int]:
        """Bytes of the copies of weights that are rounded, and of learned amaxes with gradients and
        moments."""
        if settings.qat is None:
            return {}
        decisions, learned = _decide(settings, source)
        modules = [d.module.name for d in decisions if d.format is not None]
        num_bytes = estimate_fake_quant_bytes(source.config, layout, dtype, modules)
        if learned is not None:
            num_blocks = num_bytes // named_dtype(dtype).itemsize // BLOCK
            num_bytes += num_blocks * learned_bytes_per_block(learned)
        return {"fake_quant_bytes": num_bytes}

    @classmethod
    def identity(cls, settings: TrainConfig) -> Mapping[str, Any]:
        """The recipe, and a digest of the calibration file."""
        digest = None if settings.calibration is None else _file_digest(settings.calibration)
        return {"qat": settings.qat, "calibration": digest}

    @classmethod
    def prepare(
        cls, settings: TrainConfig, stages: Sequence[Decoder], inputs: FeatureInputs
    ) -> Self | None:
        """Solve the quantization parameters of the model that the run was started with, or read
        those of the checkpoint that the weights are loaded from."""
        if settings.qat is None or inputs.source is None:
            return None
        if settings.keeps_quantizers:
            quantized = read_quantizers(settings, inputs.weights or inputs.source)
            modules = (d.module for d in quantized.decisions)
            sites = list_activation_sites(modules, quantized.source.config)
            return cls(stages, sites, quantized.qparams, quantized.decisions)
        request = make_qat_request(settings.qat, settings, inputs.source)
        sites, qparams = solve_qat_qparams(request, inputs.progress)
        learned = request.resolved.recipe.learned_scales
        return cls(stages, sites, qparams, None if learned is None else request.decisions, learned)

    @property
    def quantizers(self) -> QuantizerState | None:
        """The quantizers that the checkpoint had, or those of learned scales."""
        return self._quantizers

    def wrap_saver(self, saver: CheckpointSaver) -> CheckpointSaver:
        """With learned scales a saver of rounded weights and amaxes."""
        if self._learned is None or self._quantizers is None:
            return saver
        return LearnedScalesSaver(saver, self._learned, self._quantizers)

    def load_states(self, checkpoint: Path) -> Mapping[tuple[str, str], Tensor]:
        """The learned amaxes of an iteration, and their states."""
        return {} if self._learned is None else self._learned.load(checkpoint)

    @contextmanager
    def around_passes(
        self, iteration: int, batch: Batch | None, *, is_repeated: bool = False
    ) -> Iterator[None]:
        """Round weights and inputs until the end of the block, and restore the weights then."""
        taps = [pair for _, simulation in self._stages for pair in simulation.hooks]
        if self._learned is not None:
            with self._learned.rounded(), tapped(straight_through(taps)):
                yield
            return
        originals: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for stage, simulation in self._stages:
                    merged = set()
                    for name, linear, adapter in adapters_of(stage):
                        originals.append((linear.weight, linear.weight.detach().clone()))
                        linear.weight.copy_(merged_weight(linear, adapter))
                        merged.add(f"{name}.weight")
                        adapter.is_merged = True
                    self._update_shared_scales(simulation)
                    for layer in simulation.layers:
                        for name, rounded in simulation.fake_quantize_layer(layer).items():
                            parameter = stage.get_parameter(name)
                            if name not in merged:
                                originals.append((parameter, parameter.detach().clone()))
                            parameter.copy_(rounded)
            with tapped(straight_through(taps)):
                yield
        finally:
            with torch.no_grad():
                for weight, values in originals:
                    weight.copy_(values)
            for stage, _ in self._stages:
                for *_, adapter in adapters_of(stage):
                    adapter.is_merged = False

    def _update_shared_scales(self, simulation: FakeQuantModel) -> None:
        """Update shared scales per tensor to the current weights."""
        weights = self._qparams.weights
        for modules in self._shared:
            tops: list[float] = []
            for module in modules:
                weight = simulation.weight(module)
                if weight is not None:
                    columns = weights[module].smoothing_scale
                    if columns is not None:
                        weight = weight * torch.as_tensor(columns, device=weight.device)
                    tops.append(float(weight.abs().max()))
            top = max(tops, default=0.0)
            for module in modules if top else ():
                weights[module] = replace(weights[module], global_amax=top)


def _smooth_adapters(stages: Sequence[Decoder], weights: Mapping[str, WeightQParams]) -> None:
    """Give adapters the smoothing scales that the weights of their layers are multiplied by."""
    scales = {
        m: torch.from_numpy(np.array(q.smoothing_scale, np.float32))
        for m, q in weights.items()
        if q.is_smoothed
    }
    for stage in stages:
        views = WeightViews(stage, scales)
        for name, linear, adapter in adapters_of(stage):
            parameter = f"{name}.weight"
            factors = torch.ones(linear.weight.shape, device=linear.weight.device)
            modules = [m for m, part in views.parts.items() if part.parameter == parameter]
            for m in modules:
                views.write(m, scales[m].expand(views.parts[m].shape), {parameter: factors})
            if modules:
                adapter.smoothing_scale = factors[..., 0, :].clone()


def _decide(
    settings: TrainConfig, source: CheckpointSource
) -> tuple[Sequence[Decision], LearnedScales | None]:
    """The decision about every module, and the scales that are learned."""
    if settings.qat is None:
        return (), None
    if settings.keeps_quantizers:
        return read_quantizers(settings, source).decisions, None
    request = make_qat_request(settings.qat, settings, source)
    return request.decisions, request.resolved.recipe.learned_scales


def read_quantizers(settings: TrainConfig, source: CheckpointSource) -> QuantizedMegatronSource:
    """The formats and parameters of ModelOpt's quantizers in a checkpoint that is trained.

    Raises:
        FormatError: it has none, or they are damaged, or of a format that is not known.
        UsageError: optimizer state is to be in buckets, for whose parameters checkpoints with
            quantizers have other names.
    """
    if settings.dist_ckpt_optim_format == "dp_reshardable" and settings.lora.lora_rank is None:
        raise UsageError(
            "--dist-ckpt-optim-format dp_reshardable does not go with --qat source: a checkpoint "
            "with quantizers has gate and up apart, and buckets have them together",
            hint="leave it out: fully_reshardable state loads at every layout",
        )
    options = replace(settings.source, iteration=None)
    quantized = read_quantized_megatron(source.catalogue.root, options, fixed=True)
    if not any(d.format is not None for d in quantized.decisions):
        raise FormatError(
            "all of its quantizers are disabled", file=source.path, hint="--qat RECIPE"
        )
    return quantized


def solve_qat_qparams(
    job: QuantizeRun, progress: Progress
) -> tuple[tuple[ActivationSite, ...], QParams]:
    """The activation sites of the model of a `make_qat_request`, and its quantization parameters.

    Raises:
        CalibrationError: the recipe quantizes nothing.
    """
    result = solve(job, None, progress, everywhere=True)
    if result is None:
        raise CalibrationError(f"recipe {job.resolved.recipe.name} quantizes nothing")
    return job.sites, result.qparams


def make_qat_request(recipe: str, settings: TrainConfig, source: CheckpointSource) -> QuantizeRun:
    """The quantization of the model in `source` that training emulates, from headers alone.

    Raises:
        RecipeError: with everything that is wrong with the recipe, or for this model.
        CalibrationError: it needs a calibration file and there is none, or one of another model.
        UsageError: it leaves the choice of formats open.
    """
    path, calibration = source.path, settings.calibration
    decided = resolve_recipe(path, recipe, settings.source)
    if decided.recipe.rotation is not None:
        raise without_effect(
            f"--qat {recipe} cannot be used: it rotates the weights, and training does not",
            "a recipe without rotation; or quantize first by one that keeps all modules and "
            "rotates, and train the folder that it writes",
        )
    files = () if calibration is None else (calibration,)
    job = QuantizeRun(
        resolved=decided,
        destination=path,
        began=time.monotonic(),
        recipe=RecipeChoice(recipe=recipe),
        calibration=CalibrationOptions(calibration=files),
    )
    if any(d.format.number.has_branch for d in job.decisions if d.format and d.format.algo):
        raise without_effect(
            f"--qat {recipe} cannot be used: its low-rank matrices are not trained",
            "recipe nvfp4, whose weights are rounded as a whole",
        )
    if job.needs_choice:
        raise UsageError(
            f"--qat {recipe} cannot be used: it chooses formats by their sensitivity",
            hint="a recipe with a format for each module",
        )
    if job.needs_data and calibration is None:
        raise CalibrationError(
            f"recipe {decided.recipe.name} needs statistics of the model's inputs",
            hint=f"megtool quantize {path} FILE --recipe {recipe} --calibrate-only makes a FILE "
            "for --calibration",
        )
    check_given(job)
    if decided.recipe.learned_scales is not None:
        check_learned_scales(recipe, settings, job.decisions)
    return job


def _file_digest(path: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise StorageError(f"cannot read: {e.strerror or e}", file=path) from e
