"""Beside: what LoRA, quantization-aware training and distillation need beside settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.checkpoint.megatron_metadata import saved_args
from megtool.config import ModelConfig, ParallelConfig
from megtool.console import Progress
from megtool.convert.sharding import check_layout
from megtool.errors import UsageError
from megtool.inference.runtime import usual_device
from megtool.reshard.open_source import open_decoder
from megtool.reshard.source import CheckpointSource
from megtool.train.config import TrainConfig

if TYPE_CHECKING:
    from megtool.model.decoder import Decoder
    from megtool.quant.pipeline.request import QuantizeRequest
    from megtool.train.features.protocol import Beside
    from megtool.train.run_plan import RunPlan


def check_early(runnable: CheckpointSource, settings: TrainConfig) -> None:
    """Refuse what headers alone forbid, before data are read and weights are loaded.

    Raises:
        LayoutError: the layout does not divide the model, or the teacher.
        UsageError: routers, adapters or CUDA graphs are asked for what they do not do; a pattern is
            of no parameter; no layer is left to FP8.
        MappingError: PEFT's form has no place for adapters of this model.
        RecipeError: there is no such recipe, or it does not fit the model.
        CalibrationError: it needs a calibration and there is none, or one of another model.
        MissingPackageError: Transformer Engine is asked for, and not there.
        MegtoolError: the teacher cannot be opened, or has another vocabulary.
    """
    from megtool.train.cuda_graph import check_graphs
    from megtool.train.features.distillation import check_vocabularies, plan_teacher_layout
    from megtool.train.features.fp8 import select_fp8_layers
    from megtool.train.features.moe_load_balancing import make_balance_settings
    from megtool.train.features.protocol import check_lora, check_patterns, fp8_settings

    config, model, layout = runnable.config, runnable.model, settings.layout
    check_layout(config, layout)
    check_graphs(settings, config)
    if settings.kernels == "te":
        _check_te(settings, config)
    make_balance_settings(settings, config, saved_args(runnable.catalogue))
    check_lora(settings, config, None if model is None else model.family)
    check_patterns(settings, config)
    if (told := fp8_settings(settings)) is not None:
        select_fp8_layers(told, config.num_layers)
    if settings.qat is not None:
        _job(runnable, settings)
    if settings.teacher is not None:
        taught = open_decoder(settings.teacher).config
        check_vocabularies(config, taught)
        plan_teacher_layout(layout, config, taught)


def beside_of(
    runnable: CheckpointSource,
    settings: TrainConfig,
    stages: Sequence[Decoder],
    plan: RunPlan,
    progress: Progress,
) -> Beside:
    """What the run of a model whose stages are loaded needs beside `settings`.

    Raises:
        RecipeError: there is no such recipe, or it does not fit the model.
        CalibrationError: it needs a calibration and there is none, or one of another model.
        MegtoolError: the teacher cannot be read, or cannot teach here.
    """
    from megtool.train.features.moe_load_balancing import make_balance_settings
    from megtool.train.features.protocol import Beside

    model, rounded, teacher = runnable.model, None, None
    if settings.qat is not None:
        from megtool.train.features.qat_setup import solve_qat_qparams

        rounded = solve_qat_qparams(_job(runnable, settings), progress)
    if settings.teacher is not None:
        teacher = _teacher(settings.teacher, settings, stages[-1], progress)
    return Beside(
        family=None if model is None else model.family,
        base=str(runnable.path),
        rounded=rounded,
        teacher=teacher,
        num_microbatches=plan.num_microbatches,
        balance=make_balance_settings(settings, runnable.config, saved_args(runnable.catalogue)),
    )


def check_beside(
    runnable: CheckpointSource,
    settings: TrainConfig,
    layout: ParallelConfig,
    dtype: str,
    device: str,
) -> tuple[int, int]:
    """Refuse beforehand what `beside_of` and FP8 would, and `check_early` has not; returns a rank's
    bytes of the teacher, and of the weights that are kept while rounded ones are in their place.

    Raises:
        UsageError: there is no FP8 on the device.
        MegtoolError: see `beside_of`.
    """
    import torch

    from megtool.optim.fp8.linear import require_products
    from megtool.optim.fp8.transformer_engine import require_recipe
    from megtool.train.features.distillation import plan_teacher_layout
    from megtool.train.features.protocol import fp8_settings
    from megtool.train.memory_estimate import estimate_fake_quant_bytes, estimate_weight_bytes

    if (told := fp8_settings(settings)) is not None:
        if dtype == "float16":
            raise UsageError("FP8 with fp16", hint="train in bf16 or fp32 beside FP8")
        require_products(torch.device(device))
        if settings.kernels == "te":
            require_recipe(told.recipe)
    copied = 0
    if settings.qat is not None:
        named = [d.module.name for d in _job(runnable, settings).decisions if d.format is not None]
        copied = estimate_fake_quant_bytes(runnable.config, layout, dtype, named)
    if settings.teacher is None:
        return 0, copied
    found = open_decoder(settings.teacher)
    layout = plan_teacher_layout(layout, runnable.config, found.config)
    return estimate_weight_bytes(found.config, layout, dtype), copied


def _job(runnable: CheckpointSource, settings: TrainConfig) -> QuantizeRequest:
    """What quantization-aware training rounds, and by what, from headers alone."""
    from megtool.train.features.qat_setup import make_qat_request

    return make_qat_request(
        runnable.path,
        settings.qat or "",
        settings.calibration,
        iteration=settings.iteration,
        family=settings.family,
        like=settings.like,
    )


def _check_te(settings: TrainConfig, config: ModelConfig) -> None:
    """Refuse what Transformer Engine does not do, or that it is not there.

    Raises:
        MissingPackageError: it is not installed, or does not run on the device.
        UsageError: a linear layer has sides of which it makes no products in FP8.
    """
    from megtool.kernels import transformer_engine
    from megtool.train.features.fp8 import check_te_shapes
    from megtool.train.features.protocol import fp8_settings

    transformer_engine.require((settings.device or usual_device()).partition(":")[0])
    if (told := fp8_settings(settings)) is not None:
        check_te_shapes(told, config, settings.tp)


def _teacher(
    path: Path, settings: TrainConfig, student: Decoder, progress: Progress
) -> list[Decoder]:
    """The teacher's chunks on this rank, in the student's type and layout."""
    from megtool.train.build_model import load_for_training
    from megtool.train.features.distillation import plan_teacher_layout

    found = open_decoder(path)
    groups = student.groups
    layout = plan_teacher_layout(groups.parallel, student.config, found.config)
    return load_for_training(
        found,
        replace(groups, parallel=layout),
        dtype=student.dtype,
        threads=settings.threads,
        vocab_multiple=student.padded_vocab // groups.tp.size,
        progress=progress,
    )
